"""A planted fault at the end of a block: a test for "the next token starts a block" that one block size turns into never.

Knows no scheduler.
"""

from __future__ import annotations

from typing import Any

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.sequence import Sequence
from minivllm.teach.bugs.engine_fault import compare_setups
from minivllm.teach.bugs.fault import Comparison, Fault
from minivllm.teach.trial import Setup, Trial, require_int


class GrowsAtRemainderOne(BlockManager):
    """Gives a running sequence a further block when its newest token is the first of a block."""

    def grow(self, seq: Sequence) -> bool:
        if len(seq) % self.block_size != 1:
            return True
        if not self.num_free_blocks:
            return False
        self._extend(seq, 1)
        return True


def _compare(fault: Fault, prompt_tokens: Any, max_tokens: Any, block_size: Any) -> Comparison:
    size = require_int("block_size", block_size, 1, 64)
    # Not above 64, the step's budget here: a prompt in chunks would be a second fault, which takes a block for every chunk.
    length, answer = require_int("prompt_tokens", prompt_tokens, 1, 64), require_int("max_tokens", max_tokens, 1, 64)
    return compare_setups(fault, Setup([[(list(range(1, length + 1)), answer)]], -(-(length + answer) // size) + 1, size, 1))


def _hint(setup: Setup, right: Trial) -> str:
    [(prompt, max_tokens)], size = setup.requests, setup.block_size
    if max_tokens == 1:
        return "the only new token comes out of the prompt's own step, and the prompt's blocks are there already: ask for more tokens"
    last = len(prompt) + max_tokens - 2  # the answer's last token is never computed
    start = -(-len(prompt) // size) * size
    if start > last:
        blocks = -(-len(prompt) // size)
        return (f"positions 0 to {last} are computed, and the prompt's {blocks} block{'s' if blocks > 1 else ''} of {size} hold them "
            "all: no block is asked for. Let a token of the answer start a block first")
    return (f"position {start} starts a block; with it there are {start + 1} tokens, and {start + 1} % {size} = {(start + 1) % size}, so "
            "the "
            "faulty code takes a block just when the right one does. No prompt changes that while block_size stays: for which block_size "
            "is n % block_size never 1?")


FAULTS = [
    Fault("grows_at_remainder_one", "a new block when the remainder is one",
          "A decode needs a block when its newest token is the first of one: len(tokens) % block_size == 1. nano-vLLM asks just this, "
            "and is "
          "right, since its blocks are multiples of 256. Taken over into an engine with other block sizes, or with more than one new "
            "token a step, the same line fails.",
          GrowsAtRemainderOne, BlockManager, _compare, {"prompt_tokens": ..., "max_tokens": ..., "block_size": ...},
          exposing={"prompt_tokens": 3, "max_tokens": 4, "block_size": 1},
          harmless={"prompt_tokens": 3, "max_tokens": 4, "block_size": 4}, hint=_hint),
]
