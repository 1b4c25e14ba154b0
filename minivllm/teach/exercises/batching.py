"""Exercises of notebook 06: the idle share of static batches, and a policy that prefers short prompts and starves nobody.

Many policies are right, so they have a checker of their own (policies_on_trial).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minivllm.engine.policies import first_come_first_served
from minivllm.engine.sequence import Sequence
from minivllm.teach.diagnose import Result
from minivllm.teach.exercise import Case, Exercise, Mistake
from minivllm.teach.exercises import policies_on_trial


def idle_share(answers: list[int], batch_size: int) -> float:
    """Share of the cells, rows times steps, in which a static batch computes nothing that is wanted. All batches have `batch_size` rows."""
    batches = [answers[i:i + batch_size] for i in range(0, len(answers), batch_size)]
    return 1 - sum(answers) / (batch_size * sum(map(max, batches)))


def _batches(answers: list[int], size: int) -> list[list[int]]:
    return [answers[i:i + size] for i in range(0, len(answers), size)]


def _cells(answers: list[int], size: int) -> int:
    return size * sum(map(max, _batches(answers, size)))


def _idle_cases() -> list[Case]:
    rng = random.Random(6)
    shown = [([3, 1], 2, "one batch of two"), ([4, 4, 4], 3, "all equally long"), ([2, 8, 5, 5], 2, "two batches"),
             ([5, 3, 2], 2, "the last batch has one request"), ([7], 4, "a single request in a batch of four"), ([6, 2, 9], 1, "batches "
                         "of one")]
    drawn = [([rng.randint(1, 512) for _ in range(n)], size, "") for n, size in ((16, 8), (64, 8), (61, 16))]
    return [Case({"answers": answers, "batch_size": size}, note) for answers, size, note in shown + drawn]


IDLE_SHARE = Exercise("idle_share", _idle_cases(), idle_share, kind="float", mistakes=[
    Mistake(lambda a, b: 1 - idle_share(a, b), "that is the share in use: the idle one is 1 minus it"),
    Mistake(lambda a, b: 100 * idle_share(a, b), "that is in percent: the share is a number from 0 to 1"),
    Mistake(lambda a, b: 1 - sum(a) / sum(len(x) * max(x) for x in _batches(a, b)), "the last batch is counted with as many rows as it has "
            "requests: the rows that nobody took are idle too, so multiply by batch_size"),
    Mistake(lambda a, b: 1 - sum(a) / (b * len(_batches(a, b)) * max(a)), "every batch lasts as long as the longest answer of all here: "
                "each one "
            "ends with its own longest, so take max(batch) of each"),
    Mistake(lambda a, b: sum(1 - sum(x) / (b * max(x)) for x in _batches(a, b)) / len(_batches(a, b)), "the mean of the batches' shares "
                "counts a "
            "short batch as much as a long one: add up cells over all batches, then divide once"),
    Mistake(lambda a, b: _cells(a, b) - sum(a), "that is the number of idle cells: divide it by the number of all cells"),
    Mistake(lambda a, b: (_cells(a, b) - sum(a)) / sum(a), "the idle cells are divided by the used ones: divide by all of them, used "
                                                           "and idle"),
    Mistake(lambda a, b: 1 - sum(a) / sum(map(max, _batches(a, b))), "the steps are not multiplied by the rows: a batch has batch_size "
                "cells in every "
            "step"),
    Mistake(lambda a, b: idle_share(sorted(a), b), "the answers are sorted first: a batch takes requests as they come, and nobody knows an "
            "answer's length before it is written"),
    Mistake(lambda a, b: idle_share(a[:len(a) // b * b], b) if len(a) >= b else 0.0, "the last batch, which is not full, is left out: "
                "range(0, "
            "len(answers), batch_size) begins it too"),
    Mistake(lambda a, b: sum(len(x) * max(x) - sum(x) for x in _batches(a, b)) / _cells(a, b), "the rows that nobody took in the last "
            "batch are among all cells, but not among the idle ones: such a row is idle for the whole batch"),
    Mistake(lambda a, b: sum(len(x) * max(x) - sum(x) for x in _batches(a, b)) / sum(map(max, _batches(a, b))), "idle cells are divided by "
            "steps: a step has batch_size cells, so divide by batch_size times the steps"),
    Mistake(lambda a, b: 1 - sum(a) / (b * sum(x[0] for x in _batches(a, b))), "each batch ends with its first request here: it lasts as "
            "long as the longest answer in it"),
    Mistake(lambda a, b: idle_share(a[:b], b), "only the first batch is counted: is the return inside the loop?"),
    Mistake(lambda a, b: idle_share(_batches(a, b)[-1], b), "only the last batch is counted: add up over all of them, and begin the sums "
            "before the loop"),
    *(Mistake(lambda a, b, digits=digits: round(idle_share(a, b), digits), f"rounded to {digits} digits: do not round, return the share "
                f"as it "
              "is") for digits in (1, 2, 3)),
])
EXERCISES = [IDLE_SHARE]


def policy(running: tuple[Sequence, ...], waiting: Iterable[Sequence], budget: int) -> Iterable[tuple[Sequence, int]]:
    """Shorter prompts first; a step of waiting is worth two tokens. Who runs is served as under first come, first served."""
    queue = sorted(waiting, key=lambda seq: len(seq) + 2 * seq.arrival_time)
    return first_come_first_served(running, queue, budget)


def _ranked(rank: Callable[[Sequence], Any]) -> Callable:
    """The policy with another rank for what waits."""
    return lambda running, waiting, budget: first_come_first_served(running, sorted(waiting, key=rank), budget)


def _waiting_first(running: Any, waiting: Any, budget: int) -> Iterator[tuple[Sequence, int]]:
    for seq in [*sorted(waiting, key=lambda seq: len(seq) + 2 * seq.arrival_time), *running]:
        yield seq, budget


def _only_waiting(running: Any, waiting: Any, budget: int) -> Iterator[tuple[Sequence, int]]:
    for seq in sorted(waiting, key=lambda seq: len(seq) + 2 * seq.arrival_time):
        yield seq, budget


def _one_token_each(running: Any, waiting: Any, budget: int) -> list[tuple[Sequence, int]]:
    return [(seq, 1) for seq in [*running, *sorted(waiting, key=lambda seq: len(seq) + 2 * seq.arrival_time)]]


def _only_running(running: Any, waiting: Any, budget: int) -> list[tuple[Sequence, int]]:
    return [(seq, budget) for seq in running]


def _pops(running: Any, waiting: Any, budget: int) -> Iterator[tuple[Sequence, int]]:
    yield from first_come_first_served(running, (), budget)
    while waiting:
        yield waiting.popleft(), budget


def _sorts_in_place(running: Any, waiting: Any, budget: int) -> Iterable[tuple[Sequence, int]]:
    waiting.sort(key=len)
    return first_come_first_served(running, waiting, budget)


def _sorts_pairs(running: Any, waiting: Any, budget: int) -> Iterable[tuple[Sequence, int]]:
    ranked = sorted((len(seq) + 2 * seq.arrival_time, seq) for seq in waiting)
    return first_come_first_served(running, [seq for _, seq in ranked], budget)


def _whole_prompts(running: Any, waiting: Any, budget: int) -> Iterator[tuple[Sequence, int]]:
    yield from first_come_first_served(running, (), budget)
    left = budget - len(running)
    for seq in sorted(waiting, key=lambda seq: len(seq) + 2 * seq.arrival_time):
        if len(seq) <= left:
            left -= len(seq)
            yield seq, len(seq)


def _begins_with_one_token(running: Any, waiting: Any, budget: int) -> Iterator[tuple[Sequence, int]]:
    yield from first_come_first_served(running, (), budget)
    yield from ((seq, 1) for seq in sorted(waiting, key=lambda seq: len(seq) + 2 * seq.arrival_time))


def _best_alone(running: Any, waiting: Any, budget: int) -> Iterable[tuple[Sequence, int]]:
    return first_come_first_served(running, sorted(waiting, key=lambda seq: len(seq) + 2 * seq.arrival_time)[:1], budget)


def _looks_into_an_empty_queue(running: Any, waiting: Any, budget: int) -> Iterable[tuple[Sequence, int]]:
    return first_come_first_served(running, [min(waiting, key=len)], budget)


def _spends_nothing_left(running: Any, waiting: Any, budget: int) -> Iterable[tuple[Sequence, int]]:
    queue = sorted(waiting, key=lambda seq: len(seq) + 2 * seq.arrival_time)
    return [*((seq, 1) for seq in running), *((seq, budget) for seq in queue)]


def _newest_of_running_first(running: Any, waiting: Any, budget: int) -> Iterator[tuple[Sequence, int]]:
    for seq in [*running[::-1], *sorted(waiting, key=lambda seq: len(seq) + 2 * seq.arrival_time)]:
        yield seq, budget


#: Wrong policies that people write, each with words that its message must hold.
POLICY_MISTAKES: list[tuple[Callable, str]] = [
    (first_come_first_served, "that is the order in which they came"),
    (_ranked(lambda seq: -len(seq)), "the longest prompt goes first"),
    (_ranked(len), "its rank must get better while it waits"),
    (_ranked(lambda seq: len(seq) - 2 * seq.arrival_time), "the one that came later goes first"),
    (_ranked(lambda seq: len(seq) + 1000 * seq.arrival_time), "is worth so much that"),
    (_ranked(lambda seq: (len(seq), -seq.arrival_time)), "the one that came later goes first"),
    (_ranked(lambda seq: len(seq) + 0.001 * seq.arrival_time), "its rank must get better while it waits"),
    (_ranked(lambda seq: len(seq) + 0.5 * seq.arrival_time), "count for 1 to 10 tokens"),
    (_ranked(lambda seq: (len(seq) + 2 * seq.arrival_time, -seq.seq_id)), "equal ranks keep the order"),
    (_waiting_first, "took the whole budget"),
    (_only_waiting, "name what runs as well"),
    (_one_token_each, "what is left of the budget"),
    (_spends_nothing_left, "what is left of the budget"),
    (_only_running, "name what waits, too"),
    (_whole_prompts, "does not fit into the budget"),
    (_begins_with_one_token, "not with one token"),
    (_best_alone, "name all that wait"),
    (_looks_into_an_empty_queue, "is empty in some steps"),
    (lambda running, waiting, budget: first_come_first_served(running, waiting[:1], budget), "[*waiting]"),
    (lambda running, waiting, budget: [(seq, budget) for seq in running + waiting], "[*running, *waiting]"),
    (_pops, "`waiting` belongs to the scheduler"),
    (_sorts_in_place, "sorted(waiting, key=...) makes a new list"),
    (_sorts_pairs, "compares the sequences themselves"),
    (lambda running, waiting, budget: sorted(waiting, key=len), "pairs (sequence, most tokens)"),
    (lambda running, waiting, budget: [(seq, budget / 2) for seq in [*running, *waiting]], "a whole number"),
    (lambda running, waiting, budget: [(seq.seq_id, budget) for seq in [*running, *waiting]], "the sequence itself"),
    (lambda running, waiting, budget: print(end="") if budget else 1, "is a `return` missing?"),
]

CHECKERS: dict[str, Callable[[Any], Result]] = {"policy": policies_on_trial.judge}
