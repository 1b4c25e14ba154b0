"""The real model with a learner's store kernel in place of the package's cache write. As `plug`, for notebook 03."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minivllm.attention.metadata import AttentionMetadata
from minivllm.attention.torch_sdpa import TorchSDPABackend
from minivllm.llm import LLM
from minivllm.prompts import Prompt
from minivllm.teach import check, paper_triton
from minivllm.teach.exercise import one_line
from minivllm.teach.exercises.store import launch_heads, launch_rows
from minivllm.teach.kernel_exercise import runs_in_triton
from minivllm.teach.plug import PlugError, _run_both
from minivllm.teach.stub import NOT_ATTEMPTED, is_stub

_LAUNCH = {"store_kernel": launch_rows, "store_heads_kernel": launch_heads}


class PluggedStore(TorchSDPABackend):
    """Every layer's K/V is written by the kernel: by Triton on a GPU, on paper elsewhere, which is the faster of the two there."""

    name = "plugged"

    def __init__(self, kernel: Any, exercise: str):
        self.kernel, self.launch = kernel, _LAUNCH[exercise]

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> None:
        grid, rest = self.launch(k, v)
        tensors = (k, v, k_cache, v_cache, metadata.slot_mapping)
        try:
            if k.is_cuda and runs_in_triton(self.kernel) == "cuda":
                self.kernel[grid](*tensors, *rest)
            else:
                paper_triton.launch(self.kernel, grid, *tensors, *rest)
        except Exception as error:
            raise PlugError(f"your kernel raised {one_line(error)} (it was given k {list(k.shape)})") from None


def store_heads_kernel(kernel: Any, llm: LLM | str, prompt: Prompt, max_tokens: int = 4) -> None:
    """Print what the model says with the learner's kernel as its cache write, and whether the tokens agree.

    A kernel that its checker refuses is not run: it may write anywhere.
    """
    _run("store_heads_kernel", kernel, llm, prompt, max_tokens)


def _run(exercise: str, kernel: Any, llm: LLM | str, prompt: Prompt, max_tokens: int) -> None:
    if is_stub(paper_triton.function_of(kernel)):
        print(NOT_ATTEMPTED)
    elif check.result(exercise, kernel).status != "passed":
        print(f"run the check above first: check.{exercise} does not pass yet")
    else:
        _run_both(lambda given: PluggedStore(given, exercise), kernel, llm, prompt, max_tokens)
