"""A planted fault of decoding by replay: a tensor that is bound anew while the recording still reads the old one.

The model is a toy of whole numbers with a cache; the recording is a real Tape. Knows no engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.teach.bugs.fault import Comparison, Fault
from minivllm.teach.tape import Tape
from minivllm.teach.trial import BadInput, require_int

_SIZE, _MOST, _VOCAB = 32, 16, 997  # slots of a sequence's block, tokens of an answer, ids


class Decoder:
    """Decodes `count` sequences, each with a block of its own. A step is recorded once and replayed ever after."""

    def __init__(self, count: int):
        self.spare = count                               # a block for rows of padding
        self.cache = torch.zeros((count + 1) * _SIZE, dtype=torch.int64)
        self.tokens = torch.arange(1, count + 1) * 100   # [B]: each sequence begins with one token
        self.lengths = torch.zeros(count, dtype=torch.int64)
        self.blocks = torch.arange(count)
        with Tape() as self.tape:
            self.next_tokens = self.forward()

    def forward(self) -> Tensor:
        """Write each row's token to its block, read the block, and make the next token of both. [B]"""
        self.cache.index_copy_(0, self.blocks * _SIZE + self.lengths, self.tokens)
        positions = torch.arange(_SIZE).expand(len(self.tokens), -1)
        seen = self.cache[self.blocks[:, None] * _SIZE + positions]
        return ((seen * (positions + 3) * (positions <= self.lengths[:, None])).sum(dim=1) + 1) % _VOCAB

    def step(self) -> list[int]:
        """The next token of every row, which is also the token to be computed next."""
        self.tape.replay()
        self.tokens.copy_(self.next_tokens)
        self.lengths += 1
        return self.next_tokens.tolist()

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows alone: they move up, and padding takes the places behind them."""
        count = len(rows)
        self.tokens[:count] = self.tokens[rows]
        self.lengths[:count] = self.lengths[rows]
        self.lengths[count:] = 0
        self.blocks = torch.cat((self.blocks[rows], torch.full((len(self.blocks) - count,), self.spare)))


class _RightDecoder(Decoder):
    def keep(self, rows: list[int]) -> None:
        count = len(rows)
        for buffer, padding in ((self.tokens, 0), (self.lengths, 0), (self.blocks, self.spare)):
            buffer[:count] = buffer[rows]
            buffer[count:] = padding


def decode(make: type[Decoder], answers: list[int]) -> list[list[int]]:
    """The tokens of each sequence, as many as `answers` says."""
    decoder, rows = make(len(answers)), list(range(len(answers)))
    tokens: list[list[int]] = [[] for _ in answers]
    while rows:
        for row, token in zip(rows, decoder.step()):
            tokens[row].append(token)
        left = [index for index, row in enumerate(rows) if len(tokens[row]) < answers[row]]
        if len(left) < len(rows):
            decoder.keep(left)
            rows = [rows[index] for index in left]
    return tokens


def _compare(fault: Fault, answers: Any) -> Comparison:
    if not isinstance(answers, (list, tuple)) or not 2 <= len(answers) <= 4:
        raise BadInput(f"answers must be a list of 2 to 4 lengths, got {answers!r:.60}")
    lengths = [require_int("an answer's length", length, 1, _MOST) for length in answers]
    right, faulty = decode(fault.right, lengths), decode(fault.faulty, lengths)
    if right == faulty:
        why = ("all end in the same step, so nobody ever moves up" if len(set(lengths)) == 1 else
               "whoever ends stands behind those that go on, so these keep their rows, and what the recording reads of them is still true")
        return Comparison(False, f"the same {sum(lengths)} tokens", "", f"{why}. Let somebody move to another row")
    sequence = next(index for index, (a, b) in enumerate(zip(right, faulty)) if a != b)
    at = next(index for index, (a, b) in enumerate(zip(right[sequence], faulty[sequence])) if a != b)
    return Comparison(True, f"token {at + 1} of sequence {sequence} is {right[sequence][at]} by the right loop,",
                      f"and {faulty[sequence][at]} by the faulty one, which goes on with another sequence's block")


FAULTS = [
    Fault("rebound_tensor", "a recording that reads yesterday's tensor",
          "When sequences end, the batch is made dense again. Two of three buffers are written in place, the third gets a new tensor "
              "under the "
          "old name. No error follows; a replay goes on reading the old memory, which is right for all who have not moved.",
          Decoder, _RightDecoder, _compare, {"answers": ...}, exposing={"answers": [2, 5, 4]}, harmless={"answers": [5, 4, 2]}),
]
