"""StepPlan and StepResult: all that passes between the engine, which decides, and the worker, which computes.

Plain data, so that a step can be printed, pickled, sent to another process and replayed. Knows neither side.
Built in notebook 06.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.engine.options import RowOptions, TokenLogprobs
from minivllm.sampling_params import SamplingParams


@dataclass(slots=True)
class PlanRow:
    """One sequence's share of a step: compute `token_ids` at positions `start`, `start + 1`, ...

    block_table: the sequence's blocks in order; position p lives in block_table[p // block_size].
    write_start: positions below it are in the cache already (and perhaps shared), so nothing is written for them.
    samples: whether the last of these tokens yields the sequence's next token.
    seed: the request's own seed; with the sibling's number and the position it fixes the noise of the sampled token.
    options: what a request with penalties, logprobs and the like needs besides; None for all others.
    """

    seq_id: int
    start: int
    token_ids: list[int]
    block_table: list[int]
    write_start: int
    samples: bool
    sampling: SamplingParams
    seed: int
    options: RowOptions | None = None

    @property
    def context_len(self) -> int:
        """Tokens that the last token of this row attends to, itself included."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class StepPlan:
    """What one step computes. `num_tokens` is the batch size that the model sees."""

    rows: list[PlanRow] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(slots=True)
class StepResult:
    """What one step computed, by seq_id.

    tokens: the next token of every row that samples.
    non_finite: sequences whose last hidden state or logits held a NaN or an infinity; their tokens mean nothing.
    logprobs, prompt_logprobs: of that token, and of the prompt tokens that the row gave as targets; where asked for.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    non_finite: set[int] = field(default_factory=set)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
