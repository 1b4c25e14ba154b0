"""A planted fault of tensor parallelism: a layer whose pieces lie side by side, and which adds them up.

The model is an MLP of two numbers in, four units and two numbers out, in whole numbers; the ranks are threads. Knows no engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.layers.parallel import Ranks
from minivllm.teach.bugs.fault import Comparison, Fault
from minivllm.teach.thread_ranks import on_ranks
from minivllm.teach.trial import BadInput, require_int

UP = torch.tensor([[1, -2], [-2, 1], [1, -1], [-1, 1]])  # [4 units, 2]
DOWN = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 3]])        # [2, 4 units]
_SIZES, _MOST = (1, 2, 4), 9


class ColumnParallel:
    """y = x W^T, W [out, in]. Each of N ranks holds out / N rows of W and computes as many numbers of y."""

    def __init__(self, weight: Tensor, ranks: Ranks):
        self.weight, self.ranks = weight.chunk(ranks.size)[ranks.rank], ranks

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return self.ranks.all_reduce(y)


class _RightColumnParallel(ColumnParallel):
    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def mlp(first: type[ColumnParallel], x: list[int], size: int) -> list[int]:
    """down(relu(up(x))): the first layer split by `first`, the second by rows with its one all-reduce."""
    def work(rank: Ranks) -> list[int]:
        hidden = first(UP, rank)(torch.tensor([x])).relu()             # [1, 4 / N]
        down = DOWN.chunk(rank.size, dim=1)[rank.rank]                 # [2, 4 / N]
        return rank.all_reduce(hidden @ down.T)[0].tolist()

    return on_ranks(size, work)[0]


def _compare(fault: Fault, x: Any, ranks: Any) -> Comparison:
    if not isinstance(x, (list, tuple)) or len(x) != 2:
        raise BadInput(f"x must be a list of 2 whole numbers, such as [1, 1], got {x!r:.60}")
    x = [require_int("a number of x", number, -_MOST, _MOST) for number in x]
    size = require_int("ranks", ranks, 1, 4)
    if size not in _SIZES:
        raise BadInput(f"ranks must divide the 4 units: use one of {', '.join(map(str, _SIZES))}, got {size}")
    right, faulty = mlp(fault.right, x, size), mlp(fault.faulty, x, size)
    if right != faulty:
        return Comparison(True, f"one rank, and {size} by the right layer, give {right},", f"{size} ranks by the faulty one give {faulty}")
    return Comparison(False, str(right), str(faulty), _why(x, size))  # on 2 or 4 ranks only where both numbers are equal and not negative


def _why(x: list[int], size: int) -> str:
    units = (UP @ torch.tensor(x)).tolist()
    if size == 1:
        return "with one rank an all-reduce returns what it was given: every test on one GPU passes. Take more ranks"
    if not any(x):
        return "of x = [0, 0] every product is 0, and so is every sum of them. Take another x"
    return f"the four units are {units}: relu makes 0 of each, and of their sums too. Make at least one unit positive"


FAULTS = [
    Fault("reduced_columns", "an all-reduce over pieces that lie side by side",
          "A published layer all-reduces after a column-parallel product. The pieces belong to different units, so their sum means "
          "nothing; but it has the shape that the next layer wants, nothing fails, and on one GPU the all-reduce does nothing at all.",
          ColumnParallel, _RightColumnParallel, _compare, {"x": ..., "ranks": ...}, exposing={"x": [1, 0], "ranks": 2},
          harmless={"x": [1, 1], "ranks": 2}),
]
