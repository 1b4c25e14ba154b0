"""Engine: schedule, execute, update, one step at a time. Owns the sequences from the door to their end.

It decides, a runner computes: anything with `execute(StepPlan) -> StepResult` will do (the model runner, a simulated one, a
test's). Built in notebook 06.
"""

from __future__ import annotations

import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence as Tokens
from typing import Protocol

from minivllm.config import EngineConfig
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.options import check_options, options_of
from minivllm.engine.policies import make_policy
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence
from minivllm.engine.siblings import members, with_siblings
from minivllm.engine.stats import Stats
from minivllm.engine.step import StepPlan, StepResult
from minivllm.engine.stopping import StopChecker
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import IncrementalDetokenizer


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...


class QueueFullError(RuntimeError):
    """A request was refused because too many wait already. Nothing is wrong with it: it may be sent again later."""


class Engine:
    """Continuous batching over one runner. `config` must be complete: every limit a number (see `EngineConfig.complete`).

    decode: token ids to text, needed for stop strings and streaming only.
    """

    def __init__(self, config: EngineConfig, runner: Runner, vocab_size: int, eos_token_ids: Iterable[int] = (),
                 decode: Callable[[list[int]], str] | None = None, clock: Callable[[], float] = time.perf_counter):
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_model_len = config.max_model_len
        self.decode = decode
        self.blocks = BlockManager(config.num_kv_blocks, config.block_size, config.enable_prefix_caching)
        self.eos_token_ids = frozenset(eos_token_ids)
        stop_check = StopChecker(self.eos_token_ids, config.max_model_len)
        self.max_num_queued_requests = config.max_num_queued_requests
        self.scheduler = Scheduler(self.blocks, config.max_num_seqs, config.max_num_batched_tokens, stop_check,
                                   make_policy(config.policy, self.blocks), clock)
        self.observers: list[Callable[[], None]] = []  # called after every step, for views; they may look, not touch
        self._ids = itertools.count()
        self._random = random.Random(config.seed)

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.sequences)

    def check(self, token_ids: Tokens[int], sampling: SamplingParams) -> list[int]:
        """A request at the door: the prompt as a list of ints, or the TypeError or ValueError that says what is wrong with it."""
        try:
            tokens = list(token_ids)
            ids = [token.__index__() for token in tokens if not isinstance(token, bool)]
            if len(ids) != len(tokens):
                raise TypeError
        except (AttributeError, TypeError):
            raise TypeError(f"a prompt of token ids must hold ints only, got {token_ids!r:.80}") from None
        if not ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.vocab_size} (0 to {self.vocab_size - 1})")
        if len(ids) >= self.max_model_len:
            raise ValueError(f"the prompt has {len(ids)} tokens and max_model_len is {self.max_model_len}, which leaves no room for an "
                             f"answer: shorten it to {self.max_model_len - 1} or raise max_model_len")
        if sampling.has_options:
            check_options(sampling, self.vocab_size, self.eos_token_ids)
        return ids

    def check_room(self, num_requests: int) -> None:
        """Raise QueueFullError unless the queue takes `num_requests` more; a request of n answers counts n times."""
        waiting, limit = len(self.scheduler.waiting), self.max_num_queued_requests
        if limit is not None and waiting + num_requests > limit:
            raise QueueFullError(f"{waiting} requests wait and max_num_queued_requests is {limit}: {num_requests} more are not taken; "
                                 f"try again later, or raise the limit")

    def add(self, token_ids: Tokens[int], sampling: SamplingParams, stream: bool = False, priority: int = 0) -> Sequence:
        """Queue a request; it runs in the steps to come. Raises as `check` and `check_room` do, and then nothing has changed.

        Returns its sequence; where n > 1, the one that leads (see siblings.py).
        """
        ids = self.check(token_ids, sampling)
        self.check_room(sampling.n)
        if (sampling.stop or stream) and self.decode is None:
            raise ValueError("stop strings and streaming need text, and this engine has no tokenizer: use stop_token_ids")
        seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        options = options_of(sampling, self.vocab_size, self.eos_token_ids)
        seq = Sequence(next(self._ids), ids, sampling, seed, priority=priority, options=options)
        try:
            for member in with_siblings(seq, self._ids):
                if sampling.stop or stream:
                    member.detokenizer = IncrementalDetokenizer(self.decode, sampling.stop)
                self.scheduler.add(member)
        except BaseException:  # an interrupt between two siblings
            self.scheduler.abort_all()
            raise
        return seq

    def step(self) -> list[Sequence]:
        """Run one step and return the sequences that it finished. An error or interrupt in it aborts every request, then goes on up."""
        try:
            plan = self.scheduler.schedule()
            if not plan.rows:
                if self.has_unfinished_requests():
                    raise RuntimeError("the scheduling policy chose nothing although requests wait: it must serve one of them")
                return []
            finished = self.scheduler.update(plan, self.runner.execute(plan))
        except BaseException:
            self.scheduler.abort_all()
            raise
        self._notify()
        return finished

    def _notify(self) -> None:
        """Tell the observers that a step is over. One that fails is dropped with a warning: a broken view stops no request."""
        for observer in tuple(self.observers):
            try:
                observer()
            except Exception as error:
                self.observers.remove(observer)
                warnings.warn(f"a view was detached from the engine because it failed: {error!r}", stacklevel=3)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End these requests now, between two steps, and give their blocks back. Finished sequences are left as they are."""
        try:
            for seq in [member for leader in sequences for member in members(leader)]:
                if not seq.finished:
                    self.scheduler.finish(seq, "abort")
        except BaseException:  # an interrupt in the middle of a change
            self.scheduler.abort_all()
            raise
