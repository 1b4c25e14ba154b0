"""row_floors: above which logits top_k, top_p and min_p leave a row's tokens. What is below its floor is not drawn.

Each filter keeps a row's best, however many: so a filter is a floor, and nothing need be sorted to find it. "How much is at or above
this floor?" is one pass over the row, without a write; each pass asks it of three floors at once, which leaves a quarter of the
interval. Of 16-bit logits there are 65,536, so eight passes find the floor exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels.jit import jit, tl, uses_triton

_COLUMNS = 8192  # logits on their way at once, for 1,024 threads


@jit
def _turned(bits, BITS: tl.constexpr):
    """From a float's bits to an integer in the order of the floats, and back: of negative ones all bits but the sign are turned around."""
    return bits ^ ((bits >> 31) & (0x7FFF if BITS == 16 else 0x7FFFFFFF))


@jit
def _ordered(raw, BITS: tl.constexpr):
    """Floats as integers in the same order."""
    return _turned(raw.to(tl.int16 if BITS == 16 else tl.int32, bitcast=True).to(tl.int32), BITS)


@jit
def _above(start, V, first, second, third, best, scale, COLUMNS: tl.constexpr, BITS: tl.constexpr, WEIGHED: tl.constexpr):
    """How many logits of a row are at or above each of three floors; WEIGHED: what their probabilities add up to, the best one's taken as 1."""
    first, second, third = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
    a, b, c = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, V, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        raw = tl.load(start + columns, mask=columns < V, other=-float("inf"))
        order = _ordered(raw, BITS)
        amount = tl.exp2((raw.to(tl.float32) - best) * scale) if WEIGHED else tl.where(columns < V, 1.0, 0.0)
        a += tl.where(order >= first, amount, 0.0)
        b += tl.where(order >= second, amount, 0.0)
        c += tl.where(order >= third, amount, 0.0)
    return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0)


@jit
def _highest(start, V, low, high, wanted, best, scale, COLUMNS: tl.constexpr, BITS: tl.constexpr, WEIGHED: tl.constexpr):
    """The highest floor at or above which there is as much as is wanted. There is at `low`, and not at `high`."""
    while high - low > 1:
        quarter = (high - low + 3) // 4
        first, second, third = low + quarter, low + 2 * quarter, low + 3 * quarter
        a, b, c = _above(start, V, first, second, third, best, scale, COLUMNS, BITS, WEIGHED)
        low = tl.where(c >= wanted, third, tl.where(b >= wanted, second, tl.where(a >= wanted, first, low)))
        high = tl.where(a >= wanted, tl.where(b >= wanted, tl.where(c >= wanted, high, third), second), first)  # so too if a is no number
    return low


@jit
def _floor_kernel(floors, logits, temperatures, top_ks, top_ps, min_ps, logits_stride, V, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """One program: one row. BITS: of a logit."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * logits_stride
    most = tl.full([COLUMNS], -float("inf"), tl.float32)
    for begin in range(0, V, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        most = tl.maximum(most, tl.load(start + columns, mask=columns < V, other=-float("inf")).to(tl.float32))
    best = tl.max(most, axis=0)
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature == 0.0, 1.0, tl.maximum(temperature, 1e-30))
    scale = 1.4426950408889634 / temperature  # log2(e): the hardware has 2^x
    top = _ordered(best.to(logits.dtype.element_ty), BITS).to(tl.int64)
    low = tl.full([], -(1 << (BITS - 1)), tl.int64)  # below every float: all are at or above it
    k, p = tl.load(top_ks + row), tl.load(top_ps + row)
    if (k > 0) & (k < V):
        low = _highest(start, V, low, top + 1, k.to(tl.float32), best, scale, COLUMNS, BITS, False)
    if p < 1.0:
        whole, _, _ = _above(start, V, low, low, low, best, scale, COLUMNS, BITS, True)  # of what top_k has left
        low = _highest(start, V, low, top + 1, p * whole, best, scale, COLUMNS, BITS, True)
    floor = _turned(low.to(tl.int32), BITS).to(tl.int16 if BITS == 16 else tl.int32).to(logits.dtype.element_ty, bitcast=True).to(tl.float32)
    floor = tl.where(floor == floor, floor, -float("inf"))  # the lowest integers are no numbers
    floor = tl.maximum(floor, best + temperature * tl.log(tl.load(min_ps + row)))  # min_p = 0: -inf
    tl.store(floors + row, tl.minimum(floor, best))  # if p is 0 in float32 nothing reaches it


def row_floors_triton(logits: Tensor, temperatures: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None) -> Tensor:
    """As `row_floors`, by the kernel."""
    floors = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    all_kept = lambda value, dtype: torch.full(temperatures.shape, value, dtype=dtype, device=logits.device)
    top_ks = all_kept(0, torch.int64) if top_ks is None else top_ks  # one kernel for all, not one to compile for each set of filters
    top_ps, min_ps = all_kept(1, torch.float32) if top_ps is None else top_ps, all_kept(0, torch.float32) if min_ps is None else min_ps
    _floor_kernel[(len(logits),)](floors, logits, temperatures, top_ks, top_ps, min_ps, logits.stride(0), logits.shape[1],
                                  COLUMNS=_COLUMNS, BITS=8 * logits.element_size(), num_warps=32)
    return floors


def row_floors_torch(logits: Tensor, temperatures: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None) -> Tensor:
    """As `row_floors`, by a sort."""
    ordered = logits.float().sort(dim=-1, descending=True).values
    scores = (ordered - ordered[:, :1]) / torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    if top_ks is not None:
        smallest = ordered.gather(-1, torch.where(top_ks > 0, top_ks.clamp(max=scores.shape[-1]), scores.shape[-1])[:, None] - 1)
        scores = scores.masked_fill(ordered < smallest, float("-inf"))  # scores are rounded: of two neighbours they may be equal
    if top_ps is not None:
        probabilities = scores.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        left_out = (before >= top_ps[:, None]) & (top_ps < 1)[:, None]
        left_out[:, 0] = False
        scores = scores.masked_fill(left_out, float("-inf"))
    if min_ps is not None:
        scores = scores.masked_fill(scores < min_ps.log()[:, None], float("-inf"))
    return ordered.masked_fill(scores == float("-inf"), float("inf")).amin(dim=-1)


def row_floors(logits: Tensor, temperatures: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None) -> Tensor:
    """logits [R, V], float32 or 16 bit; temperatures float32 [R]; top_ks int64 [R], 0: all; top_ps and min_ps float32 [R], 1 and 0: all; None
    where no row asks for a filter -> float32 [R]: logits at or above it may be drawn, also those that are equal to the last one kept.

    In this order, each of what the one before has left: divide by the temperature (0: as 1); keep the k largest; the most likely whose
    probabilities reach p, the one that crosses p included; those at least min_p times as likely as the most likely.
    """
    return (row_floors_triton if uses_triton(logits) else row_floors_torch)(logits, temperatures, top_ks, top_ps, min_ps)
