"""Tape: a CUDA graph on paper. It records the operations of a run with their tensors, and does them again on the same memory.

It has CUDA's rules: what asks the data, and what sends new data from the host, is refused while it records; what is bound anew afterwards
is not seen. Owns no model. Built in notebook 09, which keeps the refusals for here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_ASKS = "the host would have to wait for a number that the device has not computed yet"
_SHAPE = "the shape of the result depends on the data, and a recording has fixed shapes"
#: What cannot be recorded, and why.
_REFUSED = {
    _aten._local_scalar_dense.default: _ASKS, _aten.item.default: _ASKS, _aten.is_nonzero.default: _ASKS, _aten.equal.default: _ASKS,
    _aten.nonzero.default: _SHAPE, _aten.masked_select.default: _SHAPE, _aten._unique2.default: _SHAPE,
    _aten.repeat_interleave.Tensor: _SHAPE, _aten.repeat_interleave.self_Tensor: _SHAPE,
    _aten.lift_fresh.default: "numbers come from a list on the host, and a replay would not see another list: copy them into a fixed "
        "buffer before",
}
_MAKES_ROOM = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
               _aten.new_empty_strided.default}


_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)  # these look into memory themselves, past every operation


class CaptureError(RuntimeError):
    """The operation cannot be part of a recording."""


class StaleBufferError(RuntimeError):
    """A tensor was handed over that the recording does not read."""


class Tape(TorchDispatchMode):
    """`with Tape() as tape: y = run()`, then `tape.replay()`: y holds what run would compute from the inputs' memory as it is now.

    launches: operations that compute something. views: those that only look at memory in another way. allocations: new memory, kept for
    as long as the tape is. Replay under the same grad mode as the recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict, Any]] = []
        self.kept: list[Any] = []
        self.views = self.allocations = 0
        self._read: set[int] = set()
        self._reads_in_python = _NoReads()

    @property
    def launches(self) -> int:
        return len(self.calls)

    def __enter__(self) -> Tape:
        self._reads_in_python.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads_in_python.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        _refuse(function, args)
        before = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        result = function(*args, **kwargs)
        self._read |= before
        fresh = {_memory(tensor) for tensor in _tensors(result)} - before
        self.allocations += len(fresh)
        self.kept.append(result)  # the memory must not be handed to anybody else
        if function in _MAKES_ROOM:
            return result
        if fresh or function._schema.is_mutable:
            self.calls.append((function, args, kwargs, result))
        else:
            self.views += 1
        return result

    def replay(self, **inputs: Tensor) -> None:
        """Do every operation again. inputs: checked, not used. Raises StaleBufferError for one whose memory no operation reads."""
        for name, tensor in inputs.items():
            if not self.reads(tensor):
                raise StaleBufferError(f"{name} lies in memory that the recording does not read: a replay would use the old numbers. "
                                       f"Copy into the tensor that was recorded, old.copy_({name})")
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again)):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reads(self, tensor: Tensor) -> bool:
        """Whether a recorded operation was given this tensor's memory."""
        return _memory(tensor) in self._read


class _NoReads(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _READS:
            raise CaptureError(f"{function.__name__}() cannot be recorded: {_ASKS}")
        return function(*args, **(kwargs or {}))


def capture(run: Callable[[], Any]) -> tuple[Any, Any]:
    """(what can be replayed, the result of the recorded run): a CUDA graph on a CUDA GPU, a Tape elsewhere."""
    if not torch.cuda.is_available():
        tape = Tape()
        with tape:
            result = run()
        return tape, result
    run()  # compiles and loads what a capture could not
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def _refuse(function: Any, args: tuple) -> None:
    why = _REFUSED.get(function)
    if function in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default) and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        why = _SHAPE
    if why is not None:
        raise CaptureError(f"{function} cannot be recorded: {why}")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
