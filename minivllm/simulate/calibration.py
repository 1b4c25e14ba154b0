"""How far the simulated H200 is from the measured one, and where its two overheads come from.

Both overheads are fitted to the four batches alone; the benchmark is held out, so its error is that of a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from minivllm.bench.workload import Workload
from minivllm.engine.engine import Engine
from minivllm.simulate.devices import DEVICES, Cost, Device, StepWork
from minivllm.simulate.requests import Request, poisson_requests
from minivllm.simulate.run import simulate

#: The largest error against any measured figure.
STATED_ERROR = 0.06


@dataclass(frozen=True)
class Measured:
    """Output tokens a second of this engine on the device, Qwen3-0.6B's shape. fitted: whether the overheads were fitted to it."""

    name: str
    tokens_per_second: float
    requests: tuple[Request, ...]
    fitted: bool

    @property
    def seconds(self) -> float:
        return sum(request.output_tokens for request in self.requests) / self.tokens_per_second


def measured() -> list[Measured]:
    """The figures of benchmarks/h200/simulation.json: of the batches the mean of both processes, of the benchmark the median round."""
    batches = {1: 632.91, 8: 5303.74, 64: 26862.21, 256: 51629.36}
    work = Workload.draw(256, (100, 1024), (100, 1024), 10_000)
    benchmark = tuple(Request(0.0, len(prompt), output) for prompt, output in zip(work.prompts, work.output_lens))
    return [*(Measured(f"{n} at once, 128 tokens in, 128 out", rate, tuple(poisson_requests(n, math.inf, 0, (128, 128), (128, 128))), True)
              for n, rate in batches.items()),
            Measured("256 requests, 100-1024 in, 100-1024 out", 21_625.34, benchmark, False)]


def works(figure: Measured) -> list[StepWork]:
    """Every step of the engine over these requests, with the settings it was measured with. All arrive at once, so no time enters."""
    steps: list[StepWork] = []

    def watch(engine: Engine) -> None:
        engine.observers.append(lambda: steps.append(engine.runner.work))

    simulate(figure.requests, "H200", max_num_seqs=256, max_num_batched_tokens=8192, on_start=watch)
    return steps


def fit(figures: list[tuple[Measured, list[StepWork]]], device: Device) -> tuple[float, float]:
    """(step_overhead, row_overhead) with the least squares of the relative errors of the time; two unknowns, solved by hand."""
    bare = Cost(replace(device, step_overhead=0.0, row_overhead=0.0))
    aa = ab = bb = ac = bc = 0.0
    for figure, steps in figures:
        a, b = len(steps) / figure.seconds, sum(work.rows for work in steps) / figure.seconds
        c = 1 - sum(map(bare.seconds, steps)) / figure.seconds
        aa, ab, bb, ac, bc = aa + a * a, ab + a * b, bb + b * b, ac + a * c, bc + b * c
    determinant = aa * bb - ab * ab
    return (ac * bb - bc * ab) / determinant, (aa * bc - ab * ac) / determinant


def errors(figures: list[tuple[Measured, list[StepWork]]], device: Device) -> list[float]:
    """Simulated over measured tokens a second, less 1."""
    cost = Cost(device)
    return [figure.seconds / sum(map(cost.seconds, steps)) - 1 for figure, steps in figures]


def show() -> Iterator[str]:
    """The table of measured against simulated."""
    device = DEVICES["H200"]
    figures = [(figure, works(figure)) for figure in measured()]
    yield f"{device.label}: output tokens a second, measured and simulated; errors up to {STATED_ERROR:.0%} are to be expected"
    for (figure, _), error in zip(figures, errors(figures, device)):
        yield (f"  {figure.name:<42}{figure.tokens_per_second:10,.0f}{figure.tokens_per_second * (1 + error):10,.0f}{error:+8.1%}"
               f"   {'fitted' if figure.fitted else 'held out'}")
    yield f"  all other devices are predicted: {', '.join(name for name, each in DEVICES.items() if not each.calibrated)}"
