"""rms_norm and add_rms_norm: a layer's norm, and the sum before it in the same pass (one read and one write instead of two)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.kernels.jit import jit, next_power_of_2, tl, uses_triton


@jit
def _norm_kernel(out, total, x, residual, weight, eps, x_stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr):
    """One program: one row of SIZE numbers. ADD: x + residual is normalised, and written to `total` as well."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        values = (values.to(tl.float32) + tl.load(residual + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
        tl.store(total + row * SIZE + columns, values, mask=inside)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if residual is not None else None
    size = x.shape[-1]
    columns = next_power_of_2(size)
    if len(x):
        _norm_kernel[(len(x),)](out, out if total is None else total, x, x if residual is None else residual, weight, eps, x.stride(0),
                                SIZE=size, COLUMNS=columns, ADD=residual is not None, num_warps=max(1, min(8, columns // 256)))
    return out, total


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight, eps)[0]


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size] -> x / sqrt(mean(x^2) + eps) * weight over the last dimension; in float32 inside, in x's dtype outside."""
    return rms_norm_triton(x, weight, eps) if uses_triton(x) and x.dim() == 2 else rms_norm_torch(x, weight, eps)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _launch(x, residual, weight, eps)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return F.rms_norm(total, weight.shape, weight, eps), total


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, size], residual contiguous -> (rms_norm(x + residual), x + residual)."""
    return (add_rms_norm_triton if uses_triton(x) else add_rms_norm_torch)(x, residual, weight, eps)
