"""norm_rope_store: all that lies between the qkv projection and attention, in one pass: q/k norm, rotary positions, the cache write.

Apart it is four to six launches a layer, each of which reads and writes what the one before wrote.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.kernels.jit import jit, next_power_of_2, tl, uses_triton
from minivllm.kernels.store_kvcache import store_kvcache_torch


@jit
def _normed_half(half, other, weight, columns, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """One half of a head's numbers, normalised over both halves if NORM."""
    if NORM:
        scale = tl.rsqrt((tl.sum(half * half, axis=1) + tl.sum(other * other, axis=1)) / D + eps)
        half = half * scale[:, None] * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return half


@jit
def _rope_store_kernel(q_out, qkv, q_weight, k_weight, eps, cos, sin, positions, k_cache, v_cache, slot_mapping, qkv_stride,
                       H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """One program: one token, all its heads. A head's pair is coordinate i and i + D/2, so its halves are loaded apart."""
    token = tl.program_id(0).to(tl.int64)
    heads, columns = tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = columns < D // 2
    wanted = (heads < H + K)[:, None] & inside[None, :]
    at = qkv + token * qkv_stride + heads[:, None] * D + columns[None, :]
    dtype = q_out.dtype.element_ty
    first, second = tl.load(at, mask=wanted, other=0.0).to(tl.float32), tl.load(at + D // 2, mask=wanted, other=0.0).to(tl.float32)
    if NORM:  # q's weight for the first H heads, k's for the others; rounded as a layer of its own would
        is_query = (heads < H)[:, None]
        first, second = (tl.where(is_query, _normed_half(first, second, q_weight, columns, inside, eps, D, True),
                                  _normed_half(first, second, k_weight, columns, inside, eps, D, True)).to(dtype).to(tl.float32),
                         tl.where(is_query, _normed_half(second, first, q_weight + D // 2, columns, inside, eps, D, True),
                                  _normed_half(second, first, k_weight + D // 2, columns, inside, eps, D, True)).to(dtype).to(tl.float32))
    angle = tl.load(positions + token) * (D // 2) + columns
    c, s = tl.load(cos + angle, mask=inside, other=0.0)[None, :], tl.load(sin + angle, mask=inside, other=0.0)[None, :]
    turned, turned_second = (first * c - second * s).to(dtype), (second * c + first * s).to(dtype)
    to_q = q_out + (token * H + heads[:, None]) * D + columns[None, :]
    is_q = (heads < H)[:, None] & inside[None, :]
    tl.store(to_q, turned, mask=is_q)
    tl.store(to_q + D // 2, turned_second, mask=is_q)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        is_k = ((heads >= H) & (heads < H + K))[:, None] & inside[None, :]
        to_cache = (slot * K + heads[:, None] - H) * D + columns[None, :]
        tl.store(k_cache + to_cache, turned, mask=is_k)
        tl.store(k_cache + to_cache + D // 2, turned_second, mask=is_k)
        values = at + K * D  # the K heads behind those of k, on the lanes of k
        tl.store(v_cache + to_cache, tl.load(values, mask=is_k), mask=is_k)
        tl.store(v_cache + to_cache + D // 2, tl.load(values + D // 2, mask=is_k), mask=is_k)


def norm_rope_store_triton(qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor,
                           k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, num_heads: int) -> Tensor:
    num_kv_heads, head_dim = k_cache.shape[1:]
    q = torch.empty(len(qkv), num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    norm, heads = q_weight is not None, next_power_of_2(num_heads + num_kv_heads)
    if len(qkv):
        _rope_store_kernel[(len(qkv),)](
            q, qkv, q_weight if norm else qkv, k_weight if norm else qkv, eps, cos, sin, positions, k_cache, v_cache, slot_mapping, qkv.stride(0),
            H=num_heads, K=num_kv_heads, D=head_dim, HEADS=heads, HALF=next_power_of_2(head_dim // 2), NORM=norm, num_warps=4)
    return q


def norm_rope_store_torch(qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor,
                          k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, num_heads: int) -> Tensor:
    num_kv_heads, head_dim = k_cache.shape[1:]
    q, k, v = qkv.view(len(qkv), -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None:
        q, k = F.rms_norm(q, (head_dim,), q_weight, eps), F.rms_norm(k, (head_dim,), k_weight, eps)
    q, k = rotate(torch.cat((q, k), dim=1), cos, sin, positions).split((num_heads, num_kv_heads), dim=1)
    store_kvcache_torch(k, v, k_cache, v_cache, slot_mapping)
    return q


def norm_rope_store(qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor,
                    k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, num_heads: int) -> Tensor:
    """qkv [T, (H + 2 K) * D]: q and k are normalised (weights [D], or None for none) and turned, k and v go to their slots. Returns q [T, H, D].

    cos, sin [max positions, D / 2] float32; positions [T] int64; k_cache, v_cache [N * S, K, D]; slot_mapping [T] int64, -1: write nothing.
    """
    kernel = norm_rope_store_triton if uses_triton(qkv) else norm_rope_store_torch
    return kernel(qkv, q_weight, k_weight, eps, cos, sin, positions, k_cache, v_cache, slot_mapping, num_heads)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """x [T, heads, D], turned by the angles of its positions; the same dtype, in float32 inside."""
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, D / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)
