"""Requests that come one by one: an engine is stepped, and each request is added in the step in which it comes.

Time is counted in steps, on the engine's clock too, so that what happens is the same on every machine. Knows no particular policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import Engine
from minivllm.engine.policies import Policy
from minivllm.engine.sequence import Sequence
from minivllm.engine.step import StepPlan, StepResult
from minivllm.sampling_params import SamplingParams

Arrival = tuple[int, int, int]  # the step in which it comes, tokens of its prompt, tokens of its answer
#: Numbers for sequences that no two engines of a process share, so that what somebody notes by number stays true.
_first_ids = itertools.count(0, 1000)


@dataclass
class Record:
    """What happened. plans: for each step the tokens that each request got, by its number. order: requests as they were admitted.

    stalled: (step, request) of what ran and got no token. error: what the policy raised.
    """

    plans: list[dict[int, int]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    stalled: list[tuple[int, int]] = field(default_factory=list)
    error: Exception | None = None
    finished: bool = False

    def first_step(self, request: int) -> int | None:
        return next((step for step, plan in enumerate(self.plans) if request in plan), None)


class Recorder:
    """A runner without a model that notes who ran and what each one got."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.record = Record()
        self.number: dict[int, int] = {}  # sequence -> request
        self.step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        got = {self.number[row.seq_id]: len(row.token_ids) for row in plan.rows}
        self.record.plans += [{}] * (self.step - len(self.record.plans)) + [got]
        for seq in self.engine.scheduler.running:
            request = self.number[seq.seq_id]
            if request not in self.record.order:
                self.record.order.append(request)
            if request not in got:
                self.record.stalled.append((self.step, request))
        return StepResult({row.seq_id: 7 for row in plan.rows if row.samples})


def run(arrivals: Iterable[Arrival], policy: Policy | Callable[[BlockManager], Policy], max_num_seqs: int, budget: int,
        num_kv_blocks: int = 4096, block_size: int = 16, max_steps: int = 2000, of_blocks: bool = False) -> Record:
    """Serve `arrivals`, which come in order, under `policy`; of_blocks: `policy` is made for the pool. What goes wrong is in the record."""
    config = EngineConfig(block_size=block_size, num_kv_blocks=num_kv_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
                          max_model_len=num_kv_blocks * block_size, enable_prefix_caching=False)
    recorder = Recorder()
    recorder.engine = engine = Engine(config, recorder, 1000, clock=lambda: float(recorder.step))
    engine.scheduler.policy = policy(engine.blocks) if of_blocks else policy
    engine._ids = itertools.count(next(_first_ids))
    coming = list(enumerate(arrivals))
    for recorder.step in range(max_steps):
        while coming and coming[0][1][0] <= recorder.step:
            number, (_, prompt, answer) = coming.pop(0)
            recorder.number[_add(engine, prompt, answer).seq_id] = number
        if not coming and not engine.has_unfinished_requests():
            recorder.record.finished = True
            break
        try:
            engine.step()
        except Exception as error:
            recorder.record.error = error
            break
    return recorder.record


def _add(engine: Any, prompt: int, answer: int) -> Sequence:
    return engine.add([1] * prompt, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
