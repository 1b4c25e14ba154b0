"""What notebook 10 asks real ranks: `llm.runner.everywhere(probe, ...)` runs a function of this module on each. And what rank 0 says.

The other ranks are processes of their own, so a probe has to live in a module that they can import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minivllm.worker.crew import STEP

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.worker.model_runner import ModelRunner


def weight_bytes(runner: ModelRunner) -> int:
    return runner.weight_bytes


def weight(runner: ModelRunner, name: str) -> Tensor:
    """One parameter of this rank's model."""
    return runner.model.get_parameter(name).detach().cpu()


def pool_shape(runner: ModelRunner) -> tuple[int, ...]:
    """[2, L, N, S, K, D] of this rank's pool."""
    return tuple(runner.pool.cache.shape)


def blocks(runner: ModelRunner, numbers: list[int]) -> Tensor:
    """What some blocks of this rank's pool hold."""
    return runner.pool.cache[:, :, numbers].cpu()


@dataclass(frozen=True)
class Said:
    """One message of rank 0's: "all-reduce", "all-gather" or "step"; the shape of its tensor; bytes of the tensor, or of the step."""

    what: str
    shape: tuple[int, ...]
    num_bytes: int


@contextmanager
def listening(llm: LLM) -> Iterator[list[Said]]:
    """All that rank 0 tells the other ranks while the block runs, in order. The list that `with` gives grows meanwhile.

    Sums in chunks (`overlap_chunk_size`) are not heard.
    """
    group, crew, said = llm.runner.group, llm.runner.crew, []

    def heard(what: str, function: Callable) -> Callable:
        def call(x: Tensor) -> Any:
            said.append(Said(what, tuple(x.shape), x.nbytes))
            return function(x)
        return call

    def send(data: bytes, function: Callable = crew.send) -> None:
        if data[:1] == STEP:
            said.append(Said("step", (), len(data)))
        function(data)

    group.all_reduce, group.all_gather, crew.send = heard("all-reduce", group.all_reduce), heard("all-gather", group.all_gather), send
    try:
        yield said
    finally:
        del group.all_reduce, group.all_gather, crew.send  # the methods of their classes show again
