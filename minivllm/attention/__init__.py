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


def _flash_attn() -> AttentionBackend:
    from minivllm.attention.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend()


def _flash_triton() -> AttentionBackend:
    from minivllm.attention.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend(own_decode=True)


_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch_sdpa": _torch_sdpa, "triton": _triton, "triton_t4": _triton_t4,
                                                        "flash_attn": _flash_attn, "flash_triton": _flash_triton}
_OURS = frozenset(_BACKENDS)


def register_backend(name: str, make: Callable[[], AttentionBackend]) -> None:
    """Make a backend of one's own known: `LLM(..., attention_backend=name)` then calls `make()`."""
    _BACKENDS[name] = make


def select(name: str, device: torch.device, dtype: torch.dtype | None = None, shape: tuple[int, int, int] = (4, 2, 64),
           block_size: int | None = None) -> tuple[AttentionBackend, str]:
    """The backend called `name` ("auto": the best that runs on `device`), and why it was chosen.

    What runs is found out by running it: a small batch of every kind, of the model's `shape` (H, K, D), compared with torch. Raises
    ValueError for an unknown name, and for a backend of the package that was asked for and does not run, with the reason.
    """
    if name not in ("auto", *_BACKENDS):
        raise ValueError(f"attention backend {name!r} does not exist; choose 'auto' or one of {', '.join(_BACKENDS)}")
    if name != "auto":
        backend, failure = _tried(name, device, dtype, shape, block_size) if name in _OURS else (_BACKENDS[name](), None)
        if failure:
            raise ValueError(f"attention backend {name!r} does not run on {device}: {failure}")
        return backend, "asked for"
    passed_over = ""
    for candidate, why in _candidates(device):
        backend, failure = _tried(candidate, device, dtype, shape, block_size)
        if not failure:
            return backend, why + passed_over
        passed_over += f"; {candidate} does not run here: {failure}"
    raise RuntimeError(f"no attention backend runs on {device}{passed_over}")


def _candidates(device: torch.device) -> list[tuple[str, str]]:
    """Names in the order of preference, each with the reason for taking it."""
    torch_last = ("torch_sdpa", f"the one that runs on {device.type}")
    if device.type != "cuda":
        return [torch_last]
    if not has_matrix_unit(device):
        return [("triton_t4", "decodes by kernels without the matrix unit, which Triton does not reach below sm80; prefills by torch"), torch_last]
    return [("flash_triton", "prompts by flash-attn, which is installed and runs, decodes by a Triton kernel"), ("triton", "its kernels read the pages in place"), torch_last]


def _tried(name: str, device: torch.device, dtype: torch.dtype | None, shape: tuple[int, int, int],
           block_size: int | None) -> tuple[AttentionBackend | None, str | None]:
    """The backend, and None or what is wrong with it."""
    from minivllm.attention.trial import trial

    if name.startswith("flash") and device.type == "cuda" and not has_matrix_unit(device):
        return None, "it needs a GPU of sm80 or newer"
    try:
        backend = _BACKENDS[name]()
    except ImportError as error:
        return None, f"{error}"
    except Exception as error:  # an installed package that is broken
        return None, f"{type(error).__name__}: {error}"
    return backend, None if name == "torch_sdpa" else trial(backend, device, dtype, shape, block_size)
