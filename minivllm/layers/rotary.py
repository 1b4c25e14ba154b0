"""Rotary position embedding (Su et al., 2021): turn each pair of a head's coordinates by an angle that grows with the position.

A pair is coordinate i and coordinate i + D/2, as in Hugging Face's checkpoints.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minivllm.kernels.rope_store import rotate

if TYPE_CHECKING:  # models are made of layers, not the other way round
    from minivllm.models.config import RopeScaling


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaled frequencies [D / 2]: divided by `factor` where they are low, as they are where high, blended between."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0, 1))


class RotaryEmbedding(nn.Module):
    """Angles for `max_positions` positions, in float32: position * theta^(-2i/D) for i in 0 .. D/2 - 1, where nothing scales them."""

    def __init__(self, head_dim: int, max_positions: int, theta: float, scaling: RopeScaling | None = None):
        super().__init__()
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [D / 2]
        if scaling is not None:
            frequencies = scaled(frequencies, scaling)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)     # [max_positions, D / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, D], positions [T] int64 -> the same shape and dtype, turned."""
        return rotate(x, self.cos, self.sin, positions)
