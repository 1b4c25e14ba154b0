"""The attention layer: what happens between the qkv projection and the output projection.

It owns q/k norm, rotary, the cache write and the attention itself, so that a backend may fuse them; and it owns its layer's
view of the KV cache, which the worker hands it. The model above knows nothing of all this. Built in notebooks 01 to 04.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.attention import AttentionBackend
from minivllm.attention.metadata import AttentionMetadata
from minivllm.kernels.jit import uses_triton
from minivllm.kernels.rope_store import norm_rope_store
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parallel import local_kv_heads, ranks
from minivllm.layers.rotary import RotaryEmbedding


class Attention(nn.Module):
    """qkv [T, (H + 2 K) * D], positions [T] -> [T, H * D]. `bind` must come first. Among ranks, H and K are those of its own heads."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, rotary: RotaryEmbedding,
                 q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads // ranks().size, local_kv_heads(num_kv_heads, ranks().size), head_dim
        self.scale = head_dim ** -0.5
        self.rotary, self.q_norm, self.k_norm = rotary, q_norm, k_norm
        self.backend: AttentionBackend | None = None
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def bind(self, backend: AttentionBackend | None, k_cache: Tensor | None, v_cache: Tensor | None) -> None:
        """Use this backend on this layer's slots: k_cache and v_cache [N * S, K, D]. None: there is no pool."""
        self.backend, self.k_cache, self.v_cache = backend, k_cache, v_cache
        self.fuses_store = getattr(backend, "fuses_store", False)

    def forward(self, qkv: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        if self.fuses_store and uses_triton(qkv):
            q = self._in_one_pass(qkv, positions, metadata)
        else:
            q, k, v = self._project(qkv, positions)
            self.backend.store(k, v, self.k_cache, self.v_cache, metadata)
        out = self.backend.attend(q, self.k_cache, self.v_cache, metadata, self.scale)  # [T, H, D]
        return out.reshape(-1, self.num_heads * self.head_dim)

    def _project(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)  # [T, H + 2 K, D]
        if self.q_norm is not None:
            q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        else:
            qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = self.rotary(qk, positions).split((self.num_heads, self.num_kv_heads), dim=1)
        return q, k, v

    def _in_one_pass(self, qkv: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Norms, rotary positions and the cache write by one kernel; returns q [T, H, D]."""
        q_weight, k_weight, eps = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self.q_norm is not None else (None, None, 0.0)
        return norm_rope_store(qkv, q_weight, k_weight, eps, self.rotary.cos, self.rotary.sin, positions,
                               self.k_cache, self.v_cache, metadata.slot_mapping, self.num_heads)
