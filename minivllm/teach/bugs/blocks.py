"""Planted faults in the block manager: a hash entry, a block or a boundary that is forgotten.

Each class replaces one or two methods of the real BlockManager. Knows no scheduler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.sequence import Sequence
from minivllm.teach.bugs.engine_fault import INPUTS, compare_engines, compare_setups
from minivllm.teach.bugs.fault import Comparison, Fault
from minivllm.teach.trial import Setup, Trial, require_int


class StaleHash(BlockManager):
    """Takes the block that was free the longest, for new contents."""

    def _take_least_recently_used(self) -> int:
        block_id, _ = self.free_blocks.popitem(last=False)
        block = self.blocks[block_id]
        assert block.ref_count == 0, f"block {block_id} is free but owned"
        block.hash = None
        block.ref_count = 1
        return block_id


class KeepsFreedBlocks(BlockManager):
    """Takes a sequence's blocks away, and gives it new ones when it comes back."""

    def free(self, seq: Sequence) -> None:
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_blocks[block_id] = None

    def allocate(self, seq: Sequence, hits: list[int]) -> None:
        for block_id in hits:
            self._share(block_id)
            seq.block_table.append(block_id)
        self._extend(seq, self.num_blocks_for(len(seq)) - len(hits))


class FreshBlocksForHits(BlockManager):
    """Gives a sequence blocks for all its tokens; the scheduler computes only those that were not found in the prefix cache."""

    def allocate(self, seq: Sequence, hits: list[int]) -> None:
        assert not seq.block_table, f"sequence {seq.seq_id} already owns blocks"
        self._extend(seq, self.num_blocks_for(len(seq)))


class GrowsTooLate(BlockManager):
    """Gives a running sequence a further block when the blocks it has do not hold its tokens."""

    def grow(self, seq: Sequence) -> bool:
        missing = self.num_blocks_for(seq.num_computed_tokens) - len(seq.block_table)
        if missing <= 0:
            return True
        if missing > self.num_free_blocks:
            return False
        self._extend(seq, missing)
        return True


def _stale_hint(setup: Setup, right: Trial) -> str:
    if not right.count("publish"):
        return f"no block was ever full, so none was published: use prompts of at least block_size = {setup.block_size} tokens"
    if not right.count("evict"):
        return "no published block was evicted: the pool has room for everything. Take fewer blocks, or send other prompts in between"
    return ("published blocks were evicted, but nobody looked for them afterwards in vain: send a prompt whose blocks were evicted once "
            "more, in a later wave")


def _freed_hint(setup: Setup, right: Trial) -> str:
    if len(setup.requests) == 1:
        return "a single request is never preempted: let two compete for the pool"
    if setup.max_num_seqs == 1:
        return "with max_num_seqs = 1 one request runs at a time and none is preempted: let two run"
    if not right.stats.num_preemptions:
        return (f"no request was preempted: {setup.num_kv_blocks} blocks of {setup.block_size} were enough. Take fewer blocks or longer "
                "answers, so that running requests outgrow the pool")
    return "a request was preempted, but its old blocks still held what it needs: let the other request run on and overwrite them"


def _hit_hint(setup: Setup, right: Trial) -> str:
    if right.count("share"):
        return "a prefix was found, but the fresh blocks happened to be the very ones that held it: take a larger pool"
    if max(len(prompt) for prompt, _ in setup.requests) < setup.block_size:
        return f"no prompt fills a block of {setup.block_size}, and only full blocks are found again"
    if len(setup.waves) == 1:
        return "no prompt found a cached block: a block is published after its step, so send the second prompt in a later wave"
    return "no prompt found a cached block: a later one must begin with the same full block of tokens as an earlier one"


def _compare_boundary(fault: Fault, prompt_tokens: Any, max_tokens: Any, block_size: Any) -> Comparison:
    size = require_int("block_size", block_size, 1, 64)
    length, answer = require_int("prompt_tokens", prompt_tokens, 1, 256), require_int("max_tokens", max_tokens, 1, 256)
    setup = Setup([[(list(range(1, length + 1)), answer)]], -(-(length + answer) // size) + 1, size, 1)
    found = compare_setups(fault, setup)
    position = -(-length // size) * size  # the first that the prompt's blocks do not hold
    if found.exposed and "IndexError" in found.faulty:
        have = position // size
        table = f"{have} block{'s' if have > 1 else ''}"
        return replace(found, faulty=f"{found.faulty} (position {position} needed block number {have + 1}, and the table had {table})")
    return found


def _boundary_hint(setup: Setup, right: Trial) -> str:
    [(prompt, max_tokens)], size = setup.requests, setup.block_size
    if max_tokens == 1:
        return "the only new token comes out of the prompt's own step: nothing is written behind the prompt. Ask for more tokens"
    last = len(prompt) + max_tokens - 2  # the answer's last token is never computed
    blocks = -(-len(prompt) // size)
    have = f"{blocks} block{'s' if blocks > 1 else ''}"
    return (f"positions 0 to {last} are computed (the last token of an answer never is), and they fit into the {have} of the prompt, "
            f"which reach{'' if blocks > 1 else 'es'} to position {blocks * size - 1}. The fault shows when a token of the answer starts a "
            "new block: take another prompt length, or ask for more tokens")


FAULTS = [
    Fault("stale_hash", "an evicted block is still found",
          "A block is reused, but the prefix cache still lists it under its old contents. Engines with a prefix cache had this when "
          "eviction and lookup kept separate books: a later prompt then read somebody else's text.",
          StaleHash, BlockManager, compare_engines, INPUTS,
          exposing={"requests": [[([1, 2, 3, 4, 5], 2)], [(list(range(11, 20)), 6)], [([1, 2, 3, 4, 5], 2)]], "num_kv_blocks": 4},
          harmless={"requests": [[([1, 2, 3, 4, 5], 2)], [([1, 2, 3, 4, 5], 2)]]}, hint=_stale_hint),
    Fault("freed_block_in_table", "a preempted sequence keeps its freed blocks",
          "The blocks go back to the free list, but the sequence's table still names them. Engines had this in the paths for preemption "
          "and abort, which run seldom: two sequences then write into one block, under load only.",
          KeepsFreedBlocks, BlockManager, compare_engines, INPUTS,
          exposing={"requests": [([1, 2, 3, 4, 5], 12), ([6, 7, 8, 9, 10], 12)], "num_kv_blocks": 5},
          harmless={"requests": [([1, 2, 3, 4, 5], 4), ([6, 7, 8, 9, 10], 4)]}, hint=_freed_hint),
    Fault("hit_never_reads", "a prefix hit that reads other blocks",
          "The tokens of a hit are skipped as computed, yet the table that attention gets does not hold the blocks they lie in. It looks "
          "like a working prefix cache, and a fast one, until somebody reads the answers.",
          FreshBlocksForHits, BlockManager, compare_engines, INPUTS,
          exposing={"requests": [[([1, 2, 3, 4, 5, 6], 3)], [([1, 2, 3, 4, 9, 9], 3)]]},
          harmless={"requests": [[([1, 2, 3, 4, 5, 6], 3)], [([5, 2, 3, 4, 9, 9], 3)]]}, hint=_hit_hint),
    Fault("boundary_off_by_one", "a new block, one token late",
          "The next block is taken when the old ones overflow with computed tokens, and the token to be computed now is forgotten. Off by "
          "one at a block's end is the commonest fault of paged caches: most lengths never meet it.",
          GrowsTooLate, BlockManager, _compare_boundary, {"prompt_tokens": ..., "max_tokens": ..., "block_size": 4},
          exposing={"prompt_tokens": 6, "max_tokens": 4}, harmless={"prompt_tokens": 5, "max_tokens": 4}, hint=_boundary_hint),
]
