"""Triton on paper: run a small copying kernel program by program on torch tensors, every address checked and noted down.

Owns the part of `triton.language` that such kernels need. It is what the exercise checkers run a learner's kernel on first, since a
store far outside its tensor kills a process; it draws what programs do; and it stands in for Triton where there is none. Knows no exercise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_TYPES = ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class OutOfBounds(RuntimeError):
    """A program reads or writes outside of the memory that it was given."""

    advice = ("an address lies outside of its tensor: work out by hand where this program's first and last number go. Offsets count "
              "numbers, from the tensor's first")


class NotOnPaper(RuntimeError):
    """The kernel uses something that this module does not know, or that Triton would refuse too."""

    advice = "the message says what a program cannot do: change that line"


@dataclass(frozen=True)
class Access:
    """One load or store of one program: the offsets that its mask lets through, counted in numbers from the tensor's first."""

    program: tuple[int, ...]
    kind: str
    tensor: str
    offsets: list[int]


class Pointer:
    """An address, or a tile of addresses: a tensor's name, all of the memory that it is a view of, and offsets from its first number."""

    def __init__(self, name: str, tensor: Tensor):
        self.name, self.size, self.first, self.offsets = name, tensor.numel(), tensor.storage_offset(), 0
        storage = tensor.untyped_storage()
        self.memory = tensor.new_empty(0).set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def _at(self, offsets: Any) -> Pointer:
        moved = copy.copy(self)
        moved.offsets = offsets
        return moved

    def __add__(self, other: Any) -> Pointer:
        if isinstance(other, Pointer):
            raise NotOnPaper(f"{self.name} + {other.name} adds two addresses: add numbers to an address")
        if isinstance(other, float) or isinstance(other, Tensor) and other.is_floating_point():
            raise NotOnPaper(f"{self.name} + a float: an offset is a whole number, divide with //")
        return self._at(self.offsets + (other.long() if isinstance(other, Tensor) else other))  # addresses have 64 bits

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self + -other

    def __getitem__(self, index: Any) -> Pointer:
        if not isinstance(self.offsets, Tensor) or not self.offsets.dim():
            raise NotOnPaper(f"{self.name} is an address and not a tensor: tl.load({self.name} + offsets) reads what lies there")
        return self._at(self.offsets[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        raise NotOnPaper(f"{self.name} is an address and not a tensor: tl.store({self.name} + offsets, values) writes to it")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotOnPaper(f"{self.name} is an address and not a tensor: it has no {name}; what a kernel must know of it is a parameter")


class Language:
    """Stands for `tl` while a kernel runs. program: its number; grid: how many there are; notes: what all programs did."""

    constexpr = int
    static_range = range

    def __init__(self, grid: tuple[int, ...] = (1,)):
        self.grid, self.program, self.notes = grid, (0,) * len(grid), []
        for name in _TYPES:
            setattr(self, name, getattr(torch, name))
        self.int1 = torch.bool

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotOnPaper(f"tl.{name} is not known here: program_id, arange, load, store, where, minimum, maximum, zeros, full and cdiv are")

    def program_id(self, axis: int) -> Tensor:
        return torch.tensor(self.program[axis] if axis < len(self.program) else 0, dtype=torch.int32)

    def num_programs(self, axis: int) -> Tensor:
        return torch.tensor(self.grid[axis] if axis < len(self.grid) else 1, dtype=torch.int32)

    def arange(self, start: int, end: int) -> Tensor:
        size = end - start
        if size < 1 or size & (size - 1):
            raise NotOnPaper(f"tl.arange({start}, {end}) has {size} numbers: the size of a tile must be a power of two")
        return torch.arange(start, end, dtype=torch.int32)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None, **hints: Any) -> Tensor:
        places, wanted = self._places("load", pointer, mask)
        loaded = torch.zeros(wanted.shape, dtype=pointer.memory.dtype)
        if other is not None:
            loaded += torch.as_tensor(other).to(loaded.dtype)
        loaded[wanted] = pointer.memory[places].cpu()
        return loaded

    def store(self, pointer: Pointer, value: Any, mask: Any = None, **hints: Any) -> None:
        places, wanted = self._places("store", pointer, mask)
        values = torch.as_tensor(value).to(pointer.memory.dtype)
        if values.dim() > wanted.dim():
            raise NotOnPaper(f"tl.store of {list(values.shape)} values to {list(wanted.shape)} addresses: make the shapes equal")
        pointer.memory[places] = values.expand(wanted.shape)[wanted].to(pointer.memory.device)

    def _places(self, kind: str, pointer: Any, mask: Any) -> tuple[Tensor, Tensor]:
        """Where in the memory the wanted numbers lie, checked and noted; and for each number of the tile whether it is wanted."""
        if not isinstance(pointer, Pointer):
            raise NotOnPaper(f"tl.{kind} needs an address, such as k + columns, and got {type(pointer).__name__}")
        offsets = torch.as_tensor(pointer.offsets)
        wanted = torch.as_tensor(True if mask is None else mask).bool()
        offsets, wanted = torch.broadcast_tensors(offsets, wanted)
        chosen = offsets[wanted].tolist()
        outside = [offset for offset in chosen if not 0 <= offset + pointer.first < len(pointer.memory)]
        if outside:
            program = ", ".join(map(str, self.program))
            does = "reads from" if kind == "load" else "writes to"
            raise OutOfBounds(f"program {program} {does} {pointer.name} at offset {min(outside)}; it has {pointer.size} numbers")
        self.notes.append(Access(self.program, kind, pointer.name, chosen))
        return torch.tensor(chosen, dtype=torch.int64, device=pointer.memory.device) + pointer.first, wanted

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Tensor:
        return torch.where(torch.as_tensor(condition), torch.as_tensor(x), torch.as_tensor(y))

    @staticmethod
    def minimum(x: Any, y: Any) -> Tensor:
        return torch.minimum(torch.as_tensor(x), torch.as_tensor(y))

    @staticmethod
    def maximum(x: Any, y: Any) -> Tensor:
        return torch.maximum(torch.as_tensor(x), torch.as_tensor(y))

    @staticmethod
    def zeros(shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    @staticmethod
    def full(shape: Any, value: Any, dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), value, dtype=dtype)

    @staticmethod
    def cdiv(number: Any, size: Any) -> Any:
        return (number + size - 1) // size


@dataclass
class Kernel:
    """What the stand-in's `triton.jit` makes of a function."""

    fn: Callable
    __name__: str = field(init=False)

    def __post_init__(self) -> None:
        self.__name__ = self.fn.__name__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def start(*args: Any, **kwargs: Any) -> None:
            launch(self, grid, *args, **kwargs)
        return start


#: For `from minivllm.teach.paper_triton import triton, tl` where Triton is not installed.
tl = Language()
triton = SimpleNamespace(jit=Kernel, language=tl, cdiv=Language.cdiv, next_power_of_2=lambda n: 1 << max(0, n - 1).bit_length())


def function_of(kernel: Any) -> Any:
    """The Python function inside a kernel, Triton's or a stand-in; anything else as it is."""
    inner = getattr(kernel, "fn", None)
    return inner if isinstance(inner, FunctionType) else kernel


def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> list[Access]:
    """Run one program after the other; tensors are given as in Triton. Returns what they did. Raises OutOfBounds."""
    grid = tuple(grid) if isinstance(grid, (tuple, list)) else (int(grid),)
    language, function = Language(grid), function_of(kernel)
    names = function.__code__.co_varnames
    args = [_argument(name, value) for name, value in zip(names, args)]
    kwargs = {name: _argument(name, value) for name, value in kwargs.items() if name in names}  # num_warps and the like mean nothing here
    work = FunctionType(function.__code__, _globals(function, language), function.__name__, function.__defaults__, function.__closure__)
    for language.program in _programs(grid):
        work(*args, **kwargs)
    return language.notes


def told(notes: list[Access]) -> Iterator[str]:
    """A line for each program: what it reads and what it writes."""
    for program in dict.fromkeys(note.program for note in notes):
        parts = [f"{note.kind} {note.tensor}{_range(note.offsets)}" for note in notes if note.program == program]
        yield f"program {', '.join(map(str, program))}: " + ", ".join(parts)


def _range(offsets: list[int]) -> str:
    if not offsets:
        return "[nothing]"
    in_a_row = offsets == list(range(offsets[0], offsets[0] + len(offsets)))
    return f"[{offsets[0]}]" if len(offsets) == 1 else f"[{offsets[0]}..{offsets[-1]}]" if in_a_row else str(offsets)


def _argument(name: str, value: Any) -> Any:
    return Pointer(name, value) if isinstance(value, Tensor) else value


def _programs(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not grid:
        yield ()
        return
    for rest in _programs(grid[:-1]):
        yield from ((*rest, index) for index in range(grid[-1]))


def _globals(function: FunctionType, language: Language) -> dict[str, Any]:
    """The function's own names, with `language` in the place of every triton.language."""
    tools = SimpleNamespace(language=language, cdiv=language.cdiv, next_power_of_2=triton.next_power_of_2)
    found = dict(function.__globals__)
    for name, value in function.__globals__.items():
        if isinstance(value, Language) or getattr(value, "__name__", "") == "triton.language":
            found[name] = language
        elif value is triton or getattr(value, "__name__", "") == "triton":
            found[name] = tools
    return found
