"""paged_decode: attention of one new token a sequence over its whole context, read from the pages through the block table.

A decode reads every key and value once and does little with each, so its time is that of reading: what counts is that enough
programs read at once. The tiles of a row's context are therefore dealt out to several programs (flash-decoding: Dao and others,
2023), each of which keeps a running softmax; a second, small kernel joins the parts. Taught in notebook 04.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from minivllm.kernels.jit import gdc_launch_dependents, gdc_wait, has_early_launch, jit, next_power_of_2, shared_memory, tl, uses_triton

_MIXED_SPLITS = 4  # in a mixed step the rows' number changes all the time, and each number of splits is a kernel to compile
_LOG2E = 1.4426950408889634  # the hardware has 2^x, not e^x
OPTIONS = {"num_warps": 4, "num_stages": 3}  # of the decode kernel, on every device


@jit(changing=("table_stride",))
def _decode_kernel(out, partial, log_sums, q, k_cache, v_cache, block_tables, context_lens, rows, tokens, scale, q_stride, table_stride,
                   H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
                   HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
                   DOT: tl.constexpr, INDEXED: tl.constexpr, EARLY: tl.constexpr):
    """One program: the H // K query heads of one kv head, of one row, over every SPLITS-th tile of its context.

    HEADS and WIDTH are H // K and D rounded up to what a tile needs. DOT: use the matrix unit; else multiply and add.
    INDEXED: the rows to compute are listed in `rows`, the places of their tokens in `tokens`; else row b's token is token b.
    EARLY: the kernel comes up while the one before it ends, and lets the next one do so (from sm90 on).
    """
    kv_head, index, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if EARLY:
        gdc_launch_dependents()  # the joining kernel may come up beside this one
        gdc_wait()               # until what came before has written q, keys and values
    row = tl.load(rows + index) if INDEXED else index
    token = (tl.load(tokens + index) if INDEXED else index).to(tl.int64)
    context = tl.load(context_lens + row)
    lanes, columns = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    heads = kv_head * (H // K) + lanes
    is_head, is_column = lanes < H // K, columns < D
    query = tl.load(q + token * q_stride + heads[:, None] * D + columns[None, :],
                    mask=is_head[:, None] & is_column[None, :], other=0.0)  # [HEADS, WIDTH]
    best = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, WIDTH], tl.float32)
    for start in range(split * TILE, context, SPLITS * TILE):
        positions = start + tl.arange(0, TILE)
        inside = positions < context
        block = tl.load(block_tables + row.to(tl.int64) * table_stride + positions // S, mask=inside, other=0).to(tl.int64)
        at = ((block * S + positions % S) * K + kv_head) * D
        wanted = inside[:, None] & is_column[None, :]
        keys = tl.load(k_cache + at[:, None] + columns[None, :], mask=wanted, other=0.0)  # [TILE, WIDTH]
        values = tl.load(v_cache + at[:, None] + columns[None, :], mask=wanted, other=0.0)
        if DOT:
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee")  # [HEADS, TILE]
        else:
            scores = tl.sum(query.to(tl.float32)[:, None, :] * keys.to(tl.float32)[None, :, :], axis=2)
        scores = tl.where(inside[None, :], scores * scale, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        faded, weights = tl.exp2(best - higher), tl.exp2(scores - higher[:, None])
        total = total * faded + tl.sum(weights, axis=1)
        if DOT:
            mixed = mixed * faded[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        else:
            mixed = mixed * faded[:, None] + tl.sum(weights[:, :, None] * values.to(tl.float32)[None, :, :], axis=1)
        best = higher
    wanted = is_head[:, None] & is_column[None, :]
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]  # a part of nothing is zero, not NaN
    if SPLITS == 1:
        tl.store(out + (token * H + heads)[:, None] * D + columns[None, :], mixed.to(out.dtype.element_ty), mask=wanted)
    else:
        at = (index.to(tl.int64) * H + heads) * SPLITS + split
        tl.store(partial + at[:, None] * D + columns[None, :], mixed, mask=wanted)
        tl.store(log_sums + at, best + tl.log2(total), mask=is_head)  # -inf for a part of nothing


@jit
def _join_kernel(out, partial, log_sums, tokens, H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                 SPLITS: tl.constexpr, PARTS: tl.constexpr, INDEXED: tl.constexpr, EARLY: tl.constexpr):
    """One program: WIDTH columns of one head of one row. Parts are weighed by the sums of their exponentials."""
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts, columns = tl.arange(0, PARTS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    at = (index * H + head) * SPLITS + parts
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()  # until the parts are written
    token = (tl.load(tokens + index) if INDEXED else index).to(tl.int64)
    sums = tl.load(log_sums + at, mask=parts < SPLITS, other=-float("inf"))
    best = tl.max(sums, axis=0)
    weights = tl.where(sums > -float("inf"), tl.exp2(sums - tl.where(best > -float("inf"), best, 0.0)), 0.0)
    wanted = (parts < SPLITS)[:, None] & (columns < D)[None, :]
    mixed = tl.load(partial + at[:, None] * D + columns[None, :], mask=wanted, other=0.0)
    total = tl.sum(weights, axis=0)
    joined = tl.sum(mixed * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (token * H + head) * D + columns, joined.to(out.dtype.element_ty), mask=columns < D)


@functools.cache
def launch_shape(num_rows: int, num_kv_heads: int, num_processors: int, most_splits: int, row_bytes: int, shared: int) -> tuple[int, int]:
    """(splits, tile): how many programs share a row's context, and how many tokens each takes in at a time.

    With many rows: eight programs a processor, which evens out unequal lengths, and large tiles. With few: four, and half as large,
    so that two programs at once find room on a processor. Never more than `most_splits`. Found by trying all on an H200.
    """
    programs = num_rows * num_kv_heads
    if programs >= num_processors:
        splits, bytes_of_keys = math.ceil(8 * num_processors / programs), 32 << 10
        splits = splits if splits <= 3 else next_power_of_2(splits)  # each number is a kernel to compile
    else:
        splits, bytes_of_keys = next_power_of_2(4 * num_processors // programs + 1) // 2, 16 << 10
    bytes_of_keys = min(bytes_of_keys, shared // 6)  # of keys and of values, two tiles each are under way
    tile = max(16, min(128, bytes_of_keys // row_bytes))
    return max(1, min(splits, most_splits)), 1 << (tile.bit_length() - 1)


def tile_constants(tile: int, element_size: int, head_dim: int, group: int, dot: bool) -> dict[str, Any]:
    """The kernel's tiles, of `tile` tokens on the matrix unit, for `group` query heads a kv head, of `head_dim` numbers of `element_size` bytes.

    float32 is not for the matrix unit. Without it a program holds the products of all its heads and keys: few keys, but no head more
    than there are, where the matrix unit wants 16. On an H200 0.8 to 3 times as fast as on it with 1 to 4 heads,
    0.6 times with 8 (benchmarks/h200/float32_shapes.json).
    """
    dot = dot and element_size == 2
    heads, width = next_power_of_2(max(group, 16 if dot else 1)), next_power_of_2(max(head_dim, 16 if dot else 1))
    return {"HEADS": heads, "WIDTH": width, "TILE": tile if dot else max(8, min(32, 8192 // (heads * width))), "DOT": dot}


def join_shape(splits: int, width: int) -> tuple[int, int]:
    """(parts, columns) of a program that joins: one warp, whose threads hold at most 64 numbers each. More warps would wait for each other."""
    parts = next_power_of_2(splits)
    return parts, min(width, max(1, 2048 // parts))


def paged_decode_triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, block_size: int, scale: float,
                        rows: Tensor | None = None, tokens: Tensor | None = None, out: Tensor | None = None,
                        dot: bool = True, splits: int | None = None, tile: int | None = None) -> Tensor:
    """As `paged_decode`, by the kernels. dot: 16-bit numbers go to the matrix unit (a T4 gets scalar code for it, and does better without)."""
    (_, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[1]
    indexed, num_rows = rows is not None, len(q if rows is None else rows)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    most = next_power_of_2(block_tables.shape[1] * block_size // 128)  # parts of 128 tokens or more
    shape = launch_shape(num_rows, num_kv_heads, processors, most, q.element_size() * next_power_of_2(head_dim), shared_memory(q.device))
    splits = splits or (_MIXED_SPLITS if indexed else shape[0])
    tiles = tile_constants(shape[1], q.element_size(), head_dim, num_heads // num_kv_heads, dot)
    if tile is not None:
        tiles["TILE"] = tile
    early = has_early_launch(q.device)
    options = {"launch_pdl": True} if early else {}
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    parts = (num_rows, num_heads, splits)
    partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device) if splits > 1 else out
    log_sums = torch.empty(parts, dtype=torch.float32, device=q.device) if splits > 1 else out
    rows, tokens = (rows, tokens) if indexed else (context_lens, context_lens)
    _decode_kernel[(num_kv_heads, num_rows, splits)](
        out, partial, log_sums, q, k_cache, v_cache, block_tables, context_lens, rows, tokens, scale * _LOG2E, q.stride(0), block_tables.stride(0),
        H=num_heads, K=num_kv_heads, D=head_dim, S=block_size, SPLITS=splits, INDEXED=indexed, EARLY=early, **tiles, **OPTIONS, **options)
    if splits > 1:
        parts, columns = join_shape(splits, tiles["WIDTH"])
        _join_kernel[(num_rows, num_heads, tiles["WIDTH"] // columns)](
            out, partial, log_sums, tokens, H=num_heads, D=head_dim, WIDTH=columns, SPLITS=splits, PARTS=parts, INDEXED=indexed, EARLY=early,
            num_warps=1, **options)
    return out


def paged_decode_torch(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, block_size: int, scale: float,
                       rows: Tensor | None = None, tokens: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """As `paged_decode`, in plain torch: gather every row's keys and values, then attend. The kernel saves this copy."""
    if rows is not None:
        out = torch.empty_like(q) if out is None else out
        out[tokens.long()] = paged_decode_torch(q[tokens.long()], k_cache, v_cache, block_tables[rows.long()], context_lens[rows.long()],
                                                block_size, scale)
        return out
    most = int(context_lens.max()) if len(context_lens) else 0
    positions = torch.arange(most, device=q.device)
    slots = block_tables.long()[:, positions // block_size] * block_size + positions % block_size  # [B, M]
    inside = positions < context_lens[:, None]
    group = q.shape[1] // k_cache.shape[1]
    keys, values = (cache[slots].float().repeat_interleave(group, dim=2) for cache in (k_cache, v_cache))  # [B, M, H, D]
    scores = torch.einsum("bhd,bmhd->bhm", q.float(), keys) * scale
    weights = scores.masked_fill(~inside[:, None], -torch.inf).softmax(dim=-1).nan_to_num(0.0)  # a row without context gives zeros
    return torch.einsum("bhm,bmhd->bhd", weights, values).to(q.dtype)


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, block_size: int, scale: float,
                 rows: Tensor | None = None, tokens: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """q [B, H, D], one token a row, its own K/V already in the cache; k_cache, v_cache [N * S, K, D]; block_tables [B, most blocks] int32;

    context_lens [B] int32, 0 allowed (such a row gives zeros) -> [B, H, D] in q's dtype. Sums are kept in float32.
    In a mixed batch: rows [R] int32 says which rows to compute, tokens [R] int32 where each one's token stands in q [T, H, D] and `out`.
    """
    kernel = paged_decode_triton if uses_triton(q) else paged_decode_torch
    return kernel(q, k_cache, v_cache, block_tables, context_lens, block_size, scale, rows, tokens, out)
