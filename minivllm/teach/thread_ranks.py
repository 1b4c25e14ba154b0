"""Ranks as threads of one process that meet at a table: what several ranks compute, without processes and without a network.

A collective that some ranks call and others do not ends with an error that says who is missing, where real ranks would wait for ever.
Knows no model. Built in notebook 10, in a few lines; the real group is `worker/distributed.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from minivllm.layers.parallel import Ranks


class MeetingError(RuntimeError):
    """The ranks did not meet as they should. `advice` says what to look at."""

    advice = "every rank must call each collective, in the same order, with a tensor of the same shape: no `if rank == ...` around it"


class Table:
    """Where `size` ranks meet: each lays a tensor down and takes up what all have laid down, in the order of the ranks."""

    def __init__(self, size: int):
        self.size, self.laid, self.left = size, {}, set()
        self._round, self._taken, self._broken = 0, [], ""
        self._meeting = threading.Condition()

    def exchange(self, rank: int, what: str, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, once all have come. Raises MeetingError if somebody never will."""
        with self._meeting:
            self.laid[rank] = what, x.clone()  # the rank may go on to change x while others still read it
            this = self._round
            self._look()
            while self._round == this and not self._broken:
                self._meeting.wait()
            if self._round == this:
                raise MeetingError(self._broken)
            return self._taken

    def leave(self, rank: int) -> None:
        """This rank has ended, and comes no more."""
        with self._meeting:
            self.left.add(rank)
            self._look()

    def _look(self) -> None:
        """Once everybody waits or has left: the next round, or the end."""
        if self._broken or not self.laid or len(self.laid) + len(self.left) < self.size:
            return
        laid = [self.laid[rank] for rank in sorted(self.laid)]
        if self.left:
            self._broken = f"{_named(self.laid)} in an {laid[0][0]} for {_named(self.left, False)}, which ended without it"
        elif len({(what, tuple(x.shape)) for what, x in laid}) > 1:
            self._broken = "the ranks meet with different things: " + ", ".join(f"{what} of {list(x.shape)}" for what, x in laid)
        else:
            self._taken, self.laid, self._round = [x for _, x in laid], {}, self._round + 1
        self._meeting.notify_all()


class ThreadRank(Ranks):
    """One rank, in a thread of its own. `calls` notes its collectives: (name, shape)."""

    def __init__(self, rank: int, table: Table):
        self.rank, self.size, self.table = rank, table.size, table
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange("all-reduce", x)).sum(dim=0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange("all-gather", x), dim=1)

    def smallest(self, number: int) -> int:
        return min(int(other) for other in self._exchange("smallest", torch.tensor(number)))

    def _exchange(self, what: str, x: Tensor) -> list[Tensor]:
        self.calls.append((what, tuple(x.shape)))
        return self.table.exchange(self.rank, what, x)


def on_ranks(size: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """What `work(rank)` returns on each of `size` ranks, rank 0's first. An error of any rank ends all of them and is raised here."""
    table = Table(size)
    ranks = [ThreadRank(rank, table) for rank in range(size)]
    return run(ranks, work)


def run(ranks: list[ThreadRank], work: Callable[[ThreadRank], Any]) -> list[Any]:
    """As `on_ranks`, on ranks that are there already: they come back to their table."""
    table = ranks[0].table
    table.left, table.laid, table._broken = set(), {}, ""

    def one(rank: ThreadRank) -> Any:
        try:
            return work(rank)
        finally:
            table.leave(rank.rank)

    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = [threads.submit(one, rank) for rank in ranks]
        errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:  # a rank that waited in vain knows less than the one that failed
        raise next((error for error in errors if not isinstance(error, MeetingError)), errors[0])
    return [future.result() for future in futures]


def _named(ranks: Any, waits: bool = True) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    verb = (" waits" if len(numbers) == 1 else " wait") if waits else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}{verb}"
