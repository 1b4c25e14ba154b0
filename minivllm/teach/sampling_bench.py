"""What a step's sampling costs, by option: measured on this machine's device, or as saved from an H200. Used by notebook 08.

    python -m minivllm.teach.sampling_bench    measure on the GPU, and save

Random logits in place of a model's; the sampler is the worker's own, with its seeds, its options and its reading of the result.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from minivllm.engine.options import RowOptions
from minivllm.engine.step import PlanRow
from minivllm.kernels.jit import uses_triton
from minivllm.sampling_params import SamplingParams
from minivllm.worker.filters import filters_in_torch
from minivllm.worker.logits import History
from minivllm.worker.logprobs import sampled_logprobs
from minivllm.worker.sampler import SamplingBatch, sample

FILE = Path(__file__).with_name("saved") / "h200_sampling.json"
ROWS, VOCAB, HISTORY = 256, 151_936, 200

#: name -> what the rows ask for.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "temperature": {"temperature": 0.8}, "logprobs=5": {"temperature": 0.8, "logprobs": 5},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "repetition + presence": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "top_k + top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
SORTED = "top_k + top_p, sorted"  # without the kernel that finds floors


def plan_rows(params: SamplingParams, count: int) -> list[PlanRow]:
    """`count` rows that decode, each with a history of tokens where the parameters need one."""
    def options(row: int) -> RowOptions | None:
        if not params.has_options:
            return None
        history = [(7 * row + 13 * position) % 500 for position in range(HISTORY)] if params.needs_history else None
        return RowOptions(HISTORY // 2, history=history)

    return [PlanRow(row, HISTORY, [row % 500], [], 0, True, params, row, options(row)) for row in range(count)]


def measure(rows: int = ROWS, vocab: int = VOCAB, device: str | torch.device = "cpu", repeats: int = 5,
            dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Milliseconds from logits [rows, vocab] to tokens on the host, for each of WAYS: the median of `repeats` runs after another.

    And for SORTED, where there is a kernel that else spares the sort.
    """
    logits = (4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))).to(device, dtype)
    found = {name: _milliseconds(plan_rows(SamplingParams(**way), rows), logits, repeats) for name, way in WAYS.items()}
    if not uses_triton(logits):
        return found
    with filters_in_torch():
        return {**found, SORTED: _milliseconds(plan_rows(SamplingParams(**WAYS["top_k + top_p"]), rows), logits, repeats)}


@torch.inference_mode()
def _milliseconds(rows: list[PlanRow], logits: torch.Tensor, repeats: int) -> float:
    batch, history = SamplingBatch.of(rows, logits.device), History(logits.device)
    if batch.penalised:
        history.update(rows)

    def step() -> None:
        tokens = sample(logits, batch, history)
        if batch.logprob_rows:
            sampled_logprobs(rows, batch.logprob_rows, logits, tokens)
        tokens.tolist()  # the host waits for the device here

    times = []
    for _ in range(repeats + 1):
        if logits.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def saved() -> dict[str, Any] | None:
    """What was saved from an H200: {"device", "rows", "vocab_size", "milliseconds": {way: ms}}, and "dtype" where known. None without."""
    return json.loads(FILE.read_text()) if FILE.exists() else None


def lines(milliseconds: dict[str, float]) -> list[str]:
    """A line a way: its time, and how many times that of temperature alone."""
    unit = milliseconds["temperature"]
    return [f"{name:22} {ms:8.2f} ms, {ms / unit:5.1f} times as long as temperature alone"
            for name, ms in sorted(milliseconds.items(), key=lambda pair: pair[1])]


def saved_lines() -> list[str]:
    found = saved()
    if found is None:
        return ["no figures of an H200 are saved beside this notebook yet"]
    about = f"saved from {found['device']}: {found['rows']} rows of {found['vocab_size']:,} logits, sampling only"
    return [about, *lines(found["milliseconds"])]


if __name__ == "__main__":
    result = measure(device="cuda", repeats=15, dtype=torch.bfloat16)
    FILE.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": ROWS, "vocab_size": VOCAB, "dtype": "bfloat16",
                                "milliseconds": {name: round(ms, 3) for name, ms in result.items()}}, indent=1) + "\n")
    print("\n".join(saved_lines()))
