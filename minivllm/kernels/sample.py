"""sample_tokens: from logits to a token in one pass: temperature, Gumbel noise, the largest. No probabilities are written out.

The noise is Philox's, the same numbers as kernels/philox.py: a row's depends on its seed and position alone. A row of 150,000
logits is shared by several programs; a second, small kernel takes the best of theirs. Taught in notebook 08.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels.jit import cdiv, jit, next_power_of_2, tl, uses_triton
from minivllm.kernels.philox import uniform

_COLUMNS = 4096  # for one program


@jit
def _noise(bits):
    """Gumbel noise from 32 random bits, as the torch twin makes it: -log(-log1p(-u)), u in (0, 1)."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32, and the largest float below 1
    series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * 0.25)))  # of -log1p(-u): 1 - u would round to 1, and give an infinity
    return -tl.log(tl.where(u < 0.01, series, -tl.log(1.0 - u)))


@jit
def _best_kernel(best_values, best_columns, logits, temperatures, seeds, positions, floors, logits_stride, V,
                 COLUMNS: tl.constexpr, NOISY: tl.constexpr, FLOORED: tl.constexpr):
    """One program: COLUMNS logits of one row; a Philox call gives the noise of four neighbours.

    FLOORED: what is below its row's floor is not drawn.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    start = logits + row.to(tl.int64) * logits_stride
    if NOISY:
        temperature = tl.load(temperatures + row)
        groups = part * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
        zero = groups * 0
        word = tl.load(positions + row)  # the position, and in the upper half the sibling
        position, sibling = zero + word.to(tl.int32), zero + (word >> 32).to(tl.int32)
        r0, r1, r2, r3 = tl.philox(tl.load(seeds + row), groups, position, sibling, zero)
        scale = 1.0 / tl.where(temperature == 0.0, 1.0, tl.maximum(temperature, 1e-30))  # so that no logit becomes an infinity
        best, column, broken = tl.full([], -float("inf"), tl.float32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for j in tl.static_range(4):
            columns = groups * 4 + j
            raw = tl.load(start + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
            broken += tl.sum((raw != raw).to(tl.int32), axis=0)
            bits = r0 if j == 0 else r1 if j == 1 else r2 if j == 2 else r3
            scores = tl.where(temperature == 0.0, raw, raw * scale + _noise(bits))
            if FLOORED:
                scores = tl.where(raw < tl.load(floors + row), -float("inf"), scores)
            value, index = tl.max(scores, axis=0, return_indices=True)
            place = (part * (COLUMNS // 4) + index) * 4 + j
            better = (value > best) | ((value == best) & (place < column))
            best, column = tl.where(better, value, best), tl.where(better, place, column)
    else:
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        scores = tl.load(start + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        broken = tl.sum((scores != scores).to(tl.int32), axis=0)
        best, index = tl.max(scores, axis=0, return_indices=True)
        column = part * COLUMNS + index
    best = tl.where(broken > 0, float("nan"), best)
    tl.store(best_values + row * tl.num_programs(1) + part, best)
    tl.store(best_columns + row * tl.num_programs(1) + part, column)


@jit
def _last_kernel(tokens, best_values, best_columns, NUM: tl.constexpr, PARTS: tl.constexpr):
    """One program: the best of one row's parts; of equals the first. -1 where some part held a NaN or an infinity."""
    row, parts = tl.program_id(0), tl.arange(0, PARTS)
    values = tl.load(best_values + row * NUM + parts, mask=parts < NUM, other=-float("inf"))
    broken = tl.sum(((values != values) | (values == float("inf"))).to(tl.int32), axis=0)
    part = tl.argmax(values, axis=0)
    finite = (broken == 0) & (tl.max(values, axis=0) > -float("inf"))
    tl.store(tokens + row, tl.where(finite, tl.load(best_columns + row * NUM + part), -1).to(tl.int64))


def sample_tokens_triton(logits: Tensor, temperatures: Tensor | None, seeds: Tensor | None, positions: Tensor | None,
                         floors: Tensor | None = None) -> Tensor:
    """As `sample_tokens`, by the kernels."""
    num_rows, size = logits.shape
    parts = cdiv(size, _COLUMNS)
    values = torch.empty(num_rows, parts, dtype=torch.float32, device=logits.device)
    columns = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    noisy = temperatures is not None
    _best_kernel[(num_rows, parts)](values, columns, logits, temperatures if noisy else logits, seeds if noisy else logits,
                                    positions if noisy else logits, logits if floors is None else floors, logits.stride(0), size,
                                    COLUMNS=_COLUMNS, NOISY=noisy, FLOORED=floors is not None, num_warps=8)
    _last_kernel[(num_rows,)](tokens, values, columns, NUM=parts, PARTS=next_power_of_2(parts), num_warps=1)
    return tokens


def sample_tokens_torch(logits: Tensor, temperatures: Tensor | None, seeds: Tensor | None, positions: Tensor | None,
                        floors: Tensor | None = None) -> Tensor:
    """As `sample_tokens`, in plain torch."""
    best, tokens = logits.max(dim=-1)
    if temperatures is not None:
        scores = logits.float() / torch.where(temperatures == 0, 1.0, temperatures.clamp(min=1e-30))[:, None]
        scores = scores if floors is None else scores.masked_fill(logits < floors[:, None], float("-inf"))
        noise = -torch.log1p(-uniform(seeds, positions, logits.shape[-1]))  # exponential
        tokens = torch.where(temperatures == 0, tokens, (scores - noise.log()).argmax(dim=-1))
    return torch.where(best.isfinite(), tokens, -1)


def sample_tokens(logits: Tensor, temperatures: Tensor | None = None, seeds: Tensor | None = None, positions: Tensor | None = None,
                  floors: Tensor | None = None) -> Tensor:
    """logits [R, V], any float dtype; temperatures float32 [R] (0: the largest logit), seeds and positions int64 [R] -> token ids [R] int64.
    What seeds and positions hold: see philox.uniform. floors float32 [R]: what is below is not drawn (see floors.row_floors).

    Without temperatures every row takes its largest logit. Draws from softmax(logits / temperature); below a temperature of some 1e-4 the
    noise is lost in rounding, and of equals the first is taken. A row with a NaN, with +inf, or with nothing but -inf gives -1.
    """
    return (sample_tokens_triton if uses_triton(logits) else sample_tokens_torch)(logits, temperatures, seeds, positions, floors)
