"""Triton, if it is there: `jit` and `tl` for the files that hold kernels, so that the package can be imported without it.

`TRITON_INTERPRET=1`, set before triton is first imported, runs the same kernels on a CPU, slowly and exactly.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.worker import device as devices
from minivllm.worker.device import PROFILE_VARIABLE

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch brings none
    triton = tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


class _Missing:
    """Stands for a kernel where there is no Triton."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        raise RuntimeError("this needs triton, which is not installed: pip install triton, or use the torch version beside the kernel")


def jit(function: Callable[..., None] | None = None, changing: tuple[str, ...] = ()) -> Any:
    """Triton's jit. changing: integers that differ from step to step; Triton would compile anew for those that 16 divides, or that are 1."""
    if function is None:
        return lambda function: jit(function, changing)
    return triton.jit(function, do_not_specialize=list(changing)) if triton is not None else _Missing()


def uses_triton(tensor: Tensor) -> bool:
    """Whether work on `tensor` goes to a kernel: on a GPU where Triton is installed."""
    return tensor.is_cuda and triton is not None


def _early_launch_functions() -> tuple[Any, Any] | None:
    """Triton's two functions for it, where they work: 3.4.0 has them with an argument that its own compiler no longer gives."""
    cuda = getattr(tl.extra, "cuda", None) if tl is not None else None
    wait = getattr(cuda, "gdc_wait", None)
    return (wait, cuda.gdc_launch_dependents) if wait is not None and "_semantic" in inspect.signature(wait).parameters else None


@jit
def _nothing():
    """In their place: every name in a kernel must exist, in branches that are never taken too."""
    pass


KNOWS_EARLY_LAUNCH = _early_launch_functions() is not None
gdc_wait, gdc_launch_dependents = _early_launch_functions() or (_nothing, _nothing)


def has_early_launch(device: torch.device) -> bool:
    """Whether a kernel may come up while the one before it ends (programmatic dependent launch): from sm90 on, if Triton knows it."""
    return _abilities(device, os.environ.get(PROFILE_VARIABLE))[0]


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may use; on a CPU, where kernels are interpreted, as many as on an H200."""
    return _abilities(device, os.environ.get(PROFILE_VARIABLE))[1]


@functools.cache
def _abilities(device: torch.device, _profile: str | None) -> tuple[bool, int]:
    if device.type != "cuda":
        return False, 227 << 10
    return devices.capability(device) >= (9, 0) and KNOWS_EARLY_LAUNCH, devices.shared_memory(device)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`: Triton's tiles have such sizes."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, size: int) -> int:
    return -(-number // size)
