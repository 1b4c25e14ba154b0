"""What must hold before ranks are started, and what they must be told because they cannot know it by themselves. Built in notebook 10."""

from __future__ import annotations

from typing import Any

import torch

from minivllm import attention
from minivllm.config import EngineConfig
from minivllm.models import ModelConfig, model_class
from minivllm.weights.checkpoint import Checkpoint
from minivllm.worker.device import select_device
from minivllm.worker.rank import local_device


def valid_sizes(model: ModelConfig) -> list[int]:
    """How many ranks can share `model`: its heads and its MLP divide, and of the kv heads each rank has as many, or one."""
    kv = model.num_kv_heads
    return [n for n in range(1, model.num_heads + 1)
            if model.num_heads % n == model.intermediate_size % n == 0 and (kv % n == 0 or n % kv == 0)]


def check_size(model: ModelConfig, size: int) -> None:
    if size not in valid_sizes(model):
        raise ValueError(f"LLM.tensor_parallel_size {size} does not divide this model ({model.num_heads} heads, {model.num_kv_heads} kv heads, "
                         f"{model.intermediate_size} wide MLP): use one of {', '.join(map(str, valid_sizes(model)))}")


def first_device(name: str, size: int, launched: bool) -> str:
    """Rank 0's device, once it is known that every rank of this machine can have its own."""
    device = select_device(name)
    if device.type == "cpu" or launched:
        return local_device(device.type, 0)
    found = torch.cuda.device_count()
    if device.index + size > found:
        raise ValueError(f"LLM.tensor_parallel_size {size} needs {size} GPUs from {device} on, and torch sees {found}: lower it, or start "
                         f"one process a GPU on several machines with torchrun")
    return str(device)


def given_to_ranks(checkpoint: Checkpoint, config: EngineConfig, size: int) -> dict[str, Any]:
    """What the other processes would not know by themselves."""
    name = checkpoint.config["architectures"][0]
    cls, backend = model_class(name), config.attention_backend
    own_backend = backend in attention._BACKENDS and backend not in attention._OURS
    return {"model": _importable(name, cls) if not cls.__module__.startswith("minivllm.") else None,
            "backend": _importable(backend, attention._BACKENDS[backend]) if own_backend else None,
            "precision": torch.get_float32_matmul_precision(), "threads": max(1, torch.get_num_threads() // size)}


def _importable(name: str, what: Any) -> tuple[str, Any]:
    if what.__module__ == "__main__" or "<" in what.__qualname__:
        raise ValueError(f"{name!r} is made by {what.__qualname__} of {what.__module__}, which other ranks cannot import: put it in a module of its own")
    return name, what
