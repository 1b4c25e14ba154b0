"""Ranks: the processes that share one model, each holding a part of most weights (Shoeybi et al., 2019). Alone, a rank holds them whole.

Layers ask here, when they are made, which part is theirs; `building_for` says for whom, as torch's own `with device:` says where.
How ranks talk is `worker/distributed.py`'s business. Built in notebook 10.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.kernels.linear import linear


class Ranks:
    """One rank, alone: nothing to add up and nothing to gather."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, on every rank; x may be overwritten."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[R, n] of each rank -> [R, size * n], rank 0's columns first."""
        return x


ALONE = Ranks()
_building_for: ContextVar[Ranks] = ContextVar("building_for", default=ALONE)


@contextmanager
def building_for(ranks: Ranks) -> Iterator[None]:
    """`with building_for(ranks):` layers made inside are that rank's part of the model."""
    token = _building_for.set(ranks)
    try:
        yield
    finally:
        _building_for.reset(token)


def ranks() -> Ranks:
    """For whom layers are being made."""
    return _building_for.get()


@dataclass(frozen=True)
class Part:
    """`size` of `whole` rows or columns, from `start`."""

    whole: int
    start: int
    size: int


def share(whole: int) -> Part:
    """This rank's equal part; where `whole` does not divide, as it may for a vocabulary, the last ranks have less."""
    each = -(-whole // ranks().size)
    start = min(ranks().rank * each, whole)
    return Part(whole, start, min(each, whole - start))


def share_kv(num_kv_heads: int, head_dim: int) -> Part:
    """The rows of this rank's kv heads. Where there are fewer heads than ranks, several ranks hold the same one: that of their query heads."""
    first = ranks().rank * num_kv_heads // ranks().size
    return Part(num_kv_heads * head_dim, first * head_dim, local_kv_heads(num_kv_heads, ranks().size) * head_dim)


def local_kv_heads(num_kv_heads: int, size: int) -> int:
    """How many kv heads a rank of `size` holds."""
    return max(1, num_kv_heads // size)


def padded(part: Part) -> int:
    """Rows that every rank of a vocabulary has: those that are none of its own are zero."""
    return -(-part.whole // ranks().size)


def look_up(input_ids: Tensor, weight: Tensor, part: Part, among: Ranks) -> Tensor:
    """[T] -> [T, hidden]: a rank looks up the ids that are its own and adds zeros for the others."""
    local = input_ids - part.start
    mine = (local >= 0) & (local < part.size)
    rows = torch.nn.functional.embedding(torch.where(mine, local, 0), weight)
    return among.all_reduce(rows.masked_fill_(~mine[:, None], 0))


def logits(hidden: Tensor, weight: Tensor, part: Part, among: Ranks) -> Tensor:
    """[R, hidden] -> [R, V], on every rank."""
    return among.all_gather(linear(hidden, weight))[:, :part.whole]
