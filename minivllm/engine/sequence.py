"""Sequence: one request on its way through the engine. Owned by the scheduler, which alone changes its status.

Knows its tokens and its blocks; knows no other sequence, no model and no device. Built in notebook 06.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from minivllm.engine.options import SequenceOptions
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import IncrementalDetokenizer


class SequenceStatus(enum.Enum):
    WAITING = "waiting"    # in the queue: new, or preempted
    RUNNING = "running"    # owns blocks; computes in every step
    FINISHED = "finished"  # owns nothing


@dataclass(eq=False, slots=True)  # a sequence equals only itself
class Sequence:
    """One request. `token_ids` is the prompt, then what was generated; `num_computed_tokens` of them have K/V in the cache."""

    seq_id: int
    token_ids: list[int]
    sampling: SamplingParams
    seed: int = 0
    num_prompt_tokens: int = 0
    priority: int = 0                     # for policies that ask; the smallest number first
    cache_extra: bytes = b""              # what else its K/V depends on: prefixes are shared only where this is equal
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    write_start: int = 0                  # K/V of positions below it came from the prefix cache
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks, in order; grown by the block manager
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache at first admission; None before it
    num_preemptions: int = 0
    lost_tokens: int = 0                  # the most that a preemption threw away: what lies below it is computed again
    finish_reason: str | None = None      # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop token or stop string, where one ended it
    detokenizer: IncrementalDetokenizer | None = None  # where text is needed while it runs: stop strings, streaming
    options: SequenceOptions | None = None  # penalties, logprobs, siblings; None for a request without
    error: str | None = None              # why the engine aborted it, where it was not the user
    arrival_time: float = 0.0             # seconds on the engine's clock; the others likewise
    admitted_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V the cache still lacks: many before prefill ends, exactly one in decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens:]

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
