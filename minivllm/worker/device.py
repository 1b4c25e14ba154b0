"""Which device and which dtype: what "auto" means, and what is refused because the device cannot do it.

A device profile lets a larger GPU walk a smaller one's path: MINIVLLM_DEVICE_PROFILE=t4 in the environment. All that the package asks of
a GPU (capability, memory, shared memory) is asked here, so that every choice follows the profile.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

GIB = 2**30
PROFILE_VARIABLE = "MINIVLLM_DEVICE_PROFILE"


@dataclass(frozen=True)
class DeviceProfile:
    """What a GPU can do, sizes in bytes. shared_memory: the most that one program may have."""

    capability: tuple[int, int]
    total_memory: int
    shared_memory: int


PROFILES = {"t4": DeviceProfile((7, 5), 15 * GIB, 64 << 10)}


def device_profile() -> DeviceProfile | None:
    """The profile that the environment asks for, if any. Raises ValueError for a name that is not in PROFILES."""
    name = os.environ.get(PROFILE_VARIABLE, "")
    if name and name.lower() not in PROFILES:
        raise ValueError(f"{PROFILE_VARIABLE} is {name!r}: unset it, or use one of {', '.join(PROFILES)}")
    return PROFILES[name.lower()] if name else None


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
    """The GPU's compute capability, (7, 5) for a T4 or under its profile; None on a CPU."""
    if device.type != "cuda":
        return None
    profile = device_profile()
    return profile.capability if profile else torch.cuda.get_device_capability(device)


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the GPU that are free, and all; under a profile no more than it has, less what this process holds."""
    free, total = torch.cuda.mem_get_info(device)
    if profile := device_profile():
        free = max(0, min(free, profile.total_memory - torch.cuda.memory_reserved(device)))
        total = min(total, profile.total_memory)
    return free, total


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have: 64 KiB on a T4, 99 on an L4, 163 on an A100, 227 on an H200."""
    if profile := device_profile():
        return profile.shared_memory
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)


def has_bfloat16(device: torch.device) -> bool:
    """By capability: torch's own `is_bf16_supported` counts emulation too, which is slower than float16."""
    cap = capability(device)
    return cap is None or cap >= (8, 0)


def has_matrix_unit(device: torch.device) -> bool:
    """Whether Triton's `tl.dot` becomes matrix instructions: from sm80 on. (Below, it becomes scalar code ten times the size.)"""
    cap = capability(device)
    return cap is not None and cap >= (8, 0)


def on_its_device(method: Callable) -> Callable:
    """For a method of what has a `device`: runs with that GPU as torch's current one, which is where Triton launches kernels."""
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with current(self.device):
            return method(self, *args, **kwargs)

    return run


def current(device: torch.device) -> AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
