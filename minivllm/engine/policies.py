"""Who is served first: the scheduler's one replaceable decision.

A policy is called once a step with what runs (oldest first), what waits (in its order) and the step's token budget, and yields
(sequence, most tokens it may get), in the order to serve them. Whatever it says, the budget holds, nothing that waits overtakes
something named before it that does not fit, and the newest running sequence is the first to lose its blocks.
A policy that reorders must let what waits grow older, else a stream of favoured requests starves the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.sequence import Sequence

Policy = Callable[[tuple[Sequence, ...], Iterable[Sequence], int], Iterable[tuple[Sequence, int]]]


def first_come_first_served(running: tuple[Sequence, ...], waiting: Iterable[Sequence], budget: int) -> Iterator[tuple[Sequence, int]]:
    """The running ones first, oldest first and each sure of at least one token; then the queue in its order."""
    spare = budget - len(running)
    for seq in running:
        extra = len(seq.token_ids) - seq.num_computed_tokens - 1  # beyond that one token: 0 in decode
        if extra > 0:
            extra = min(extra, spare)
            spare -= extra
        yield seq, 1 + extra
    for seq in waiting:
        yield seq, budget


class Aged:
    """Like FCFS, but what waits is served by rank, smallest first; each step of waiting lowers a sequence's rank by `ageing`."""

    def __init__(self, rank: Callable[[Sequence], float], ageing: float):
        self.rank, self.ageing = rank, ageing
        self.step = 0
        self.since: dict[int, int] = {}

    def __call__(self, running: tuple[Sequence, ...], waiting: Iterable[Sequence], budget: int) -> Iterator[tuple[Sequence, int]]:
        self.step += 1
        self.since = {seq.seq_id: self.since.get(seq.seq_id, self.step) for seq in waiting}
        queue = sorted(waiting, key=lambda seq: self.rank(seq) + self.ageing * self.since[seq.seq_id])
        return first_come_first_served(running, queue, budget)


def by_priority(blocks: BlockManager) -> Policy:
    """The smallest `priority` number first; a hundred steps of waiting are worth one."""
    return Aged(lambda seq: seq.priority, ageing=0.01)


def shortest_first(blocks: BlockManager) -> Policy:
    """The shortest prompt first; a step of waiting is worth eight tokens."""
    return Aged(lambda seq: len(seq.token_ids), ageing=8)


def longest_hit_first(blocks: BlockManager) -> Policy:
    """The longest prefix in the cache first, before it is evicted; a step of waiting is worth eight tokens."""
    return Aged(lambda seq: -len(blocks.find_prefix(seq)) * blocks.block_size, ageing=8)


#: name -> what makes the policy for a pool.
POLICIES: dict[str, Callable[[BlockManager], Policy]] = {
    "fcfs": lambda blocks: first_come_first_served,
    "priority": by_priority,
    "shortest_first": shortest_first,
    "longest_hit_first": longest_hit_first,
}


def make_policy(policy: str | Policy, blocks: BlockManager) -> Policy:
    """A policy by its name in POLICIES, or one's own as it is."""
    return policy if callable(policy) else POLICIES[policy](blocks)
