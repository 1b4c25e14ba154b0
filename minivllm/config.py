"""EngineConfig: every setting of the engine, checked on construction, completed once device and model are known.

Pure data: no torch here. What a model looks like is `models/config.py`'s business.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minivllm.engine.policies import POLICIES
from minivllm.keywords import helpful_keywords, require_int, require_number

_OWNER = "LLM"
_DTYPES = ("auto", "float32", "float16", "bfloat16")
#: nano-vLLM's names for our settings.
ALIASES = {"kvcache_block_size": "block_size", "num_kvcache_blocks": "num_kv_blocks"}
DEFAULT_MAX_NUM_SEQS = 256


class PoolTooSmallError(ValueError):
    """The KV cache cannot hold what was asked for."""


@helpful_keywords(_OWNER)
@dataclass(frozen=True)
class EngineConfig:
    """What a user may set. None means: chosen for the device, and found in the completed config afterwards.

    model: "smollm2" (embedded), a directory with config.json and weights, a .gguf file, or a hub name ("Qwen/Qwen3-0.6B").
    device: "auto", "cpu", "cuda" or "cuda:1". dtype: "auto", "float32", "float16" or "bfloat16".
    block_size: tokens a KV-cache block holds. num_kv_blocks: blocks in the pool; left out, it is sized from memory.
    gpu_memory_utilization: share of the GPU's memory that weights, steps, CUDA graphs and pool may take together.
    limit_gpu_memory: let torch refuse this process more than that share, a hard stop until close(). (The share is else only aimed at.)
    max_model_len: tokens of prompt and answer together. max_num_seqs: sequences that run at once.
    max_num_batched_tokens: tokens one step computes at most; never below max_num_seqs.
    max_num_queued_requests: how many may wait; one more is refused with QueueFullError. None: any number.
    policy: who is served first: "fcfs", "priority", "shortest_first", "longest_hit_first", or a function (see engine/policies.py).
    enforce_eager: no CUDA graphs and no torch.compile. torch_compile: compile the parts of the model that are plain torch.
    tensor_parallel_size: how many processes, one a GPU, share the model (see worker/parallel_runner.py).
    overlap_chunk_size: tokens; what the ranks add up is computed in chunks of so many, each added up during the next one. None: whole.
    load_format: "auto", or "dummy" for random weights: a directory with a config.json is then enough.
    """

    model: str = "smollm2"
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    block_size: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    limit_gpu_memory: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    max_num_queued_requests: int | None = None
    policy: str | Callable = "fcfs"
    enforce_eager: bool = False
    torch_compile: bool = False
    load_format: str = "auto"
    tensor_parallel_size: int = 1
    overlap_chunk_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # the dataclass is frozen
        for name in ("block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "max_num_queued_requests",
                     "tensor_parallel_size", "overlap_chunk_size"):
            if (value := getattr(self, name)) is not None:
                put(name, require_int(_OWNER, name, value, 1))
        if self.overlap_chunk_size is not None and self.tensor_parallel_size == 1:
            raise ValueError("LLM.overlap_chunk_size is about what several GPUs add up: leave it out, or raise tensor_parallel_size")
        if self.max_model_len is not None:
            put("max_model_len", require_int(_OWNER, "max_model_len", self.max_model_len, 2))
        put("seed", require_int(_OWNER, "seed", self.seed, 0, 2**64 - 1))
        for name in ("enable_prefix_caching", "enforce_eager", "torch_compile", "limit_gpu_memory"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"LLM.{name} must be True or False, got {getattr(self, name)!r}")
        if self.torch_compile and self.enforce_eager:
            raise ValueError("LLM.enforce_eager=True means no torch.compile at all: leave out torch_compile, or enforce_eager")
        if not callable(self.policy) and self.policy not in POLICIES:
            raise ValueError(f"LLM.policy must be one of {', '.join(POLICIES)} or a function, got {self.policy!r}")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"LLM.load_format must be 'auto' or 'dummy', got {self.load_format!r}")
        for name in ("model", "device", "dtype", "attention_backend"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise TypeError(f"LLM.{name} must be a string, got {getattr(self, name)!r}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"LLM.dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if self.gpu_memory_utilization is not None:
            put("gpu_memory_utilization", require_number(_OWNER, "gpu_memory_utilization", self.gpu_memory_utilization))
            if not 0 < self.gpu_memory_utilization <= 1:
                raise ValueError(f"LLM.gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs and tokens and tokens < seqs:
            raise ValueError(f"LLM.max_num_batched_tokens ({tokens}) is below max_num_seqs ({seqs}): every running sequence needs one "
                             f"token a step, so raise the first or lower the second")

    def complete(self, *, num_kv_blocks: int, max_positions: int, max_num_batched_tokens: int = 2048, block_size: int = 16) -> EngineConfig:
        """A copy with every limit a number. The arguments are what device and model allow; what the user set comes first.

        num_kv_blocks: how many blocks of this block size the pool's memory holds. max_positions: tokens the model was made for.
        Adjusts what was left out, and says so; refuses what was given and cannot be.
        """
        block_size = self.block_size or block_size
        num_kv_blocks = self.num_kv_blocks or num_kv_blocks
        return replace(self, block_size=block_size, num_kv_blocks=num_kv_blocks,
                       max_model_len=self._fitting_model_len(num_kv_blocks, block_size, max_positions),
                       **self._fitting_batch(max_num_batched_tokens))

    def check_positions(self, max_positions: int) -> None:
        """Refuse a `max_model_len` beyond the model's positions: known, and so said, before its weights are loaded."""
        if self.max_model_len is not None and self.max_model_len > max_positions:
            raise ValueError(f"LLM.max_model_len {self.max_model_len} is above the {max_positions} positions the model was made for")

    def _fitting_model_len(self, num_kv_blocks: int, block_size: int, max_positions: int) -> int:
        pool = num_kv_blocks * block_size
        size = f"the KV cache holds {pool} tokens ({num_kv_blocks} blocks of {block_size})"
        if pool < 2:
            raise PoolTooSmallError(f"{size}: not even a prompt of one token and its answer fit; raise num_kv_blocks")
        if self.max_model_len is None:
            if pool < max_positions:
                warnings.warn(f"max_model_len is {pool}, not the model's {max_positions}: {size}", stacklevel=4)
            return min(pool, max_positions)
        self.check_positions(max_positions)
        if self.max_model_len > pool:
            raise PoolTooSmallError(f"LLM.max_model_len {self.max_model_len} does not fit: {size}; lower it, or raise num_kv_blocks"
                                    f" or gpu_memory_utilization")
        return self.max_model_len

    def _fitting_batch(self, default_tokens: int) -> dict[str, int]:
        seqs, tokens = self.max_num_seqs or DEFAULT_MAX_NUM_SEQS, self.max_num_batched_tokens or default_tokens
        if tokens < seqs:
            changed = "max_num_batched_tokens" if self.max_num_seqs else "max_num_seqs"
            seqs, tokens = (seqs, seqs) if self.max_num_seqs else (tokens, tokens)
            warnings.warn(f"{changed} is {tokens}: every running sequence needs one token a step, "
                          f"so max_num_seqs may not exceed max_num_batched_tokens", stacklevel=4)
        return {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}


def rename_aliases(settings: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `LLM(...)` with nano-vLLM's names turned into ours. Raises TypeError where both were given."""
    renamed = {}
    for name, value in settings.items():
        target = ALIASES.get(name, name)
        if target in renamed or (target != name and target in settings):
            raise TypeError(f"LLM got both {name!r} and {target!r}: they mean the same, give one")
        renamed[target] = None if name in ALIASES and value == -1 else value  # nano-vLLM's -1 means: choose
    return renamed
