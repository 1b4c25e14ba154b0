"""One interface for attention over the paged KV cache, several ways to compute it, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from minivllm.attention.metadata import AttentionMetadata
from minivllm.worker.device import has_matrix_unit


class AttentionBackend(Protocol):
    """Writes a step's K/V to the cache, then attends through the block tables: a hit, a chunk and a decode are one case.

    `prepare` runs once a step, before the model; its answer becomes `metadata.plan`. It is given, as lists on the host, how many
    tokens each row computes and attends to, so that it need not ask the device.
    q [T, H, D]; k, v [T, K, D]; k_cache, v_cache [N * S, K, D], addressed by slot.
    fuses_store: whether the cache may be written by the kernel that also turns q and k, in place of `store`.
    in_graphs: whether a decode may be captured in a CUDA graph: nothing in it asks the device, and `prepare` gives no tensors for it.
    """

    name: str
    default_block_size: int
    fuses_store: bool = False
    in_graphs: bool = False

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> Any: ...

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> None: ...

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor: ...


def _torch_sdpa() -> AttentionBackend:
    from minivllm.attention.torch_sdpa import TorchSDPABackend

    return TorchSDPABackend()


def _triton() -> AttentionBackend:
    from minivllm.attention.triton_paged import TritonBackend

    return TritonBackend(dot=True)


def _triton_t4() -> AttentionBackend:
    from minivllm.attention.triton_paged import TritonBackend

    return TritonBackend(dot=False)


_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch_sdpa": _torch_sdpa, "triton": _triton, "triton_t4": _triton_t4}


def register_backend(name: str, make: Callable[[], AttentionBackend]) -> None:
    """Make a backend of one's own known: `LLM(..., attention_backend=name)` then calls `make()`."""
    _BACKENDS[name] = make


def select(name: str, device: torch.device, dtype: torch.dtype | None = None) -> tuple[AttentionBackend, str]:
    """The backend called `name` ("auto": the best that runs on `device`), and why it was chosen.

    What runs is found out by running it: a small batch of every kind, compared with torch. Raises ValueError for an unknown name, and for
    a backend of the package that was asked for and does not run, with the reason.
    """
    from minivllm.attention.trial import trial

    if name not in ("auto", *_BACKENDS):
        raise ValueError(f"attention backend {name!r} does not exist; choose 'auto' or one of {', '.join(_BACKENDS)}")
    if name != "auto":
        backend = _BACKENDS[name]()
        if name.startswith("triton") and (failure := trial(backend, device, dtype)):
            raise ValueError(f"attention backend {name!r} does not run on {device}: {failure}")
        return backend, "asked for"
    if device.type != "cuda":
        return _torch_sdpa(), f"the one that runs on {device.type}"
    make, why = (_triton, "its kernels read the pages in place") if has_matrix_unit(device) else (
        _triton_t4, "decodes by kernels without the matrix unit, which Triton does not reach below sm80; prefills by torch")
    backend = make()
    if failure := trial(backend, device, dtype):
        return _torch_sdpa(), f"{backend.name} does not run here: {failure}"
    return backend, why
