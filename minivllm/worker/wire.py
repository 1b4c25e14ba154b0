"""A StepPlan as bytes, for the other ranks: from one decode to the next little changes, and only that is sent.

Both ends remember the rows of the last plan. A row that goes on from there (one token more, the same sampling, perhaps new blocks) is sent
as its token; any other, a prompt's, a chunk's, one that comes back after a preemption, is sent whole. Nothing has to be told when a
sequence ends. Knows neither processes nor tensors. Built in notebook 10.
"""

from __future__ import annotations

import pickle
from array import array
from dataclasses import fields
from operator import attrgetter

from minivllm.engine.step import PlanRow, StepPlan

#: What must be as it was for a row to go on; the other three are what changes.
_KEPT = attrgetter(*(field.name for field in fields(PlanRow) if field.name not in ("start", "token_ids", "block_table")))
_UNKNOWN = (-1, -1, [], ())


class PlanWriter:
    """The sending end. Every plan it encodes must reach the reader, in order."""

    def __init__(self) -> None:
        #: seq_id -> (place in the last plan, where the next token goes, block table, what must stay as it is)
        self._last: dict[int, tuple[int, int, list[int], tuple]] = {}

    def encode(self, plan: StepPlan) -> bytes:
        places, tokens, grown, whole, now = array("i"), array("i"), [], [], {}
        for index, row in enumerate(plan.rows):
            start, ids, table, kept = row.start, row.token_ids, row.block_table, _KEPT(row)
            now[row.seq_id] = (index, start + len(ids), table, kept)
            place, expected, before, was = self._last.get(row.seq_id, _UNKNOWN)
            if start != expected or len(ids) != 1 or kept != was or (table != before and table[:len(before)] != before):
                whole.append((index, row))
                continue
            if len(table) > len(before):
                grown.append((len(places), table[len(before):]))
            places.append(place)
            tokens.append(ids[0])
        in_order = not whole and places == array("i", range(len(self._last)))
        self._last = now
        return pickle.dumps((None if in_order else places.tobytes(), tokens.tobytes(), grown, whole), pickle.HIGHEST_PROTOCOL)


class PlanReader:
    """The receiving end. A plan it returned is its own: the next `decode` changes its rows."""

    def __init__(self) -> None:
        self._last: list[PlanRow] = []

    def decode(self, data: bytes) -> StepPlan:
        places, tokens, grown, whole = pickle.loads(data)
        rows = self._last if places is None else [self._last[place] for place in array("i", places)]
        for row, token in zip(rows, array("i", tokens)):
            row.start += len(row.token_ids)
            row.token_ids = [token]
        for index, blocks in grown:
            rows[index].block_table = rows[index].block_table + blocks  # a new list: others hold the old one
        for index, row in whole:  # in the order of their places
            rows.insert(index, row)
        self._last = rows
        return StepPlan(rows[:])
