"""Planted faults in the scheduler: a step without a token, and a request that waits for ever.

Each class replaces one method of the real Scheduler. Knows no block manager's inside.
"""

from __future__ import annotations

from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence, SequenceStatus
from minivllm.teach.bugs.engine_fault import INPUTS, compare_engines
from minivllm.teach.bugs.fault import Fault
from minivllm.teach.trial import Setup, Trial


class NothingToCompute(Scheduler):
    """Starts a sequence; what the prefix cache holds of it counts as computed."""

    def _admit(self, seq: Sequence) -> bool:
        if len(self.running) >= self.max_num_seqs:
            return False
        hits = self.blocks.find_prefix(seq)
        if not self.blocks.can_allocate(seq, hits, reserve=len(self.running)):
            return False
        self.blocks.allocate(seq, hits)
        seq.num_computed_tokens = seq.write_start = len(hits) * self.blocks.block_size
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        return True


class WaitsUntilFull(Scheduler):
    """Starts a batch when it is full, which makes the best use of every step."""

    def _admit(self, seq: Sequence) -> bool:
        if not self.running and len(self.waiting) < self.max_num_seqs:
            return False
        return super()._admit(seq)


def _full_hit_hint(setup: Setup, right: Trial) -> str:
    size = setup.block_size
    if all(len(prompt) % size for prompt, _ in setup.requests):
        return f"no prompt ends exactly at a block's end, so each has a token left to compute: its length must be a multiple of {size}"
    if not right.count("share"):
        return ("no prompt found cached blocks: send the same prompt again in a later wave, when the first has been computed and its "
                "blocks are still there")
    return "a prompt found some of its blocks, but not all: a full hit needs every token of a prompt to lie in cached blocks"


def _starvation_hint(setup: Setup, right: Trial) -> str:
    if setup.max_num_seqs == 1:
        return "with max_num_seqs = 1 every request is a full batch: allow more at a time"
    return (f"whenever nothing ran, at least max_num_seqs = {setup.max_num_seqs} requests waited: let fewer be there when a batch is to "
            "start, in all or "
            f"in a later wave")


FAULTS = [
    Fault("full_hit_crash", "a prompt found whole in the cache",
          "When the prefix cache holds every token of a prompt, nothing is left to compute, and so no logits to sample from. Engines "
          "failed on an empty batch here; the cure is to compute the last token all the same.",
          NothingToCompute, Scheduler, compare_engines, INPUTS,
          exposing={"requests": [[([1, 2, 3, 4], 2)], [([1, 2, 3, 4], 2)]]},
          harmless={"requests": [[([1, 2, 3, 4, 5], 2)], [([1, 2, 3, 4, 5], 2)]]}, hint=_full_hit_hint),
    Fault("starvation", "a batch that waits until it is full",
          "Static batching gathers requests until the batch is full. A server that has no timeout beside it leaves the last users of the "
          "evening waiting: the batch they are in never fills.",
          WaitsUntilFull, Scheduler, compare_engines, INPUTS,
          exposing={"requests": [[([1, 2, 3], 3), ([4, 5, 6], 3)], [([7, 8, 9], 3)]]},
          harmless={"requests": [([1, 2, 3], 3), ([4, 5, 6], 3)]}, hint=_starvation_hint),
]
