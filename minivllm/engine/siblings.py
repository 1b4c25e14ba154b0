"""Several answers to one prompt: a request of n > 1 is n sequences, the first of which leads.

All are queued at once, so the request keeps its turn. The leader computes the prompt; the others are held back until it has, and then share
the prompt's full blocks through the prefix cache, like any prompt that was seen before. Each answer stops, is preempted and finishes
by itself; limits, events and stats count sequences. Built in notebook 08.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minivllm.engine.options import SequenceOptions
from minivllm.engine.sequence import Sequence


def with_siblings(leader: Sequence, ids: Iterator[int]) -> list[Sequence]:
    """The leader and its n - 1 siblings, with ids from `ids`. They share its seed: their number makes their noise differ."""
    for number in range(1, leader.sampling.n):
        options = SequenceOptions(sibling=number, leader=leader, end_token_ids=leader.options.end_token_ids)
        leader.options.siblings.append(replace(leader, seq_id=next(ids), token_ids=list(leader.token_ids), block_table=[], block_hashes=[],
                                               options=options))
    return members(leader)


def members(seq: Sequence) -> list[Sequence]:
    """All sequences of the request that `seq` leads, itself first."""
    return [seq] if seq.options is None else [seq, *seq.options.siblings]


def answered(seq: Sequence) -> bool:
    """Whether every answer of the request that `seq` leads has ended."""
    return seq.finished and (seq.options is None or all(sibling.finished for sibling in seq.options.siblings))
