"""What every notebook needs around its lesson: which model, where it runs, a fair clock, and somebody to chat with.

Knows no engine internals and draws nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from minivllm import attention
from minivllm.weights.hub import EMBEDDED_NAME
from minivllm.worker.device import select_device, select_dtype

#: What the notebooks run on a GPU where the hub can be reached: 1.2 GB in 16 bit, room to spare on a 15 GB T4.
GPU_MODEL = "Qwen/Qwen3-0.6B"


def model() -> str:
    """The model for the notebooks: GPU_MODEL where there is a GPU and the hub answers, else the embedded one."""
    if not torch.cuda.is_available() or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return EMBEDDED_NAME
    try:
        from huggingface_hub import HfApi

        HfApi().model_info(GPU_MODEL, timeout=5)
    except Exception:  # no network, no package, a hub that is down: all mean the same here
        return EMBEDDED_NAME
    return GPU_MODEL


def where() -> None:
    """Print what the notebook runs on."""
    device = select_device("auto")
    backend, _ = attention.select("auto", device)
    dtype = str(select_dtype("auto", device, None)).removeprefix("torch.")
    print(f"device {device}, dtype {dtype}, attention {backend.name}, model {model()}")


def median_seconds(run: Callable[[], object], repeats: int = 3, warmup: int = 1) -> float:
    """The median time of `run`, in seconds, after `warmup` runs that do not count; a GPU is waited for before each reading."""
    times = []
    for _ in range(warmup + repeats):
        _synchronize()
        begin = time.perf_counter()
        run()
        _synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[warmup:])


def questions(scripted: list[str]) -> Iterator[str]:
    """What somebody asks, line by line, until an empty line, "quit" or an interrupt.

    Where nobody can type (a notebook run from end to end by a program), the `scripted` lines are asked instead.
    """
    if not _can_type():
        for line in scripted:
            print(f"you> {line}")
            yield line
        return
    while True:
        try:
            line = input("you (empty to end)> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line.lower() in ("", "quit", "exit"):
            return
        yield line


def _can_type() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return True
    kernel = getattr(get_ipython(), "kernel", None)
    return kernel is None or bool(getattr(kernel, "_allow_stdin", False))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
