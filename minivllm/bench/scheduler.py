"""`minivllm bench scheduler`: what the host pays for a step, with a runner that computes nothing.

Microseconds a running sequence for schedule and update together, as the median of all steps and as that of the quietest round
(other programs on the machine only ever add); the same beside a long queue; what recording a trace adds; and
what the possibility of a trace costs while none is recorded: a comparison with None at each place that would record.
"""

from __future__ import annotations

import statistics
import time
import timeit
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine
from minivllm.engine.scheduler import Scheduler
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
    times: dict[str, list[list[float]]] = {name: [] for name in engines}  # a list a round
    num_events = 0
    for _ in range(rounds):
        for name, engine in engines.items():
            trace = engine.scheduler.start_trace() if name.endswith("traced") else None
            times[name].append(step_seconds(engine, steps // rounds))
            num_events += len(trace.events) if trace else 0
    figures = {name: 1e6 * statistics.median(sum(each, [])) / num_running for name, each in times.items()}
    quietest = {name: 1e6 * min(map(statistics.median, each)) / num_running for name, each in times.items()}
    comparison = comparison_seconds(engines["10 waiting"].scheduler)
    comparisons = num_events / (steps // rounds * rounds) / num_running
    return {"running": num_running, "microseconds_per_sequence": figures, "quietest_round": quietest,
            "comparisons_per_sequence": comparisons, "comparison_nanoseconds": 1e9 * comparison,
            "trace_off_share": 1e6 * comparison * comparisons / figures["10 waiting"]}


def comparison_seconds(scheduler: Scheduler, repeats: int = 100_000) -> float:
    """What `if scheduler.trace is not None` takes, without the loop around it."""
    loop = min(timeit.repeat("for _ in many: pass", globals={"many": range(repeats)}, number=1))
    compared = min(timeit.repeat("for _ in many:\n if s.trace is not None: pass", globals={"many": range(repeats), "s": scheduler}, number=1))
    return max(0.0, compared - loop) / repeats


def show(result: dict[str, Any]) -> None:
    figures = result["microseconds_per_sequence"]
    base = figures["10 waiting"]
    print(f"schedule and update, {result['running']} sequences in decode")
    for name, figure in figures.items():
        print(f"  {name:<20}{figure:7.2f} us a running sequence   {figure / base:.2f} times the first row   "
              f"quietest round {result['quietest_round'][name]:.2f} us")
    print(f"  tracing off: {result['comparisons_per_sequence']:.2f} comparisons a running sequence, {result['comparison_nanoseconds']:.0f} ns each: "
          f"{100 * result['trace_off_share']:.2f}% of a step")
