"""Which device and which dtype: what "auto" means, and what is refused because the device cannot do it."""

from __future__ import annotations

import torch

GIB = 2**30


def select_device(name: str) -> torch.device:
    """"auto" takes the GPU if there is one. Raises ValueError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"LLM.device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"LLM.device {name!r} is not supported: use 'cpu' or 'cuda'")
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            raise ValueError(f"LLM.device {name!r}: torch sees {found} CUDA devices here; use device='cpu' or 'auto'")
        return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    return torch.device("cpu")


def capability(device: torch.device) -> tuple[int, int] | None:
    """The GPU's compute capability, (7, 5) for a T4; None on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def has_bfloat16(device: torch.device) -> bool:
    """By capability: torch's own `is_bf16_supported` counts emulation too, which is slower than float16."""
    cap = capability(device)
    return cap is None or cap >= (8, 0)


def has_matrix_unit(device: torch.device) -> bool:
    """Whether Triton's `tl.dot` becomes matrix instructions: from sm80 on. (Below, it becomes scalar code ten times the size.)"""
    cap = capability(device)
    return cap is not None and cap >= (8, 0)


def select_dtype(name: str, device: torch.device, checkpoint_dtype: str | None) -> torch.dtype:
    """"auto": float32 on a CPU; on a GPU the checkpoint's 16-bit dtype, bfloat16 unless it names one, float16 below sm80."""
    if name == "bfloat16" and not has_bfloat16(device):
        raise ValueError(f"LLM.dtype 'bfloat16': {torch.cuda.get_device_name(device)} (sm{''.join(map(str, capability(device)))}) "
                         f"only emulates it; use 'float16' or 'auto'")
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    if not has_bfloat16(device) or checkpoint_dtype == "float16":
        return torch.float16
    return torch.bfloat16


def is_small(device: torch.device) -> bool:
    """A CPU, or a GPU without tensor-core bfloat16 such as the T4: smaller steps, more memory left free."""
    return device.type == "cpu" or not has_bfloat16(device)


def default_max_num_batched_tokens(device: torch.device) -> int:
    return 2048 if is_small(device) else 8192


def default_gpu_memory_utilization(device: torch.device) -> float:
    return 0.85 if is_small(device) else 0.9
