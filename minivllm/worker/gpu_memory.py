"""A GPU's memory when it runs out, and a hard stop before it does. Knows nothing of models or sequences."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minivllm.worker.device import GIB, gpu_memory

#: What was under way -> what to do about it.
ADVICE = {
    "loading the weights": "choose a smaller model or dtype, and close what else uses the GPU (minivllm.close_all() closes this process's LLMs)",
    "making the KV cache": "lower gpu_memory_utilization or num_kv_blocks, or close what else uses the GPU",
    "trying the largest step": "lower max_num_batched_tokens or max_num_seqs, or close what else uses the GPU",
    "computing a step": "lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization; the requests of this call were aborted",
}


@contextmanager
def advice_when_full(doing: str, device: torch.device) -> Iterator[None]:
    """`with advice_when_full("computing a step", device):` torch's out-of-memory error then says what to do; it stays one for `except`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if device.type != "cuda":
            raise
        free, total = gpu_memory(device)
        held = torch.cuda.memory_allocated(device)
        traceback.clear_frames(error.__traceback__)  # a notebook keeps the last error, and through its frames every tensor of the step
        torch.cuda.empty_cache()
        raise torch.OutOfMemoryError(
            f"out of GPU memory while {doing}: of {total / GIB:.1f} GiB {free / GIB:.2f} were free, and this process's tensors held "
            f"{held / GIB:.2f} GiB. {ADVICE[doing]}.\n({error})") from None


class MemoryLimit:
    """torch's own stop for this process: it then raises out of memory rather than take more than `fraction` of the GPU.

    Of several that live the newest counts; when the last is gone, what was there before the first comes back.
    """

    _live: dict[torch.device, list[MemoryLimit]] = {}

    def __init__(self, device: torch.device, fraction: float):
        self.device, self.others = device, self._live.setdefault(device, [])
        get = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.8 and later
        self.before = self.others[0].before if self.others else get(device) if get else 1.0
        self.share = min(1.0, fraction * gpu_memory(device)[1] / torch.cuda.get_device_properties(device).total_memory)
        self.others.append(self)
        self._apply()

    def restore(self) -> None:
        self.others.remove(self)
        self._apply()

    def _apply(self) -> None:
        torch.cuda.set_per_process_memory_fraction(self.others[-1].share if self.others else self.before, self.device)
