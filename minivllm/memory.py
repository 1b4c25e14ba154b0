"""The memory account: what the weights, a step's activations and the KV cache take, what is left, and how many requests fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minivllm.worker.device import GIB, gpu_memory

if TYPE_CHECKING:
    from minivllm.models.config import ModelConfig
    from minivllm.worker.model_runner import ModelRunner


@dataclass(frozen=True)
class MemoryAccount:
    """Sizes in bytes. activation_peak: what the largest step takes, measured where the pool was sized on a GPU, else `predicted`.

    graphs: what CUDA graphs hold, measured at the same time, else 0. free: what the device has left now. bytes_per_token: K and V of one token in all layers.
    """

    device: str
    total: int
    weights: int
    activation_peak: int
    predicted: bool
    graphs: int
    kv_cache: int
    free: int
    bytes_per_token: int
    block_size: int
    num_blocks: int
    other_ranks: tuple[MemoryAccount, ...] = ()  # each has its own device, its part of the weights and a pool of as many blocks

    def requests_that_fit(self, num_tokens: int) -> int:
        """How many requests of `num_tokens` (prompt and answer) the pool holds at once, whole blocks each."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        return self.num_blocks // -(-num_tokens // self.block_size)

    def __str__(self) -> str:
        def row(name: str, size: int, note: str) -> str:
            return f"{name:<16}{size / GIB:8.3f} GiB   {note}"

        tokens = self.num_blocks * self.block_size
        return "\n".join([
            *(["rank 0"] if self.other_ranks else []),
            row(self.device, self.total, "in all"),
            row("weights", self.weights, ""),
            row("activations", self.activation_peak, "predicted for the largest step" if self.predicted else "of the largest step, measured"),
            *([row("CUDA graphs", self.graphs, "measured")] if self.graphs else []),
            row("KV cache", self.kv_cache, f"{self.num_blocks:,} blocks of {self.block_size} tokens; {self.bytes_per_token:,} bytes a token"),
            row("free", self.free, ""),
            f"fits             {', '.join(f'{self.requests_that_fit(n):,} x {n:,}' for n in (128, 1024, 8192) if n <= tokens) or 'nothing'} tokens",
            *(f"rank {number}\n{account}" for number, account in enumerate(self.other_ranks, 1)),
        ])


def memory_account(runner: ModelRunner, limits: dict[str, Any], max_num_seqs: int) -> MemoryAccount:
    """The account of a runner with a pool of `limits["num_kv_blocks"]` blocks of `limits["block_size"]`, allocated or only planned."""
    on_gpu = runner.device.type == "cuda"
    if on_gpu:
        free, total = gpu_memory(runner.device)
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    measured = runner.profile.activations
    peak = measured or predicted_activation_bytes(runner.model_config, runner.dtype, limits["max_num_batched_tokens"], max_num_seqs)
    num_blocks, block_size, bytes_per_token = limits["num_kv_blocks"], limits["block_size"], runner.spec.bytes_per_token
    others = runner.elsewhere("minivllm.memory:memory_account", limits, max_num_seqs) if hasattr(runner, "elsewhere") else []
    return MemoryAccount(str(runner.device), total, runner.weight_bytes, peak, not measured, runner.profile.graphs, num_blocks * block_size * bytes_per_token, free,
                         bytes_per_token, block_size, num_blocks, tuple(others))


def predicted_activation_bytes(model: ModelConfig, dtype: torch.dtype, num_tokens: int, num_rows: int) -> int:
    """The widest moment of a step: a layer's MLP over all tokens, or the logits of all rows and their float32 copy."""
    size = dtype.itemsize
    residual = num_tokens * model.hidden_size * size
    mlp = residual * 2 + num_tokens * 4 * model.intermediate_size * size  # input and output; gate and up, silu(gate), their product
    logits = min(num_rows, num_tokens) * model.vocab_size * (size + 4)
    return max(residual + mlp, logits)
