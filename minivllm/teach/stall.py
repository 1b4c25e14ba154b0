"""How long a decoding request waits between two tokens when a long prompt arrives: measured, or as saved from an H200. For notebook 06.

    python -m minivllm.teach.stall CONFIG_DIRECTORY    measure with random weights of that shape, and save
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from minivllm.engine.engine import Engine
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm.simulate.modes import whole_prompts_first

FILE = Path(__file__).with_name("saved") / "h200_stall.json"
PROMPT, ANSWER, DECODING = 8192, 48, 8
BUDGETS = (8192 + DECODING, 2048, 512, 128)


def measure(llm: LLM, prompt: int = PROMPT, budgets: tuple[int, ...] = BUDGETS) -> dict[str, Any]:
    """rows: for each way, milliseconds between two tokens of a decoding request (the longest and the median), and the newcomer's TTFT.

    The first way is prefill first; the others mix, each with its token budget. Each is run twice, and the second run counts.
    """
    ways = [("prefill first", whole_prompts_first, max(budgets))] + [(f"mixed, budget {n}", "fcfs", n) for n in budgets]
    rows = []
    for way, policy, budget in ways:
        _run(llm, policy, budget, prompt)
        rows.append({"way": way, **_run(llm, policy, budget, prompt)})
    return {"prompt": prompt, "rows": rows}


def _run(llm: LLM, policy: Any, budget: int, prompt: int) -> dict[str, float]:
    config = replace(llm.config, enable_prefix_caching=False, policy=policy, max_num_seqs=DECODING + 1, max_num_batched_tokens=budget)
    engine = Engine(config, llm.runner, llm.engine.vocab_size)
    words = [17 * position % min(1000, llm.engine.vocab_size) for position in range(prompt)]
    make = lambda length, answer: engine.add(words[:length], SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
    decoding = [make(16, prompt // min(budget, 512) + ANSWER) for _ in range(DECODING)]  # they outlive the long prompt's prefill
    long, moments = None, []
    while engine.has_unfinished_requests():
        if engine.stats.num_steps == 8 and long is None:
            long = make(prompt, 4)
        known = decoding[0].num_generated_tokens
        engine.step()
        moments += [time.perf_counter()] if decoding[0].num_generated_tokens > known else []
    gaps = [1e3 * (b - a) for a, b in zip(moments, moments[1:])]
    return {"longest_gap_ms": max(gaps), "median_gap_ms": statistics.median(gaps),
            "ttft_ms": 1e3 * (long.first_token_time - long.arrival_time)}


def saved_lines() -> list[str]:
    """What was saved from an H200, a line a way; one line that says so where nothing was."""
    if not FILE.exists():
        return ["no figures of an H200 are saved beside this notebook yet"]
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return [f"saved from {found['device']}, {found['model']}, a prompt of {found['prompt']:,} tokens:"] + [
        f"{row['way']:20} longest gap {row['longest_gap_ms']:6.1f} ms (median {row['median_gap_ms']:4.1f}), first token of the long "
        f"prompt after "
        f"{row['ttft_ms']:6.1f} ms" for row in found["rows"]]


if __name__ == "__main__":
    import torch

    most = PROMPT + DECODING
    with LLM(sys.argv[1], load_format="dummy", max_model_len=most, max_num_batched_tokens=most, max_num_seqs=DECODING + 1) as opened:
        about = {"device": torch.cuda.get_device_name(), "model": "the shape of Qwen3-0.6B, 16 bit"}
        FILE.write_text(json.dumps({**about, **measure(opened)}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(saved_lines()))
