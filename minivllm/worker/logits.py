"""Edits: logits changed before the temperature, for the rows that ask for it: penalties, logit_bias, allowed_token_ids, min_tokens.

What each row asks for is written down once, when the batch's sequences change, as tensors of (row, token id, value); a step then only looks
things up on the device. The penalties' tokens are kept here too, in a History: rows bring what came before them once (see
engine/options.py), and every step adds the one token that it computes. Counts are made from them a few rows at a time, so that no table
of all rows by the whole vocabulary is ever held.
Knows no sequence beyond its row, and nothing of temperature and filters (worker/sampler.py). Built in notebook 08.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from minivllm.engine.step import PlanRow

_NEVER = float("-inf")
POSITION_MASK = 0xFFFFFFFF  # of a sampler's `positions`; the bits above it hold the sibling's number


class History:
    """The tokens of the rows that have penalties: `tokens` [P, L] int32 on the device, -1 behind each row's last one.

    It holds the rows of the last step that had any, in their order. Whoever returns after a gap brings its tokens along.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.who: list[int] = []
        self.tokens = torch.empty(0, 0, dtype=torch.int32, device=device)

    def update(self, rows: list[PlanRow]) -> None:
        """Take in the tokens that `rows` compute in this step. One copy to the device for all of them."""
        who = [row.seq_id for row in rows]
        longest = max(row.context_len for row in rows)
        if who != self.who or longest > self.tokens.shape[1] or any(row.options.history is not None for row in rows):
            self._rebuild(rows, who, longest)
        new = torch.tensor([[row.start for row in rows], [row.token_ids[0] for row in rows]]).to(self.device)
        self.tokens[torch.arange(len(rows), device=self.device), new[0]] = new[1].to(torch.int32)

    def _rebuild(self, rows: list[PlanRow], who: list[int], longest: int) -> None:
        """Rows in their new places, those with a history filled from it, and room for twice the longest."""
        place = {seq_id: index for index, seq_id in enumerate(self.who)}
        table = torch.full((len(rows), 2 * longest), -1, dtype=torch.int32, device=self.device)
        if arrived := [index for index, row in enumerate(rows) if row.options.history is not None]:
            known = [rows[index].options.history + rows[index].token_ids for index in arrived]
            width = max(len(tokens) for tokens in known)
            padded = torch.tensor([tokens + [-1] * (width - len(tokens)) for tokens in known], dtype=torch.int32)
            table[torch.tensor(arrived, device=self.device), :width] = padded.to(self.device)
        stayed = [index for index, row in enumerate(rows) if row.options.history is None]
        if unknown := [who[index] for index in stayed if who[index] not in place]:
            raise ValueError(f"rows of sequences {unknown} need their history: the step before did not hold them")
        if stayed:
            width = min(table.shape[1], self.tokens.shape[1])
            moved = torch.tensor([stayed, [place[who[index]] for index in stayed]], device=self.device)
            table[moved[0], :width] = self.tokens[moved[1], :width]
        self.who, self.tokens = who, table


@dataclass(slots=True)
class Entries:
    """(row, token id, value) of some rows, as tensors; cut into parts of rows, whose rows are counted from the part's first."""

    rows: Tensor
    ids: Tensor
    values: Tensor
    ends: list[int]

    @classmethod
    def of(cls, per_row: list[Iterable[tuple[int, float]]], part_size: int, device: torch.device) -> Entries | None:
        """None where no row has an entry."""
        flat = [(index % part_size, token, value) for index, entries in enumerate(per_row) for token, value in entries]
        if not flat:
            return None
        ints = torch.tensor([entry[:2] for entry in flat]).t().to(device)
        lengths = [sum(len(entries) for entries in per_row[first:first + part_size]) for first in range(0, len(per_row), part_size)]
        return cls(ints[0], ints[1], torch.tensor([entry[2] for entry in flat], dtype=torch.float32, device=device), [0, *accumulate(lengths)])

    def part(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        part = slice(self.ends[number], self.ends[number + 1])
        return self.rows[part], self.ids[part], self.values[part]


class Edits:
    """What `rows` ask for, in parts of `part_size` rows. `penalised`: which of the rows have penalties; History holds those, in this order."""

    def __init__(self, rows: list[PlanRow], part_size: int, device: torch.device):
        params = [row.sampling for row in rows]
        self.part_size = part_size
        self.penalised = [index for index, p in enumerate(params) if p.needs_history]
        place = {index: number for number, index in enumerate(self.penalised)}
        # A row without penalties looks at another's tokens, and multiplies what it finds there by 1 or 0.
        ints = torch.tensor([[place.get(index, 0) for index in range(len(rows))],
                             [row.options.num_prompt_tokens if row.options else 0 for row in rows],
                             [p.allowed_token_ids is not None for p in params]]).to(device)
        self.places, self.prompt_lens, self.limited = ints[0], ints[1], ints[2].bool()
        penalties = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
        self.repetition, self.presence, self.frequency = torch.tensor(penalties, dtype=torch.float32, device=device).t()
        self.bias = Entries.of([p.logit_bias for p in params], part_size, device)
        self.allowed = Entries.of([[(token, 0.0) for token in set(p.allowed_token_ids or ())] for p in params], part_size, device)
        ends = [row.options.end_token_ids if row.options else () for row in rows]
        first = [row.options.num_prompt_tokens + row.sampling.min_tokens if row.options else 0 for row in rows]
        self.banned = Entries.of([[(token, until) for token in ids] for ids, until in zip(ends, first)], part_size, device)

    def apply(self, logits: Tensor, part: int, positions: Tensor, history: History) -> Tensor:
        """logits float32 [m, V] of part number `part`, changed in place. positions [m]: what the sampler has for these rows."""
        here = slice(part * self.part_size, part * self.part_size + len(logits))
        if self.penalised:
            self._penalise(logits, here, history.tokens)
        if self.bias is not None:
            rows, ids, values = self.bias.part(part)
            logits[rows, ids] += values
        if self.allowed is not None:
            rows, ids, _ = self.allowed.part(part)
            kept = logits[rows, ids]
            logits.masked_fill_(self.limited[here, None], _NEVER)
            logits[rows, ids] = kept
        if self.banned is not None:
            rows, ids, until = self.banned.part(part)
            logits[rows, ids] = torch.where((positions & POSITION_MASK)[rows] < until, _NEVER, logits[rows, ids])
        return logits

    def _penalise(self, logits: Tensor, part: slice, tokens: Tensor) -> None:
        """Repetition over prompt and answer, then presence and frequency over the answer, as vLLM orders them."""
        size = logits.shape[-1]
        tokens = tokens[self.places[part]].long()  # [m, L]
        in_answer = torch.arange(tokens.shape[1], device=tokens.device) >= self.prompt_lens[part, None]
        tokens = torch.where(tokens < 0, size, tokens)  # what is no token is counted in a column of its own
        counts = torch.zeros(len(logits), size + 1, dtype=torch.float32, device=logits.device)
        seen = counts.scatter_add(1, tokens, torch.ones_like(tokens, dtype=torch.float32))[:, :size] > 0
        factor = self.repetition[part, None]
        logits.copy_(torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
        counts = counts.scatter_add_(1, tokens, in_answer.float())[:, :size]  # [m, V]
        logits -= counts * self.frequency[part, None]
        logits -= (counts > 0) * self.presence[part, None]
