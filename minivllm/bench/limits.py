"""What the machine could do at best: its measured memory bandwidth and matrix rate, and a run's bytes and FLOPs against them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minivllm.engine.step import StepPlan, StepResult
from minivllm.llm import LLM


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """The median of `repeats` runs after two that do not count, the device waited for before each reading of the clock."""
    times = []
    for _ in range(repeats + 2):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


@dataclass(frozen=True)
class Machine:
    """Measured: bytes a second that can be read, and floating-point operations a second of a large matrix product in `dtype`."""

    read_bandwidth: float
    matmul_flops: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Machine:
        on_gpu = device.type == "cuda"
        data = torch.ones(2**31 // 4 if on_gpu else 2**28 // 4, device=device)
        seconds = median_seconds(data.sum, device)
        size = 8192 if on_gpu else 1024
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        return cls(data.nbytes / seconds, 2 * size**3 / median_seconds(lambda: a @ b, device))


class StepMeter:
    """Stands before a runner and notes what each step must move and compute at least."""

    def __init__(self, llm: LLM):
        self.llm, self.runner = llm, llm.engine.runner
        self.steps: list[tuple[int, int, int]] = []  # (tokens, tokens of K/V read, rows that sample) of each step

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps.append((plan.num_tokens, sum(row.context_len for row in plan.rows), sum(row.samples for row in plan.rows)))
        return self.runner.execute(plan)

    def __enter__(self) -> StepMeter:
        self.llm.engine.runner = self
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.engine.runner = self.runner

    def limit_seconds(self, machine: Machine) -> float:
        """For each step the longer of: all weights and the step's K/V read once; two FLOPs for each weight and token."""
        runner, model = self.runner, self.runner.model_config
        head = model.vocab_size * model.hidden_size
        elements = runner.weight_bytes // runner.dtype.itemsize
        body = elements - head * (1 if model.tie_word_embeddings else 2)  # an embedding look-up reads a few rows, and computes nothing
        total = 0.0
        for tokens, kv_tokens, rows in self.steps:
            moved = (body + head) * runner.dtype.itemsize + kv_tokens * runner.spec.bytes_per_token
            total += max(moved / machine.read_bandwidth, 2 * (body * tokens + head * rows) / machine.matmul_flops)
        return total
