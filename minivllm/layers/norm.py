"""RMSNorm (Zhang and Sennrich, 2019): divide by the root mean square, scale by a learned weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Over the last dimension, of any shape; computed in float32 inside, returned in x's dtype.

    With a residual [T, size] the sum of both is normalised, and comes back as the new residual: one pass instead of two.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)
