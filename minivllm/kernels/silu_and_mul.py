"""silu_and_mul: the middle of a gated MLP, silu(gate) * up, in one pass over the merged projection's output."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.kernels.jit import cdiv, jit, tl, uses_triton

_COLUMNS = 1024


@jit
def _silu_kernel(out, gate_up, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """One program: COLUMNS numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0)
    activated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)  # rounded where torch rounds
    tl.store(out + row * SIZE + columns, activated * up, mask=inside)


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _silu_kernel[(num_tokens, cdiv(size, _COLUMNS))](out, gate_up, SIZE=size, COLUMNS=_COLUMNS, num_warps=4)
    return out


def silu_and_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * size], contiguous: gate, then up -> silu(gate) * up, [T, size]."""
    return (silu_and_mul_triton if uses_triton(gate_up) else silu_and_mul_torch)(gate_up)
