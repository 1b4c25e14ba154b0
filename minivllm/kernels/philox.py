"""Philox-4x32-10 (Salmon et al., 2011): random numbers as a pure function of a counter and a key.

No state is carried from call to call, so a request's noise can depend on its own seed and position alone, wherever it stands in
whatever batch, and a kernel on another device can draw the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words from a counter of four words and a key of two; int64 tensors of values 0 .. 2^32 - 1 that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 64 bits each; the sign bit is just the top one
        c0, c1, c2, c3 = ((product1 >> 32) & _MASK) ^ c1 ^ k0, product1 & _MASK, ((product0 >> 32) & _MASK) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Uniforms in (0, 1), float32 [R, size]: row r's depend on seeds[r] (int64, its 64 bits are the key) and positions[r] alone.

    The counter is (column // 4, position, sibling, 0); a call yields four columns. `positions` int64 holds the position in its lower 32
    bits, and in those above them the sibling: the answer's number where one request has several.
    Small values keep all 32 bits; the largest is just below 1.
    """
    groups = torch.arange(-(-size // 4), device=seeds.device)  # [size / 4]
    seeds, siblings, positions = seeds[:, None], (positions[:, None] >> 32) & _MASK, positions[:, None] & _MASK
    words = philox_4x32((groups[None], positions, siblings, torch.zeros_like(positions)), (seeds & _MASK, (seeds >> 32) & _MASK))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :size]  # [R, size]
    return ((bits.float() + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)
