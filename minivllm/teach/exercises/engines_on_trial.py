"""Judges a learner's `cache_works(ask, prompt)`: a test of an engine's prefix cache, run on engines that work and on some that only say so.

The engines run on the mirror runner, so an answer depends on every K/V that was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import Engine
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams
from minivllm.teach.bugs.blocks import FreshBlocksForHits
from minivllm.teach.compare import a_kind
from minivllm.teach.diagnose import Result, labelled
from minivllm.teach.exercise import one_line
from minivllm.teach.mirror import VOCAB, MirrorRunner
from minivllm.teach.stub import NOT_ATTEMPTED, is_stub, not_attempted, returned_none

_NUM_BLOCKS = 64


class RecomputesHits(Scheduler):
    """Takes the blocks of a hit, counts it, and computes the prompt from its first token all the same."""

    def _admit(self, seq: Sequence) -> bool:
        admitted = super()._admit(seq)
        if admitted:
            seq.num_computed_tokens = seq.write_start = 0
        return admitted


@dataclass(frozen=True)
class Answer:
    """What one request shows from outside: the tokens of its answer, what the engine says that it found in its cache, and how many of the

    prompt's tokens it did compute (counted from its events).
    """

    token_ids: list[int]
    num_cached_tokens: int
    num_computed_tokens: int


Ask = Callable[[list[int]], Answer]


@dataclass(frozen=True)
class OnTrial:
    """An engine, the prompt that it is asked, and whether its prefix cache works."""

    note: str
    prompt_tokens: int
    works: bool
    blocks: type[BlockManager] = BlockManager
    scheduler: type[Scheduler] = Scheduler
    block_size: int = 4
    caching: bool = True

    @property
    def prompt(self) -> list[int]:
        return [(37 * position + self.prompt_tokens) % VOCAB for position in range(self.prompt_tokens)]

    def start(self) -> Ask:
        """A new engine: ask(prompt) runs one request in it, from beginning to end."""
        size = self.block_size
        config = EngineConfig(block_size=size, num_kv_blocks=_NUM_BLOCKS, max_num_seqs=1, max_num_batched_tokens=64,
                              max_model_len=_NUM_BLOCKS * size, enable_prefix_caching=self.caching)
        engine = Engine(config, MirrorRunner(size, _NUM_BLOCKS), VOCAB)
        engine.blocks = self.blocks(_NUM_BLOCKS, size, self.caching)
        engine.scheduler = self.scheduler(engine.blocks, 1, 64, engine.scheduler.stop_check)

        def ask(prompt: list[int]) -> Answer:
            trace = engine.scheduler.start_trace()
            seq = engine.add(prompt, SamplingParams(temperature=0, max_tokens=4))
            while engine.has_unfinished_requests():
                engine.step()
            spans = [(event.data["start"], event.data["start"] + event.data["tokens"]) for event in trace.events if event.kind == "compute"]
            computed = sum(max(0, min(end, len(prompt)) - start) for start, end in spans)
            return Answer(seq.generated_token_ids, seq.num_cached_tokens, computed)

        return ask


ENGINES = [
    OnTrial("the package's engine, the prompt's last block is not full", 14, True),
    OnTrial("the package's engine, the prompt ends at a block's end", 16, True),
    OnTrial("the package's engine, with blocks of 8", 61, True, block_size=8),
    OnTrial("an engine without a prefix cache", 14, False, caching=False),
    OnTrial("an engine that counts every hit and computes the whole prompt again", 14, False, scheduler=RecomputesHits),
    OnTrial("an engine that skips what it found and reads other blocks", 14, False, blocks=FreshBlocksForHits),
    OnTrial("the same, and the prompt ends at a block's end", 16, False, blocks=FreshBlocksForHits),
    OnTrial("an engine that computes again, with a prompt that ends at a block's end", 16, False, scheduler=RecomputesHits),
]


def judge(function: Any, mistakes: list[tuple[Callable, str]]) -> Result:
    """What `check.cache_works(function)` finds. Never raises for what the learner's function does."""
    if function is None or function is ... or is_stub(function):
        return Result("not attempted", NOT_ATTEMPTED)
    if not callable(function):
        return Result("failed", f"give the function itself: check.cache_works(cache_works); this is {a_kind(function)}")
    trials = [_try(function, engine) for engine in ENGINES]
    if all(isinstance(trial.verdict, NotImplementedError) for trial in trials):
        return Result("not attempted", not_attempted(function))
    for number, (engine, trial) in enumerate(zip(ENGINES, trials), start=1):
        if trial.verdict is not engine.works:
            cause = _cause(function, trials, trial.verdict, mistakes)
            got = f"raised {one_line(trial.verdict)}" if isinstance(trial.verdict, Exception) else _show(trial.verdict)
            parts = (("input", f"a prompt of {engine.prompt_tokens} tokens, block_size {engine.block_size}"), ("got", got),
                     ("want", str(engine.works)), ("likely cause", cause))
            lines = [line for part in parts for line in labelled(*part)]
            return Result("failed", "\n".join([f"check {number} of {len(ENGINES)} failed: {engine.note}", *lines]), number, cause)
    return Result("passed", f"{len(ENGINES)} checks passed")


@dataclass
class _Trial:
    """What a test said of an engine (True or False, anything else, or what it raised), and how many requests it made."""

    verdict: Any
    requests: int


def _try(function: Any, engine: OnTrial) -> _Trial:
    ask, trial = engine.start(), _Trial(None, 0)

    def counted(prompt: list[int]) -> Answer:
        trial.requests += 1
        return ask(list(prompt))

    try:
        trial.verdict = function(counted, engine.prompt)
    except Exception as error:
        trial.verdict = error
    return trial


def _show(verdict: Any) -> str:
    return str(verdict) if isinstance(verdict, (bool, int, type(None))) else a_kind(verdict)


def _cause(function: Any, trials: list[_Trial], verdict: Any, mistakes: list[tuple[Callable, str]]) -> str:
    if verdict is None:
        return returned_none(function)
    if isinstance(verdict, Exception):
        return "ask(prompt) returns an Answer with token_ids, num_cached_tokens and num_computed_tokens; prompt is a list of token ids"
    if not isinstance(verdict, bool):
        return "return True or False: a comparison, or several joined by `and`"
    for wrong, hint in mistakes:
        if [_try(wrong, engine) for engine in ENGINES] == trials:
            return hint
    if verdict:
        return "this engine passed your test: what did it do for the second request that a working cache does not?"
    return "a working cache failed your test: print both answers, and see which of your conditions does not hold"
