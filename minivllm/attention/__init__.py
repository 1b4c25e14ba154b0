"""One interface for attention over the paged KV cache, several ways to compute it, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from minivllm.attention.metadata import AttentionMetadata


class AttentionBackend(Protocol):
    """Writes a step's K/V to the cache, then attends through the block tables: a hit, a chunk and a decode are one case.

    `prepare` runs once a step, before the model; its answer becomes `metadata.plan`. It is given, as lists on the host, how many
    tokens each row computes and attends to, so that it need not ask the device.
    q [T, H, D]; k, v [T, K, D]; k_cache, v_cache [N * S, K, D], addressed by slot.
    """

    name: str
    default_block_size: int

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> Any: ...

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> None: ...

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor: ...


def _torch_sdpa() -> AttentionBackend:
    from minivllm.attention.torch_sdpa import TorchSDPABackend

    return TorchSDPABackend()


_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch_sdpa": _torch_sdpa}


def register_backend(name: str, make: Callable[[], AttentionBackend]) -> None:
    """Make a backend of one's own known: `LLM(..., attention_backend=name)` then calls `make()`."""
    _BACKENDS[name] = make


def select(name: str, device: torch.device) -> tuple[AttentionBackend, str]:
    """The backend called `name` ("auto": the best that runs on `device`), and why it was chosen. Raises ValueError."""
    if name == "auto":
        return _torch_sdpa(), f"the only backend of the package so far; it runs on {device.type}"
    if name not in _BACKENDS:
        raise ValueError(f"attention backend {name!r} does not exist; choose 'auto' or one of {', '.join(_BACKENDS)}")
    return _BACKENDS[name](), "asked for"
