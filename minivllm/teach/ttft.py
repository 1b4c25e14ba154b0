"""Time to the first token with and without a prefix hit: measured on this machine, or as saved from an H200. Used by notebook 05.

    python -m minivllm.teach.ttft CONFIG_DIRECTORY    measure with random weights of that shape, and save
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from minivllm.bench.limits import Machine
from minivllm.engine.engine import Engine
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams

FILE = Path(__file__).with_name("saved") / "h200_ttft.json"
LENGTHS, NEW = (512, 2048, 8192), 16


def predicted_ms(llm: LLM, machine: Machine, new: int, context: int) -> float:
    """The longer of: two operations for each weight of the layers and new token, and attention; all weights read once."""
    config, runner = llm.model_config, llm.runner
    weights = sum(parameter.numel() for parameter in runner.model.model.layers.parameters())
    pairs = 4 * config.num_heads * config.head_dim * config.num_layers * new * context
    return 1e3 * max((2 * weights * new + pairs) / machine.matmul_flops, runner.weight_bytes / machine.read_bandwidth)


def measure(llm: LLM, lengths: tuple[int, ...] = LENGTHS, repeats: int = 5) -> dict[str, Any]:
    """rows: for prompts of `tokens`, milliseconds to the first token when nothing (cold) and all but NEW tokens (warm) are found,
    beside the predictions. The median of `repeats` after a run that does not count.
    """
    machine, rows = Machine.measure(llm.runner.device, llm.runner.dtype), []
    for n in lengths:
        runs = [_cold_and_warm(llm, n, number) for number in range(repeats + 1)][1:]
        cold, warm = (statistics.median(times) for times in zip(*runs))
        rows.append({"tokens": n, "cold_ms": cold, "cold_predicted_ms": predicted_ms(llm, machine, n, n),
                     "warm_ms": warm, "warm_predicted_ms": predicted_ms(llm, machine, NEW, n)})
    return {"rows": rows}


def _cold_and_warm(llm: LLM, n: int, number: int) -> list[float]:
    engine = Engine(replace(llm.config, enable_prefix_caching=True), llm.runner, llm.engine.vocab_size)
    text, times = [(number + 7 * position) % 1000 for position in range(n)], []
    for prompt in (text, text[:-NEW] + [1] * NEW):
        seq = engine.add(prompt, SamplingParams(temperature=0, max_tokens=1))
        while engine.has_unfinished_requests():
            engine.step()
        times.append(1e3 * (seq.first_token_time - seq.arrival_time))
    return times


def saved_lines() -> list[str]:
    """What was saved from an H200, a line a length; one line that says so where nothing was."""
    if not FILE.exists():
        return ["no figures of an H200 are saved beside this notebook yet"]
    found = json.loads(FILE.read_text())
    return [f"saved from {found['device']}, {found['model']}:"] + [
        f"{row['tokens']:5,} tokens: {row['cold_ms']:5.1f} ms, predicted {row['cold_predicted_ms']:5.1f}; "
        f"{row['tokens'] - NEW:5,} of them found: {row['warm_ms']:4.1f} ms, predicted {row['warm_predicted_ms']:4.1f}"
        for row in found["rows"]]


if __name__ == "__main__":
    import torch

    most = max(LENGTHS) + 1
    with LLM(sys.argv[1], load_format="dummy", max_model_len=most, max_num_batched_tokens=most, max_num_seqs=8) as llm:
        about = {"device": torch.cuda.get_device_name(), "model": "the shape of Qwen3-0.6B, 16 bit"}
        FILE.write_text(json.dumps({**about, **measure(llm)}, indent=1) + "\n")
    print("\n".join(saved_lines()))
