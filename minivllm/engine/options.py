"""What a request may ask for beyond temperature and stops: penalties, forced and forbidden tokens, logprobs, several answers.

The engine owns the tokens and says in a row only what the worker cannot know: once after each gap the tokens before the row, and always
where the prompt ends, which sibling it is and which tokens would end it. The worker (worker/logits.py) keeps the tokens of the
penalised rows that sampled last, adds one a step, and forgets a sequence as soon as such a step goes by without it.
So nothing has to be told when a sequence ends or is preempted, and a plain request carries none of this: its `options` is None.
Built in notebook 08.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.engine.sequence import Sequence
    from minivllm.engine.step import PlanRow, StepResult

#: Token ids, their log probabilities, and the rank of the first. The first is the token itself, the others the most likely ones in order.
TokenLogprobs = tuple[list[int], list[float], int]


@dataclass(slots=True)
class RowOptions:
    """A row's optional part; plain data.

    num_prompt_tokens: where the answer begins. sibling: the answer's number among the request's n.
    end_token_ids: what min_tokens forbids. history: the tokens before `start`, in the first of a run of steps in which the row samples and
    its parameters need them; None in the others. prompt_targets: the prompt tokens that follow this row's first ones, where their
    log probabilities are wanted.
    """

    num_prompt_tokens: int
    sibling: int = 0
    end_token_ids: tuple[int, ...] = ()
    history: list[int] | None = None
    prompt_targets: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class SequenceOptions:
    """A sequence's optional part. `leader` and `siblings` are empty unless n > 1 (see siblings.py)."""

    sibling: int = 0
    leader: Sequence | None = None
    siblings: list[Sequence] = field(default_factory=list)
    end_token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)                # of the generated tokens
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])  # of the prompt's tokens; the first has none
    history_at: tuple[int, int] | None = None                                  # (step, preemptions so far) when it last sampled with history

    @property
    def held(self) -> bool:
        """A sibling waits until its leader's prompt is computed: then it finds the prompt's full blocks in the prefix cache."""
        return self.leader is not None and self.leader.first_token_time is None and not self.leader.finished

    def may_hit(self, seq: Sequence) -> bool:
        """Prompt log probabilities need every position of the prompt computed, so the prefix cache is used only once they are there."""
        return not self._wants_prompt(seq)

    def row(self, seq: Sequence, start: int, end: int, step: int) -> RowOptions:
        """The options of a row that computes positions `start` to `end` in step number `step`."""
        options = RowOptions(seq.num_prompt_tokens, self.sibling, self.end_token_ids)
        if end == len(seq.token_ids) and seq.sampling.needs_history:
            if self.history_at != (step - 1, seq.num_preemptions):
                options.history = seq.token_ids[:start]
            self.history_at = (step, seq.num_preemptions)
        if self._wants_prompt(seq):
            options.prompt_targets = seq.token_ids[start + 1:min(end + 1, seq.num_prompt_tokens)]
        return options

    def take(self, row: PlanRow, result: StepResult) -> None:
        """Keep what the worker said about `row`. Positions computed again after a preemption replace what they gave before."""
        if (known := result.logprobs.get(row.seq_id)) is not None:
            self.logprobs.append(known)
        if (known := result.prompt_logprobs.get(row.seq_id)) is not None:
            self.prompt_logprobs[row.start + 1:row.start + 1 + len(known)] = known

    def _wants_prompt(self, seq: Sequence) -> bool:
        return seq.sampling.prompt_logprobs is not None and self.sibling == 0 and len(self.prompt_logprobs) < seq.num_prompt_tokens


def check_options(sampling: SamplingParams, vocab_size: int, end_token_ids: frozenset[int]) -> None:
    """Parameters at the door, where the vocabulary is known: raises ValueError with the field, the value and the fix."""
    for name, ids in (("logit_bias", [token for token, _ in sampling.logit_bias]), ("allowed_token_ids", sampling.allowed_token_ids or ())):
        for token in ids:
            if token >= vocab_size:
                raise ValueError(f"SamplingParams.{name} names token id {token}, which is outside the vocabulary of {vocab_size} "
                                 f"(0 to {vocab_size - 1})")
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(sampling, name)) is not None and value > vocab_size:
            raise ValueError(f"SamplingParams.{name} must be at most the vocabulary's size, {vocab_size}, got {value}")
    ends = end_token_ids.union(sampling.stop_token_ids)
    if sampling.min_tokens and ends.issuperset(range(vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids):
        raise ValueError(f"SamplingParams.min_tokens {sampling.min_tokens} forbids every token that may be chosen, for all of them end "
                         f"the answer: allow others in allowed_token_ids, or set min_tokens=0")


def options_of(sampling: SamplingParams, vocab_size: int, end_token_ids: frozenset[int]) -> SequenceOptions | None:
    """A new sequence's options, or None when it needs none."""
    if not sampling.has_options:
        return None
    ends = sorted(token for token in end_token_ids.union(sampling.stop_token_ids) if token < vocab_size) if sampling.min_tokens else ()
    return SequenceOptions(end_token_ids=tuple(ends))
