"""Rotary position embedding (Su et al., 2021): turn each pair of a head's coordinates by an angle that grows with the position.

A pair is coordinate i and coordinate i + D/2, as in Hugging Face's checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Angles for `max_positions` positions, in float32: position * theta^(-2i/D) for i in 0 .. D/2 - 1."""

    def __init__(self, head_dim: int, max_positions: int, theta: float):
        super().__init__()
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [D / 2]
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)     # [max_positions, D / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, D], positions [T] int64 -> the same shape and dtype, turned."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # [T, 1, D / 2]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
