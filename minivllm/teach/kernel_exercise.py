"""How a learner's kernel becomes a plain function that a checker can run: on paper first, then by Triton itself where it is there.

Knows how the store kernels are launched (tensors, then strides, then sizes); knows no exercise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.teach import paper_triton

TENSORS = ("k", "v", "k_cache", "v_cache", "slot_mapping")
Launch = Callable[[Tensor, Tensor], tuple[tuple[int, ...], tuple[int, ...]]]  # (k, v) -> the grid, and all arguments behind the tensors
_SIGNATURE = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in TENSORS])


def on_paper(kernel: Any, launch: Launch) -> Callable[..., int]:
    """`kernel` as a function of the five tensors that runs it on paper and returns how many programs ran."""
    def function(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> int:
        grid, rest = launch(k, v)
        paper_triton.launch(kernel, grid, k, v, k_cache, v_cache, slot_mapping, *rest)
        return torch.Size(grid).numel()

    function.__wrapped__ = paper_triton.function_of(kernel)  # so that a diagnosis finds the learner's own lines
    function.__signature__ = _SIGNATURE
    return function


def adapter(launch: Launch, parameters: str) -> Callable[[Any], Any]:
    """What turns a learner's kernel into such a function. What is no kernel stays as it is. parameters: what a kernel must take."""
    wanted = len(parameters.split(", "))

    def adapt(given: Any) -> Any:
        function = paper_triton.function_of(given)
        if function is given:  # a plain function, or nothing like one
            forgotten = inspect.isfunction(given) and len(inspect.signature(given).parameters) == wanted
            return _refusal("this is a plain function: put @triton.jit on the line above its def", given) if forgotten else given
        if len(inspect.signature(function).parameters) != wanted:
            return _refusal(f"the kernel must take {parameters}", function)
        return _twice(given, launch)

    return adapt


def runs_in_triton(kernel: Any) -> str | None:
    """The device on which Triton itself can run `kernel`; None where it cannot."""
    kind = type(kernel).__name__
    if kind == "InterpretedFunction":
        return "cpu"
    return "cuda" if kind == "JITFunction" and torch.cuda.is_available() else None


def _twice(kernel: Any, launch: Launch) -> Callable[..., int]:
    """On paper, and only if that ends well in Triton, on copies, which must come to the same."""
    paper = on_paper(kernel, launch)

    def function(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> int:
        device = runs_in_triton(kernel)
        copies = [cache.clone() for cache in (k_cache, v_cache)]
        programs = paper(k, v, k_cache, v_cache, slot_mapping)
        if device is not None:
            moved = [tensor.to(device) for tensor in (k, v, *copies, slot_mapping)]
            grid, rest = launch(*moved[:2])
            kernel[grid](*moved, *rest)
            if not all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(moved[2:4], (k_cache, v_cache))):
                raise RuntimeError("run by Triton, your kernel leaves another cache than step by step: do two programs write to one place?")
        return programs

    function.__wrapped__, function.__signature__ = paper.__wrapped__, _SIGNATURE
    return function


def _refusal(message: str, function: Callable) -> Callable[..., int]:
    """A function that says what is wrong with the kernel's form, unless the kernel is a stub still."""
    def refuse(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> int:
        raise paper_triton.NotOnPaper(message)

    refuse.__wrapped__, refuse.__signature__ = function, _SIGNATURE
    return refuse
