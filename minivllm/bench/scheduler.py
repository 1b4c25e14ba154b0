"""`minivllm bench scheduler`: what the host pays for a step, with a runner that computes nothing.

Three figures: microseconds a running sequence for schedule and update together; the same beside a long queue; and what recording
a trace adds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine
from minivllm.engine.step import StepPlan, StepResult
from minivllm.sampling_params import SamplingParams

_VOCAB = 1000


class NoModel:
    """Every row that samples gets the same token."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult({row.seq_id: 7 for row in plan.rows if row.samples})


def decoding_engine(num_running: int, num_waiting: int, context: int = 500) -> Engine:
    """An engine in the middle of `num_running` decodes, with `num_waiting` requests behind them."""
    config = EngineConfig(max_num_seqs=num_running, max_num_batched_tokens=8192, block_size=16, num_kv_blocks=num_running * 100)
    engine = Engine(config.complete(num_kv_blocks=1, max_positions=1500), NoModel(), _VOCAB)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for number in range(num_running + num_waiting):
        length = context if number < num_running else 10
        engine.add([(31 * number + i) % _VOCAB for i in range(length)], params)
    while len(engine.scheduler.running) < num_running or any(seq.num_uncomputed_tokens > 1 for seq in engine.scheduler.running):
        engine.step()
    return engine


def step_seconds(engine: Engine, steps: int) -> list[float]:
    """Seconds of schedule and update, without execute, for each of `steps` steps."""
    scheduler, times = engine.scheduler, []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        result = engine.runner.execute(plan)
        executed = time.perf_counter()
        scheduler.update(plan, result)
        times.append(time.perf_counter() - executed + planned - begin)
    return times


def measure(num_running: int = 256, steps: int = 300, rounds: int = 5) -> dict[str, Any]:
    """Medians in microseconds a running sequence; the variants take turns, so that a slow moment hits them alike."""
    engines = {"10 waiting": decoding_engine(num_running, 10), "10,000 waiting": decoding_engine(num_running, 10_000),
               "10 waiting, traced": decoding_engine(num_running, 10)}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            if name.endswith("traced"):
                engine.scheduler.start_trace()
            times[name] += step_seconds(engine, steps // rounds)
    return {"running": num_running, "microseconds_per_sequence": {name: 1e6 * statistics.median(each) / num_running for name, each in times.items()}}


def show(result: dict[str, Any]) -> None:
    figures = result["microseconds_per_sequence"]
    base = figures["10 waiting"]
    print(f"schedule and update, {result['running']} sequences in decode")
    for name, figure in figures.items():
        print(f"  {name:<20}{figure:7.2f} us a running sequence   {figure / base:.2f} times the first row")
    print("  without a trace, a step pays one comparison with None for each place that could record: no row of its own can show it")
