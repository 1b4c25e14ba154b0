"""paged_prefill: causal attention of several new tokens a sequence over all of its context, read through the block table.

The same for a whole prompt, a chunk of one, and what is left of a prompt after a prefix hit: queries are the last tokens of their
row's context. A program holds a tile of queries and walks over the keys (flash attention: Dao and others, 2022), so scores never
reach memory. The query heads of one kv head share a tile, and with it every key that is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.kernels.jit import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    has_early_launch,
    jit,
    next_power_of_2,
    shared_memory,
    tl,
    uses_triton,
)

_LOG2E = 1.4426950408889634
_WIDE_FROM = 2**31  # elements of a cache, from which on 32 bits do not tell one from another
_LARGE_SHARED = 192 << 10  # bytes of shared memory for two programs of 128 queries with two tiles each; an A100 has 163 KiB, an H200 227


@jit
def _opaque(x):
    """x, of 32 bits a number, through empty assembly: the compiler must have it here, and from here on knows nothing about it."""
    return tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=1)


@jit
def _queries(lanes, skipped, num_tokens, GROUP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Of each lane its new token (negative: it stands before them), its head of the group, and which of its WIDTH numbers there are."""
    tokens, head = lanes // HEADS - skipped, lanes % HEADS
    return tokens, head, ((tokens >= 0) & (tokens < num_tokens) & (head < GROUP))[:, None] & (tl.arange(0, WIDTH) < D)[None, :]


@jit
def _load_tile(block, positions, end, k_cache, v_cache, kv_head,
               K: tl.constexpr, D: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):
    """Keys and values [TILE, WIDTH] at `positions`, each in its `block`.

    WIDE: the cache has more elements than 32 bits count. MASKED: some positions may lie behind `end`.
    """
    columns = tl.arange(0, WIDTH)
    block = block.to(tl.int64) if WIDE else block
    at = (block * (S * K * D) + positions % S * (K * D) + kv_head * D)[:, None] + columns[None, :]
    if MASKED or WIDTH != D:
        wanted = (positions < end)[:, None] & (columns < D)[None, :]
        keys, values = tl.load(k_cache + at, mask=wanted, other=0.0), tl.load(v_cache + at, mask=wanted, other=0.0)
    else:  # a mask that is always true costs all the same
        keys, values = tl.load(k_cache + at), tl.load(v_cache + at)
    return keys, values


@jit
def _attend_tile(best, total, mixed, query, query_positions, keys, values, positions, scale, TIGHT: tl.constexpr, MASKED: tl.constexpr):
    """One tile of keys into the running softmax. MASKED: some of them may lie behind a query."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")  # [QUERIES, TILE]
    if MASKED:
        scores = tl.where(positions[None, :] <= query_positions[:, None], scores, -float("inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    faded, weights = tl.exp2((best - higher) * scale), tl.exp2(scores * scale - (higher * scale)[:, None])
    total = total * faded + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * faded[:, None], input_precision="ieee")
    return higher, total, _opaque(mixed) if TIGHT else mixed


@jit(changing=("table_stride",))
def _prefill_kernel(out, q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, rows, scale, q_stride, table_stride,
                    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
                    HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
                    WIDE: tl.constexpr, EARLY: tl.constexpr, TIGHT: tl.constexpr):
    """One program: the queries at TOKENS positions of one row, for the H // K heads of one kv head.

    The last tokens of every row, which have most to read, go first: what is left at the end is short. Within a program the keys
    beside the queries, which need a mask, go first: they are asked for together with the queries, and the loop is free of masks.
    Where a tile lies is looked up while the one before it is worked on.
    EARLY: the kernel comes up while the one before it ends, and lets the next one do so (from sm90 on).
    TIGHT: with 128 registers a thread. They suffice if a product is done, and its weights given up, before the next one begins, and
    if what the store needs is computed anew behind the loop. Else ptxas waits after each part of each product ("serialized").
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()  # until what came before has written q, keys and values
    kv_head, row = tl.program_id(0), tl.load(rows + tl.program_id(1))
    first, context = tl.load(cu_seqlens_q + row), tl.load(context_lens + row)
    num_tokens = tl.load(cu_seqlens_q + row + 1) - first
    earlier = context - num_tokens
    part = tl.cdiv(context, TOKENS) - 1 - tl.program_id(2)  # of the row's positions
    if (part + 1) * TOKENS <= earlier:
        return
    lanes, columns = tl.arange(0, TOKENS * HEADS), tl.arange(0, WIDTH)
    skipped = earlier - part * TOKENS
    query_positions = part * TOKENS + lanes // HEADS
    tokens, head, wanted = _queries(lanes, skipped, num_tokens, H // K, D, HEADS, WIDTH)
    at = (first + tokens).to(tl.int64)[:, None] * q_stride + (kv_head * (H // K) + head)[:, None] * D + columns[None, :]
    query = tl.load(q + at, mask=wanted, other=0.0)  # [TOKENS * HEADS, WIDTH]
    row_table = block_tables + row.to(tl.int64) * table_stride
    best = tl.full([TOKENS * HEADS], -float("inf"), tl.float32)
    total = tl.zeros([TOKENS * HEADS], tl.float32)
    mixed = tl.zeros([TOKENS * HEADS, WIDTH], tl.float32)
    open_end = part * TOKENS // TILE * TILE         # up to here every query reads every key
    end = tl.minimum(context, (part + 1) * TOKENS)  # no query reads further
    span = tl.arange(0, TILE)
    # Of the loop's first tile; the mask is for a loop that has none.
    block = tl.load(row_table + (tl.maximum(open_end - TILE, 0) + span) // S, mask=span < end, other=0)
    # In the first of these tiles every query reads a key. Those behind `end` add nothing; a branch around them would cost registers.
    for beyond in tl.static_range(0, max(TOKENS, TILE), TILE):
        positions = open_end + beyond + span
        beside = tl.load(row_table + positions // S, mask=positions < end, other=0)
        keys, values = _load_tile(beside, positions, end, k_cache, v_cache, kv_head, K, D, S, WIDTH, WIDE, True)
        best, total, mixed = _attend_tile(best, total, mixed, query, query_positions, keys, values, positions, scale, TIGHT, True)
    for done in range(0, open_end, TILE):
        start = open_end - TILE - done  # from the diagonal to the beginning: 1% faster on an H200
        keys, values = _load_tile(block, start + span, end, k_cache, v_cache, kv_head, K, D, S, WIDTH, WIDE, False)
        block = tl.load(row_table + (tl.maximum(open_end - 2 * TILE - done, 0) + span) // S)
        best, total, mixed = _attend_tile(best, total, mixed, query, query_positions, keys, values, start + span, scale, TIGHT, False)
    tokens, head, wanted = _queries(_opaque(lanes) if TIGHT else lanes, skipped, num_tokens, H // K, D, HEADS, WIDTH)
    mixed *= (1.0 / total)[:, None]
    to = ((first + tokens).to(tl.int64)[:, None] * H + (kv_head * (H // K) + head)[:, None]) * D + columns[None, :]
    tl.store(out + to, mixed.to(out.dtype.element_ty), mask=wanted, cache_modifier=".cs")  # leaves the cache to keys and values


def launch_options(element_size: int, head_dim: int, group: int, shared: int, early: bool,
                   queries: int | None = None, tile: int | None = None) -> tuple[dict[str, Any], dict[str, int]]:
    """(the kernel's constants, Triton's options) for `group` query heads a kv head, of `head_dim` numbers of `element_size` bytes.

    float32 is multiplied without the matrix unit, by threads that hold what they multiply: few queries or few keys, for many threads.
    With more, ptxas runs out of registers and the kernel gets 10 times slower; these are among the fastest on an H200 of those for
    which it does not (benchmarks/h200/float32_shapes.json).
    16 bit on an H200: two programs of eight warps share a processor, each with half of its registers; while one waits for keys or works
    on its softmax, the other keeps the matrix unit busy. Elsewhere: four warps and as many queries as find room in their registers.
    """
    heads, width = next_power_of_2(group), next_power_of_2(max(16, head_dim))  # tl.dot sums over at least 16
    if element_size == 4:
        found_queries, found_tile = (64, 32) if width <= 64 else (32, 64) if width <= 128 else (16, 16)
        options = {"num_warps": 8 if width <= 128 else 4, "num_stages": 2}
    elif width > 128 or shared < _LARGE_SHARED:
        found_queries, found_tile = 64, 64 if width <= 128 else 32
        options = {"num_warps": 4, "num_stages": 2}
    else:
        found_queries, found_tile = 128, 64
        options = {"num_warps": 8, "num_stages": 2} if queries or tile else {"num_warps": 8, "num_stages": 2, "maxnreg": 128}  # enough for this shape
    constants = {"HEADS": heads, "WIDTH": width, "TOKENS": max(16, heads, queries or found_queries) // heads, "TILE": tile or found_tile,
                 "EARLY": early, "TIGHT": early and "maxnreg" in options}  # early: from sm90 on, where the matrix unit works by itself
    return constants, {**options, "launch_pdl": True} if early else options


def paged_prefill_triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor,
                         rows: Tensor, most_tokens: int, block_size: int, scale: float, out: Tensor | None = None,
                         tile: int | None = None, queries: int | None = None) -> Tensor:
    """As `paged_prefill`, by the kernel, which uses the matrix unit: not for a T4."""
    (_, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[1]
    constants, options = launch_options(q.element_size(), head_dim, num_heads // num_kv_heads, shared_memory(q.device), has_early_launch(q.device),
                                        queries, tile)
    tokens = constants["TOKENS"]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    parts = min(cdiv(most_tokens, tokens) + 1, cdiv(block_tables.shape[1] * block_size, tokens))  # of a row: its first token may lie inside of one
    _prefill_kernel[(num_kv_heads, len(rows), parts)](
        out, q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, rows, scale * _LOG2E, q.stride(0), block_tables.stride(0),
        H=num_heads, K=num_kv_heads, D=head_dim, S=block_size, WIDE=k_cache.numel() >= _WIDE_FROM, **constants, **options)
    return out


def paged_prefill_torch(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor,
                        rows: Tensor, most_tokens: int, block_size: int, scale: float, out: Tensor | None = None) -> Tensor:
    """As `paged_prefill`, in plain torch, row by row."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    group = q.shape[1] // k_cache.shape[1]
    for row in rows.tolist():
        begin, end, context = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]), int(context_lens[row])
        positions = torch.arange(context, device=q.device)
        slots = block_tables[row].long()[positions // block_size] * block_size + positions % block_size
        keys, values = (cache[slots].float().repeat_interleave(group, dim=1) for cache in (k_cache, v_cache))  # [M, H, D]
        scores = torch.einsum("thd,mhd->htm", q[begin:end].float(), keys) * scale
        scores.masked_fill_(positions > positions[context - (end - begin):, None], -torch.inf)
        out[begin:end] = torch.einsum("htm,mhd->thd", scores.softmax(dim=-1), values).to(q.dtype)
    return out


def paged_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor,
                  rows: Tensor, most_tokens: int, block_size: int, scale: float, out: Tensor | None = None) -> Tensor:
    """q [T, H, D], the tokens of B rows one after the other, their K/V already in the cache; k_cache, v_cache [N * S, K, D];

    block_tables [B, most blocks] int32, context_lens [B] int32, cu_seqlens_q [B + 1] int32; rows [R] int32: which rows to compute,
    none with more than `most_tokens` tokens. Returns [T, H, D] (`out`, if given), of which the tokens of other rows are not written.
    """
    kernel = paged_prefill_triton if uses_triton(q) else paged_prefill_torch
    return kernel(q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, rows, most_tokens, block_size, scale, out)
