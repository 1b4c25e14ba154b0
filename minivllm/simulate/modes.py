"""The ways to batch that a simulation compares. Three are policies for the engine's scheduler, two are drivers in front of it.

static           takes up to `max_num_seqs` of what waits, pads, and starts nothing else until the longest answer has ended.
wait_until_full  the same, but starts only once a whole batch waits: the last, partial batch waits for ever.
continuous       the engine, its budget so large that no prompt is cut: who waits joins the running batch at the next step.
prefill_first    whole prompts in steps of their own, before any decode: vLLM's first scheduler.
chunked          prompts cut to the budget, chunks and decodes in turn, each in steps of its own.
mixed            the engine as it is: decodes first, chunks of prompts in what is left of the budget, all in one batch.

static and wait_until_full know no output length in advance in a real server; here they are given exactly the room they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from minivllm.engine.policies import Policy, first_come_first_served
from minivllm.engine.sequence import Sequence, SequenceStatus


def whole_prompts_first(running: tuple[Sequence, ...], waiting: Iterable[Sequence], budget: int) -> Iterator[tuple[Sequence, int]]:
    """As many whole prompts as start now; decodes only if none does."""
    left, started = budget, False
    for seq in waiting:
        if len(seq.token_ids) > left:
            break
        left -= len(seq.token_ids)
        yield seq, budget
        if seq.status is SequenceStatus.WAITING:  # no place, or no blocks
            break
        started = True
    if not started:
        for seq in running:
            yield seq, budget


def _decodes(seq: Sequence) -> bool:
    """Whether all it lacks is the token it sampled last."""
    return seq.num_computed_tokens >= seq.num_prompt_tokens and seq.num_uncomputed_tokens == 1


class ChunksApart:
    """A step of prompts, then a step of decodes, as long as there are both."""

    def __init__(self) -> None:
        self.prompts_ran = False  # in the step before

    def __call__(self, running: tuple[Sequence, ...], waiting: Iterable[Sequence], budget: int) -> Iterator[tuple[Sequence, int]]:
        decoding = [seq for seq in running if _decodes(seq)]
        if not (self.prompts_ran and decoding):
            self.prompts_ran = len(decoding) < len(running)
            for seq in running:
                if not _decodes(seq):
                    yield seq, budget
            for seq in waiting:
                yield seq, budget
                if seq.status is SequenceStatus.WAITING:  # no place, no blocks, or no budget left
                    break
                self.prompts_ran = True
            if self.prompts_ran:
                return
        self.prompts_ran = False
        for seq in decoding:
            yield seq, 1


@dataclass(frozen=True)
class Mode:
    """budget: the step's tokens: "given"; "prompt": at least one whole prompt; or "no limit", so that no prompt is ever cut.

    batches: requests enter the engine only when it is empty, padded; only_full: and only as a full batch.
    make_policy: the scheduler's policy, a new one for each simulation.
    """

    budget: str
    batches: bool = False
    only_full: bool = False
    make_policy: Callable[[], Policy] = lambda: first_come_first_served


MODES = {
    "static": Mode("no limit", batches=True),
    "wait_until_full": Mode("no limit", batches=True, only_full=True),
    "continuous": Mode("no limit"),
    "prefill_first": Mode("prompt", make_policy=lambda: whole_prompts_first),
    "chunked": Mode("given", make_policy=ChunksApart),
    "mixed": Mode("given"),
}


def find_mode(mode: str) -> Mode:
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not known: use one of {', '.join(MODES)}")
    return MODES[mode]
