"""Ranks: the processes that share one model, each holding a part of most weights (Shoeybi et al., 2019). Alone, a rank holds them whole.

Layers ask here, when they are made, which part is theirs; `building_for` says for whom, as torch's own `with device:` says where.
How ranks talk is `worker/distributed.py`'s business. Built in notebook 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minivllm.kernels.linear import linear


class Ranks:
    """One rank, alone: nothing to add up and nothing to gather."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, on every rank; x may be overwritten."""
        return x

    def sum_of(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The sum of every rank's product(x) [T, n], on every rank. Row by row: product(x)[t] depends on x[t] alone."""
        return self.all_reduce(product(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """[R, n] of each rank -> [R, size * n], rank 0's columns first."""
        return x

    def smallest(self, number: int) -> int:
        """The smallest of every rank's number, on every rank."""
        return number


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
    """`size` of `whole` rows (dim 0) or columns (dim 1), from `start`."""

    whole: int
    start: int
    size: int
    dim: int = 0


def share(whole: int, dim: int = 0) -> Part:
    """This rank's equal part; where `whole` does not divide, as it may for a vocabulary, the last ranks have less."""
    each = -(-whole // ranks().size)
    start = min(ranks().rank * each, whole)
    return Part(whole, start, min(each, whole - start), dim)


def shares(outputs: int | dict[str, int | Part]) -> dict[str, Part]:
    """This rank's share of a layer's outputs, or of each of its parts by name; a part may have been shared out already."""
    named = outputs if isinstance(outputs, dict) else {"": outputs}
    return {name: part if isinstance(part, Part) else share(part) for name, part in named.items()}


def share_kv(num_kv_heads: int, head_dim: int) -> Part:
    """The rows of this rank's kv heads. Where there are fewer heads than ranks, several ranks hold the same one: that of their query heads."""
    first = ranks().rank * num_kv_heads // ranks().size
    return Part(num_kv_heads * head_dim, first * head_dim, local_kv_heads(num_kv_heads, ranks().size) * head_dim)


def local_kv_heads(num_kv_heads: int, size: int) -> int:
    """How many kv heads a rank of `size` holds."""
    return max(1, num_kv_heads // size)


class VocabParallel(nn.Module):
    """Both ends of a model: a weight [V, hidden] of which each rank holds as many rows; the last one's that are no token's are zero."""

    def __init__(self, vocab_size: int, hidden_size: int, weight: nn.Parameter | None = None):
        super().__init__()
        self.ranks, part = ranks(), share(vocab_size)
        self.parts = {"": part}
        rows = -(-vocab_size // self.ranks.size)
        self.weight = nn.Parameter(torch.zeros(rows, hidden_size), requires_grad=False) if weight is None else weight

    def look_up(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]: a rank looks up the ids that are its own and adds zeros for the others."""
        part = self.parts[""]
        local = input_ids - part.start
        mine = (local >= 0) & (local < part.size)
        rows = nn.functional.embedding(torch.where(mine, local, 0), self.weight)
        return self.ranks.all_reduce(rows.masked_fill_(~mine[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V], on every rank."""
        return self.ranks.all_gather(linear(hidden, self.weight))[:, :self.parts[""].whole]
