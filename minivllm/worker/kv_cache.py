"""The KV-cache pool: one tensor for all blocks of all layers, and how many blocks a device has memory for.

Knows no sequence: a block is a number here. Built in notebook 04.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minivllm.attention import AttentionBackend
from minivllm.layers.attention import Attention
from minivllm.models.config import ModelConfig
from minivllm.worker.device import GIB, gpu_memory

CPU_POOL_BYTES = GIB
#: Left free on a GPU beside all that is measured: what the allocator rounds up, and libraries that are loaded later.
GPU_SLACK_BYTES = GIB // 4


@dataclass(frozen=True)
class KVCacheSpec:
    """What one token's K and V take on one rank: L layers, K kv heads, D head dim, in `dtype`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype, num_ranks: int = 1) -> KVCacheSpec:
        return cls(model.num_layers, max(1, model.num_kv_heads // num_ranks), model.head_dim, dtype)

    @property
    def bytes_per_token(self) -> int:
        """Two (K and V) * L * K * D * bytes of an element: 46,080 for SmolLM2-135M in float32."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCachePool:
    """`cache` [2, L, N, S, K, D]: K and V of every layer, block and slot. Zeroed, so that no slot ever holds a stray NaN."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, block_size: int, device: torch.device):
        shape = (2, spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.cache = torch.zeros(shape, dtype=spec.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.cache.nbytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """One layer's K and V as kernels see them: [N * S, K, D], addressed by slot. Views, not copies."""
        flat = self.cache[:, index].flatten(1, 2)  # [2, N * S, K, D]
        return flat[0], flat[1]

    def bind(self, model: nn.Module, backend: AttentionBackend) -> None:
        """Give every attention layer of `model`, in order, its own part of the pool."""
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        if len(layers) != self.cache.shape[1]:
            raise ValueError(f"the model has {len(layers)} attention layers and the pool {self.cache.shape[1]}")
        for index, layer in enumerate(layers):
            layer.bind(backend, *self.layer(index))


def unbind(model: nn.Module) -> None:
    """Take every attention layer's part of a pool away, so that nothing holds its memory."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.bind(module.backend, None, None)


def num_blocks_that_fit(bytes_per_block: int, device: torch.device, gpu_memory_utilization: float, reserved: int = 0) -> int:
    """On a CPU 1 GiB of blocks; on a GPU what `gpu_memory_utilization` leaves after the weights and `reserved` bytes for a step."""
    if device.type == "cpu":
        return CPU_POOL_BYTES // bytes_per_block
    free, total = gpu_memory(device)
    reserved += GPU_SLACK_BYTES
    budget = min(int(total * gpu_memory_utilization) - torch.cuda.memory_allocated(device), free) - reserved
    if budget < bytes_per_block:
        raise ValueError(f"no memory for a KV cache: {device} has {total / GIB:.1f} GiB, of which {free / GIB:.1f} GiB are free, a step needs "
                         f"{reserved / GIB:.1f} GiB, and gpu_memory_utilization is {gpu_memory_utilization}; raise it, lower "
                         f"max_num_batched_tokens or max_num_seqs, close what else uses the GPU, or set num_kv_blocks")
    return budget // bytes_per_block
