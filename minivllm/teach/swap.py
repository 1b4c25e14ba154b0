"""What a preempted sequence costs: its tokens computed again, or its K/V copied to the host's memory and back. Used by notebook 07.

    python -m minivllm.teach.swap CONFIG_DIRECTORY    measure with random weights of that shape, and save

The engine itself never swaps; this copies blocks of its pool as an engine would that did.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minivllm.bench.limits import synchronize
from minivllm.engine.engine import Engine
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams

FILE = Path(__file__).with_name("saved") / "h200_swap.json"
LENGTHS = (512, 2048, 8192)


def measure(llm: LLM, lengths: tuple[int, ...] = LENGTHS, repeats: int = 5) -> dict[str, Any]:
    """rows: for `tokens` of K/V, milliseconds to compute them again, and to copy them out and back. Medians, the first run not counted."""
    rows = []
    for n in lengths:
        runs = [(_recompute_ms(llm, n), *_swap_ms(llm, n)) for _ in range(repeats + 1)][1:]
        recompute, out, back = (statistics.median(times) for times in zip(*runs))
        megabytes = n * llm.runner.spec.bytes_per_token / 1e6
        rows.append({"tokens": n, "recompute_ms": recompute, "out_ms": out, "back_ms": back, "mb": megabytes})
    return {"rows": rows}


def _recompute_ms(llm: LLM, n: int) -> float:
    """One step over n tokens that nobody has computed."""
    engine = Engine(replace(llm.config, enable_prefix_caching=False), llm.runner, llm.engine.vocab_size)
    seq = engine.add([position % 1000 for position in range(n)], SamplingParams(temperature=0, max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    return 1e3 * (seq.first_token_time - seq.arrival_time)


def _swap_ms(llm: LLM, n: int) -> tuple[float, float]:
    """The blocks of n tokens to a page-locked buffer on the host, and from there into the pool again."""
    cache, device = llm.runner.pool.cache, llm.runner.device
    blocks = torch.arange(-(-n // llm.config.block_size), device=device)
    host = torch.empty(cache[:, :, blocks].shape, dtype=cache.dtype, pin_memory=device.type == "cuda")
    times = []
    for copy in (lambda: host.copy_(cache[:, :, blocks], non_blocking=True),
                 lambda: cache.index_copy_(2, blocks, host.to(device, non_blocking=True))):
        synchronize(device)
        begin = time.perf_counter()
        copy()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return times[0], times[1]


def lines(found: dict[str, Any]) -> list[str]:
    """What `measure` found, a line a length."""
    return [f"{row['tokens']:6,} tokens, {row['mb']:6.1f} MB: computed again in {row['recompute_ms']:6.1f} ms; "
            f"copied out in {row['out_ms']:5.1f} and back in {row['back_ms']:5.1f} ms" for row in found["rows"]]


def saved_lines() -> list[str]:
    """What was saved from an H200; one line that says so where nothing was."""
    if not FILE.exists():
        return ["no figures of an H200 are saved beside this notebook yet"]
    found = json.loads(FILE.read_text())
    return [f"saved from {found['device']}, {found['model']}:", *lines(found)]


if __name__ == "__main__":
    most = max(LENGTHS) + 1
    with LLM(sys.argv[1], load_format="dummy", max_model_len=most, max_num_batched_tokens=most, max_num_seqs=8) as llm:
        about = {"device": torch.cuda.get_device_name(), "model": "the shape of Qwen3-0.6B, 16 bit"}
        FILE.write_text(json.dumps({**about, **measure(llm)}, indent=1) + "\n")
    print("\n".join(saved_lines()))
