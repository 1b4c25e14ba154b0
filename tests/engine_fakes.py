"""A runner without a model, and a harness that checks each step of an engine on top of it.

FakeRunner keeps, for each slot, what real K/V would depend on: the whole prefix up to that position. So it can tell whether
attention would have read the right K/V. Harness drives an Engine and checks what no step may break.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from minivllm.config import EngineConfig
from minivllm.engine import engine as engine_module
from minivllm.engine.block_manager import BlockManager, block_hash, root_hash
from minivllm.engine.engine import Engine
from minivllm.engine.invariants import check_scheduler
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence
from minivllm.engine.step import PlanRow, StepPlan, StepResult
from minivllm.sampling_params import SamplingParams

VOCAB = 5
EOS = 0
NOT_FINITE = "not finite"
Content = tuple[bytes, tuple[int, ...]]  # what the K/V of one position depends on: cache_extra, and the tokens up to it


class Violation(AssertionError):
    """`name` says what went wrong."""

    def __init__(self, name: str, detail: object):
        super().__init__(f"{name}: {detail}")
        self.name = name


def require(condition: object, name: str, detail: object) -> None:
    if not condition:
        raise Violation(name, detail)


def tiny_config(block_size: int = 2, num_blocks: int = 8, max_num_seqs: int = 4, budget: int = 16, max_model_len: int | None = None,
                caching: bool = True, **others) -> EngineConfig:
    """A complete config. `max_model_len` is all that the pool holds, unless given."""
    return EngineConfig(block_size=block_size, num_kv_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
                        max_model_len=max_model_len or block_size * num_blocks, enable_prefix_caching=caching, **others)


def next_token(content: Content, vocab: int = VOCAB) -> int:
    """A pseudo-random token that depends on the prefix alone."""
    return zlib.crc32(repr(content).encode()) % vocab


def content_at(seq: Sequence, position: int) -> Content:
    return seq.cache_extra, tuple(seq.token_ids[:position + 1])


@functools.lru_cache(maxsize=None)
def hash_of_prefix(extra: bytes, tokens: tuple[int, ...], block_size: int) -> bytes:
    """The hash under which the last block of `tokens`, whole blocks all, must be published."""
    if not tokens:
        return root_hash(extra)
    return block_hash(hash_of_prefix(extra, tokens[:-block_size], block_size), tokens[-block_size:])


class FakeRunner:
    """Executes plans without a model. Raises Violation for a step that a real model would compute wrongly.

    Set before a step: `interrupt` ("before" or "after" it wrote), `error` (raised after it wrote), `poisoned` (sequences whose
    output is not finite), `forced` (tokens that a sequence gets next). `plans` holds what was executed.
    """

    def __init__(self, block_size: int, num_blocks: int, vocab: int = VOCAB):
        self.block_size, self.vocab = block_size, vocab
        self.slots: list[Content | str | None] = [None] * (block_size * num_blocks)
        self.scheduler: Scheduler | None = None
        self.plans: list[StepPlan] = []
        self.on_plan = lambda plan: None
        self.interrupt: str | None = None
        self.error: Exception | None = None
        self.poisoned: set[int] = set()
        self.forced: dict[int, list[int]] = {}

    def attach(self, scheduler: Scheduler) -> None:
        """Where the truth about each sequence comes from."""
        self.scheduler = scheduler

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._check_rows(plan)
        self.on_plan(plan)
        if self.interrupt == "before":
            raise KeyboardInterrupt
        self._write(plan)
        if self.interrupt == "after":
            raise KeyboardInterrupt
        if self.error is not None:
            raise self.error
        for row in plan.rows:  # only after all rows wrote, as in a real step
            self._read(row)
        return StepResult({row.seq_id: self._sample(row) for row in plan.rows if row.samples},
                          {row.seq_id for row in plan.rows if row.seq_id in self.poisoned})

    def check_cached_blocks(self) -> None:
        """Every hash entry points at a block that holds those tokens."""
        size = self.block_size
        for digest, block_id in self.scheduler.blocks.cached_blocks.items():
            held = self.slots[block_id * size:(block_id + 1) * size]
            where = f"block {block_id} holds {held}"
            require(all(isinstance(content, tuple) for content in held), "hash entry holds other tokens", where)
            extra, tokens = held[-1]
            whole = [(extra, tokens[:len(tokens) - size + 1 + index]) for index in range(size)]
            require(held == whole and len(tokens) % size == 0, "hash entry holds other tokens", where)
            require(hash_of_prefix(extra, tokens, size) == digest, "hash entry holds other tokens", where)

    def _check_rows(self, plan: StepPlan) -> None:
        require(plan.num_tokens <= self.scheduler.max_num_batched_tokens, "over budget", f"{plan.num_tokens} tokens")
        require(len({row.seq_id for row in plan.rows}) == len(plan.rows), "two rows of one sequence", plan.rows)
        for row in plan.rows:
            seq = self.scheduler.sequences[row.seq_id]
            require(row.token_ids, "empty row", row)
            require(seq in self.scheduler.running, "row of a sequence that does not run", row)
            require(row.start == seq.num_computed_tokens and row.token_ids == seq.token_ids[row.start:row.context_len],
                    "wrong tokens planned", row)
            require(row.samples == (row.context_len == len(seq)), "samples elsewhere than at the end", row)
            require(row.context_len <= len(row.block_table) * self.block_size, "position without a slot", row)

    def _slot(self, row: PlanRow, position: int) -> int:
        return row.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, plan: StepPlan) -> None:
        writes = [(row, position, self._slot(row, position))
                  for row in plan.rows for position in range(max(row.start, row.write_start), row.context_len)]
        times = Counter(slot for _, _, slot in writes)
        require(max(times.values(), default=1) == 1, "slot written twice", times)
        owners = Counter(block_id for seq in self.scheduler.sequences.values() for block_id in set(seq.block_table))
        published = set(self.scheduler.blocks.cached_blocks.values())
        for row, position, slot in writes:
            block_id = slot // self.block_size
            require(block_id not in published and owners[block_id] == 1, "shared block rewritten", f"block {block_id} by {row}")
            seq = self.scheduler.sequences[row.seq_id]
            self.slots[slot] = NOT_FINITE if row.seq_id in self.poisoned else content_at(seq, position)

    def _read(self, row: PlanRow) -> None:
        if row.seq_id in self.poisoned:
            return
        seq = self.scheduler.sequences[row.seq_id]
        for position in range(row.context_len):
            held = self.slots[self._slot(row, position)]
            require(held == content_at(seq, position), "reads wrong K/V", f"position {position} of sequence {row.seq_id}: {held}")

    def _sample(self, row: PlanRow) -> int:
        if self.forced.get(row.seq_id):
            return self.forced[row.seq_id].pop(0)
        return next_token(content_at(self.scheduler.sequences[row.seq_id], row.context_len - 1), self.vocab)


def make_engine(config: EngineConfig, block_manager: type = BlockManager, scheduler: type = Scheduler, eos: tuple[int, ...] = (EOS,),
                vocab: int = VOCAB, policy: Any = "fcfs", **options) -> Engine:
    """An Engine on a FakeRunner, with classes of one's own in place of BlockManager and Scheduler."""
    runner = FakeRunner(config.block_size, config.num_kv_blocks, vocab)
    with mock.patch.multiple(engine_module, BlockManager=block_manager, Scheduler=scheduler):
        engine = Engine(replace(config, policy=policy), runner, vocab, eos, **options)
    runner.attach(engine.scheduler)
    return engine


def run_to_end(engine: Engine, max_steps: int = 1000) -> None:
    """Step until nothing is left."""
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return
        engine.step()
    raise Violation("no progress", f"{max_steps} steps did not finish {list(engine.scheduler.sequences)}")


@functools.lru_cache(maxsize=None)
def answer_alone(prompt: tuple[int, ...], sampling: SamplingParams, extra: bytes, max_model_len: int) -> tuple[tuple[int, ...], str]:
    """(tokens, finish reason) of the prompt in an engine of its own: one block, so nothing to share and nothing to preempt."""
    engine = make_engine(tiny_config(max_model_len, 1, 1, max_model_len, caching=False))
    seq = engine.add(prompt, sampling)
    seq.cache_extra = extra
    run_to_end(engine)
    return tuple(seq.generated_token_ids), seq.finish_reason


class Harness:
    """Drives an engine under first come, first served, and checks all that must hold in and after every operation.

    check: False leaves FakeRunner as the only judge.
    """

    def __init__(self, config: EngineConfig, check: bool = True, **classes: type):
        self.engine = make_engine(config, **classes)
        self.scheduler, self.blocks, self.runner = self.engine.scheduler, self.engine.blocks, self.engine.runner
        self.checks = check
        if check:
            self.runner.on_plan = self._check_plan
        self.prompts: dict[Sequence, tuple[int, ...]] = {}
        self.intact = True  # False once something was found
        self._before: dict[Sequence, int] = {}  # who ran before the step: how often it was preempted by then

    def add(self, prompt: list[int], extra: bytes = b"", **sampling) -> Sequence:
        with self._operation():
            seq = self.engine.add(prompt, SamplingParams(**sampling))
            seq.cache_extra = extra
            self.prompts[seq] = tuple(prompt)
        return seq

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            with self._operation():
                planned, steps = self._remember(), len(self.runner.plans)
                self.engine.step()
                if self.checks and len(self.runner.plans) > steps:
                    self._check_advance(planned)

    def step_not_finite(self, seq: Sequence) -> None:
        """A step in which the model's output for `seq` is not finite."""
        self.runner.poisoned = {seq.seq_id}
        self.step()
        self.runner.poisoned = set()
        require(not self.runner.plans or seq.finished or seq.seq_id not in [row.seq_id for row in self.runner.plans[-1].rows],
                "not aborted", f"sequence {seq.seq_id} is not finite")

    def abort(self, *sequences: Sequence) -> None:
        with self._operation():
            self.engine.abort(sequences)

    def abort_all(self) -> None:
        with self._operation():
            self.scheduler.abort_all()
            self._check_empty()

    def interrupted_step(self, when: str | int) -> None:
        """A step with a KeyboardInterrupt in it: "before" or "after" the runner wrote, or at the n-th line of scheduling."""
        with self._operation():
            self._remember()
            self.runner.interrupt = when if isinstance(when, str) else None
            try:
                with interrupt_at_line(when) if isinstance(when, int) else nullcontext():
                    self.engine.step()
                interrupted = isinstance(when, str)  # else it had fewer lines
            except KeyboardInterrupt:
                interrupted = True
            self.runner.interrupt = None
            if interrupted:
                self._check_empty()

    def finish(self) -> None:
        """Run to the end. Each step advances the oldest sequence by a token at least, and only the last one is never computed."""
        limit = self.engine.max_model_len
        bound = sum(min(len(self.prompts[seq]) + (seq.sampling.max_tokens or limit), limit) - 1 for seq in self.scheduler.sequences.values())
        for _ in range(bound):
            if self.scheduler.sequences:
                self.step()
        with self._operation():
            require(not self.scheduler.sequences, "no progress", f"{list(self.scheduler.sequences)} left after {bound} steps")
            self._check_empty()
            for seq, prompt in self.prompts.items():
                self._check_answer(seq, prompt)

    def check(self) -> None:
        check_scheduler(self.scheduler)
        self.runner.check_cached_blocks()
        order = [seq.seq_id for seq in [*self.scheduler.running, *self.scheduler.waiting]]
        require(order == sorted(order), "overtaken", f"sequences run and wait in the order {order}")

    @contextmanager
    def _operation(self) -> Iterator[None]:
        self.intact = False
        yield
        if self.checks:
            self.check()
        self.intact = True

    def _remember(self) -> dict[Sequence, int]:
        self._before = {seq: seq.num_preemptions for seq in self.scheduler.running}
        return {seq: seq.num_computed_tokens for seq in self.scheduler.running}

    def _check_plan(self, plan: StepPlan) -> None:
        """Between schedule and update: who was preempted, who got tokens, who was admitted."""
        ran, running = list(self._before), self.scheduler.running
        preempted = [seq for seq in ran if seq.num_preemptions > self._before[seq]]
        require(preempted == ran[len(ran) - len(preempted):], "older sequence preempted", f"{preempted} of {ran}")
        self.check()
        planned = {row.seq_id for row in plan.rows}
        starved = [seq.seq_id for seq in running if seq.seq_id not in planned]
        require(not starved, "running sequence got no token", starved)
        free = self.blocks.num_free_blocks
        if any(seq not in self._before for seq in running):
            require(free >= len(running) - 1, "admitted without reserve", f"{free} blocks free beside {len(running)} sequences")
        if not preempted:
            self._check_no_idle_room(plan, free)

    def _check_no_idle_room(self, plan: StepPlan, free: int) -> None:
        if plan.num_tokens == self.scheduler.max_num_batched_tokens:
            return
        short = [row for row in plan.rows if not row.samples]
        require(not short, "room left idle", f"{plan.num_tokens} tokens planned, and {short} cut short")
        if self.scheduler.waiting and len(self.scheduler.running) < self.scheduler.max_num_seqs:
            seq, size = self.scheduler.waiting[0], self.blocks.block_size
            hits = [self.blocks.cached_blocks.get(hash_of_prefix(seq.cache_extra, tuple(seq.token_ids[:end]), size))
                    for end in range(size, len(seq) + 1, size)]
            hits = hits[:hits.index(None)] if None in hits else hits
            needed = -(-len(seq) // size) - sum(block_id not in self.blocks.free_blocks for block_id in hits)
            require(needed + len(self.scheduler.running) > free, "room left idle", f"sequence {seq.seq_id} waits although it fits")

    def _check_advance(self, computed: dict[Sequence, int]) -> None:
        rows = {row.seq_id: row for row in self.runner.plans[-1].rows}
        for seq, before in computed.items():
            if not seq.finished and seq.num_preemptions == self._before[seq]:
                require(seq.num_computed_tokens == rows[seq.seq_id].context_len > before, "running sequence got no token", seq)

    def _check_empty(self) -> None:
        require(not self.scheduler.sequences and not self.scheduler.running and not self.scheduler.waiting, "not aborted",
                list(self.scheduler.sequences))
        require(self.blocks.num_free_blocks == len(self.blocks.blocks), "blocks left over", self.blocks.num_free_blocks)
        require(all(seq.finished and not seq.block_table for seq in self.prompts), "not aborted", list(self.prompts))

    def _check_answer(self, seq: Sequence, prompt: tuple[int, ...]) -> None:
        got = tuple(seq.generated_token_ids)
        want, reason = answer_alone(prompt, seq.sampling, seq.cache_extra, self.engine.max_model_len)
        if seq.finish_reason == "abort":
            require(got == want[:len(got)], "other tokens than alone", f"{prompt}: {got} is no beginning of {want}")
        else:
            require((got, seq.finish_reason) == (want, reason), "other tokens than alone", f"{prompt}: {got}, not {want}")


@contextmanager
def interrupt_at_line(number: int) -> Iterator[None]:
    """A KeyboardInterrupt just before the number-th line that scheduler.py and block_manager.py execute inside this block."""
    watched, left, before = {"scheduler.py", "block_manager.py"}, number, sys.gettrace()

    def trace(frame, event, _):
        nonlocal left
        path = Path(frame.f_code.co_filename)
        if path.name not in watched or path.parent.name != "engine":
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(before)
                raise KeyboardInterrupt
        return trace if left > 0 else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
