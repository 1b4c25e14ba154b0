"""Exercises of notebook 03: two kernels that write keys and values to their slots. One leaves padding out, one takes any head_dim.

The mistakes are kernels too, run on paper. `tl` is the stand-in's; Triton is not needed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.kernels.jit import next_power_of_2
from minivllm.kernels.store_kvcache import store_kvcache_torch
from minivllm.teach.exercise import Case, Exercise, Mistake
from minivllm.teach.kernel_exercise import adapter, on_paper
from minivllm.teach.paper_triton import tl

ROW_PARAMETERS = "k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH"
HEAD_PARAMETERS = "k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, K, D, TILE"


def launch_rows(k: Tensor, v: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """store_kernel: a program for each token."""
    return (len(k),), (k.stride(0), v.stride(0), k.shape[1] * k.shape[2])


def launch_heads(k: Tensor, v: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """store_heads_kernel: a program for each token and kv head."""
    num_kv_heads, head_dim = k.shape[1:]
    return (len(k), num_kv_heads), (k.stride(0), v.stride(0), num_kv_heads, head_dim, next_power_of_2(head_dim))


def _reference(launch: Callable) -> Callable[..., int]:
    def function(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> int:
        store_kvcache_torch(k, v, k_cache, v_cache, slot_mapping)
        return torch.Size(launch(k, v)[0]).numel()
    return function


def _rows(keep: Callable = lambda slot: slot >= 0, keep_v: Callable | None = None, slot_of: Callable = lambda slot: slot,
          to: Callable = lambda token, slot, width: slot * width, strides: Callable = lambda k, v, width: (k, v),
          read: str = "kv", written: str = "kv", entry: Callable = lambda token: token, tile: Callable = lambda columns: columns,
          to_strides: bool = False) -> Callable:
    """A store_kernel with something wrong: which slots it keeps (for k, for v), where a row goes and comes from, what is read and written."""
    def kernel(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, k_stride: int, v_stride: int, WIDTH: int) -> None:
        token = tl.program_id(0)
        slot = slot_of(tl.load(slot_mapping + entry(token)))
        columns = tile(tl.arange(0, WIDTH))
        (first, second), sources = strides(k_stride, v_stride, WIDTH), {"k": k, "v": v}
        at, v_at = (slot * first, slot * second) if to_strides else [to(token, slot, WIDTH)] * 2
        if "k" in written:
            tl.store(k_cache + at + columns, tl.load(sources[read[0]] + token * first + columns), mask=keep(slot))
        if "v" in written:
            tl.store(v_cache + v_at + columns, tl.load(sources[read[1]] + token * second + columns), mask=(keep_v or keep)(slot))
    return on_paper(kernel, launch_rows)


def _heads(tile: Callable = lambda c, d: c < d, tile_load: Callable | None = None, keep: Callable = lambda slot: slot >= 0,
           to: Callable = lambda slot, head, k, d, tile: (slot * k + head) * d, come: Callable = lambda head, d, tile: head * d,
           swapped: bool = False, stride: Callable = lambda stride, k, d: stride, written: str = "kv", by_token: bool = False,
          v_by_k: bool = False) -> Callable:
    """The same for store_heads_kernel: the mask of a tile (when it is read, too), where a head goes to and comes from."""
    def kernel(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, k_stride: int, v_stride: int, K: int, D: int, TILE: int) -> None:
        token, head = tl.program_id(int(swapped)), tl.program_id(1 - int(swapped))
        slot = tl.load(slot_mapping + token)
        columns = tl.arange(0, TILE)
        stored, loaded = tile(columns, D) & keep(slot), (tile_load or tile)(columns, D) & keep(slot)
        at = to(token if by_token else slot, head, K, D, TILE) + columns
        from_k, from_v = (token * stride(own, K, D) + come(head, D, TILE) + columns for own in (k_stride, k_stride if v_by_k else v_stride))
        if "k" in written:
            tl.store(k_cache + at, tl.load(k + from_k, mask=loaded), mask=stored)
        if "v" in written:
            tl.store(v_cache + at, tl.load(v + from_v, mask=loaded), mask=stored)
    return on_paper(kernel, launch_heads)


def _slot_not_loaded(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, k_stride: int, v_stride: int, WIDTH: int) -> None:
    slot = slot_mapping + tl.program_id(0)
    tl.store(k_cache + slot * WIDTH + tl.arange(0, WIDTH), tl.load(k + tl.arange(0, WIDTH)))


def _everything(columns: Tensor, *rest: Any) -> Tensor:
    return torch.ones_like(columns, dtype=torch.bool)


def _case(seed: int, slots: list[int], num_slots: int, num_kv_heads: int, head_dim: int, note: str = "", own_rows: bool = False) -> Case:
    """k and v as parts of a wider row, as the qkv projection leaves them; own_rows: v is a tensor of its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(1, 100, shape, generator=generator).float()

    qkv = draw(len(slots), 2 * num_kv_heads + 1 + seed % 3, head_dim)
    k, v = qkv[:, -2 * num_kv_heads:-num_kv_heads], qkv[:, -num_kv_heads:]
    v = draw(len(slots), num_kv_heads, head_dim) if own_rows else v
    caches = -draw(2, num_slots, num_kv_heads, head_dim)  # rubbish, below zero
    return Case({"k": k, "v": v, "k_cache": caches[0].clone(), "v_cache": caches[1].clone(), "slot_mapping": torch.tensor(slots)}, note)


_BEFORE = "slot -1 is not left out: -1 * WIDTH is an address before the cache. Give both stores a mask, slot >= 0"

STORE_KERNEL = Exercise("store_kernel", [
    _case(0, [2], 4, 1, 4, "one token to slot 2"),
    _case(1, [1, -1], 4, 2, 2, "the second token is padding: slot -1"),
    _case(2, [3, 0, 1], 4, 1, 8, "slot 0 is a slot like any other", own_rows=True),
    _case(3, [-1, -1], 3, 2, 4, "nothing but padding"),
    _case(4, [5, -1, 0, 7, -1, 2], 8, 4, 4),
    _case(5, [9, 4, -1, 0, 11, -1, 3], 12, 2, 16, own_rows=True),
], _reference(launch_rows), kind="int", changes=("k_cache", "v_cache"), adapt=adapter(launch_rows, ROW_PARAMETERS), mistakes=[
    Mistake(_rows(keep=lambda slot: slot >= -1), _BEFORE, same_text=True),
    Mistake(_rows(keep_v=lambda slot: slot >= -1), "k is masked and v is not: both stores need the mask slot >= 0", same_text=True),
    Mistake(_rows(keep=lambda slot: slot > 0), "slot 0 is never written: it is a slot like any other, only -1 means none (slot >= 0)"),
    Mistake(_rows(keep=lambda slot: slot < 0), "the mask is the wrong way round: it is True where something is written"),
    Mistake(_rows(slot_of=lambda slot: tl.maximum(slot, 0)), "padding lands in slot 0, which belongs to somebody: it must land nowhere"),
    Mistake(_rows(slot_of=lambda slot: abs(slot)), "padding lands in slot 1, which belongs to somebody: it must land nowhere"),
    Mistake(_rows(strides=lambda k, v, width: (width, width)), "the rows of k and v are not WIDTH apart: they are parts of a wider row. "
            "Token t of k begins at t * k_stride, of v at t * v_stride"),
    Mistake(_rows(strides=lambda k, v, width: (k, k)), "v is read with the stride of k: it has its own, v_stride"),
    Mistake(_rows(to=lambda token, slot, width: token * width), "rows go to the place of their token: they belong to slot * WIDTH"),
    Mistake(_rows(to=lambda token, slot, width: slot), "a slot is WIDTH numbers long, so slot s begins at s * WIDTH and not at s"),
    Mistake(_rows(entry=lambda token: 0), "every program reads the first entry of slot_mapping: its own is slot_mapping + token"),
    Mistake(_rows(written="k"), "only k is written: the same program also writes v, to the same slot of v_cache"),
    Mistake(_rows(written="v"), "only v is written: the same program also writes k, to the same slot of k_cache"),
    Mistake(_rows(written=""), "nothing is written: a kernel returns nothing, what it does is tl.store(address, values)"),
    Mistake(_rows(tile=lambda columns: 0), "only the first number of each row is copied: a row is a tile, so add tl.arange(0, WIDTH) to "
            "the addresses of both load and store"),
    Mistake(_rows(to_strides=True), "k_stride and v_stride are distances in k and v; in the caches slot s begins at s * WIDTH",
            same_text=True),
    Mistake(on_paper(_slot_not_loaded, launch_rows), "slot_mapping + token is the address at which the slot stands: "
            "tl.load(slot_mapping + token) reads the slot", same_text=True),
    Mistake(_rows(read="kk"), "k went into both caches: v belongs into v_cache"),
    Mistake(_rows(read="vk", strides=lambda k, v, width: (v, k)), "k and v are swapped: k belongs into k_cache, v into v_cache"),
])

STORE_HEADS_KERNEL = Exercise("store_heads_kernel", [
    _case(1, [2], 4, 1, 3, "one kv head of 3 numbers in a tile of 4"),
    _case(2, [1, 0], 3, 2, 4, "a tile without anything left over"),
    _case(3, [0, -1, 2], 3, 3, 5, "the second token is padding: slot -1"),
    _case(4, [4, 0, -1, 1], 6, 2, 6, own_rows=True),
    _case(5, [3, 1], 5, 3, 80, "head_dim 80, as some models have"),
    _case(6, [-1, 0, 5], 6, 2, 96, "head_dim 96"),
    _case(7, [4, 2, -1, 0], 8, 4, 7, own_rows=True),
], _reference(launch_heads), kind="int", changes=("k_cache", "v_cache"), adapt=adapter(launch_heads, HEAD_PARAMETERS), mistakes=[
    Mistake(_heads(tile=_everything), "nothing masks the end of the tile: TILE is D rounded up, so columns D to TILE - 1 belong to "
            "somebody else. Load and store with mask=columns < D"),
    Mistake(_heads(tile=_everything, tile_load=lambda c, d: c < d), "the load is masked, the store is not: what the mask leaves out of the "
            "load is stored as zeros over the neighbour. Give both the mask"),
    Mistake(_heads(tile_load=_everything), "the store is masked, the load is not: behind the last head it reads past the end of memory"),
    Mistake(_heads(tile=lambda c, d: c <= d), "columns <= D is one too many: D numbers are columns 0 to D - 1, so columns < D"),
    Mistake(_heads(tile=lambda c, d: c < d - 1), "the last number of every head is left out: columns 0 to D - 1 are wanted, so columns < D"),
    Mistake(_heads(to=lambda slot, head, k, d, tile: slot * d + head * d), "a slot is taken to be D numbers long: it holds K heads of D, so "
            "slot s begins at s * K * D"),
    Mistake(_heads(to=lambda slot, head, k, d, tile: (slot * k + head) * tile), "the cache is addressed in steps of TILE: the padding exists in "
            "the tile only, a head in memory is D numbers long"),
    Mistake(_heads(to=lambda slot, head, k, d, tile: slot * k * d + head * tile), "head h of a slot begins at h * D, not at h * TILE"),
    Mistake(_heads(come=lambda head, d, tile: head * tile), "head h of a token begins at h * D in k and v, not at h * TILE"),
    Mistake(_heads(come=lambda head, d, tile: 0), "every program reads the token's first head: add head * D to where k and v are read"),
    Mistake(_heads(to=lambda slot, head, k, d, tile: slot * k * d), "every head is written to the place of the first: add head * D to where it "
            "goes"),
    Mistake(_heads(keep=lambda slot: slot >= -1), "slot -1 is not left out: combine both conditions, (columns < D) & (slot >= 0)"),
    Mistake(_heads(keep=lambda slot: slot > 0), "slot 0 is never written: only -1 means no slot, so slot >= 0"),
    Mistake(_heads(stride=lambda stride, k, d: k * d), "the tokens of k and v are not K * D apart: token t begins at t * k_stride and t * "
            "v_stride"),
    Mistake(_heads(by_token=True), "heads go to the place of their token: they belong to slot * K * D + head * D"),
    Mistake(_heads(v_by_k=True), "v is read with the stride of k: it has its own, v_stride"),
    Mistake(_heads(written="k"), "only k is written: the same program also writes v, to the same place of v_cache"),
    Mistake(_heads(written="v"), "only v is written: the same program also writes k, to the same place of k_cache"),
    Mistake(_heads(written=""), "nothing is written: a kernel returns nothing, what it does is tl.store(address, values)"),
    Mistake(_heads(tile=lambda c, d: bool(c < d)), "`and`, or & without brackets, asks a whole tile for one True or False. A mask is "
            "joined number by number: (columns < D) & (slot >= 0)", same_text=True),
    Mistake(_heads(swapped=True), "the two program ids are swapped: axis 0 counts tokens and axis 1 heads"),
])

EXERCISES = [STORE_KERNEL, STORE_HEADS_KERNEL]
