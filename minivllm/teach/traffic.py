"""10,000 simulated requests, saved: the ways to batch at two rates, and long prompts under several token budgets. Used by notebook 06.

    python -m minivllm.teach.traffic    simulate all of it again (a few minutes), and save
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.simulate import measured_lengths, poisson_requests, simulate

FILE = Path(__file__).with_name("traffic.json")
#: Requests a second with the lengths of lengths.json, and the ways to batch them, 32 rows at most.
RATES, WAYS = (2, 6), ("wait_until_full", "static", "mixed")
#: Prompts of 16 to 4,000 tokens, 4 a second, answers of 16 to 128: the mode and its token budget.
LONG, BUDGETS = {"rate": 4, "prompt": (16, 4000), "output": (16, 128)}, (
    ("prefill_first", 4096), ("mixed", 4096), ("mixed", 1024), ("mixed", 256), ("mixed", 64))


HEAD = "                              TTFT, s       p95   longest gap, ms   p95   tokens/s   wait for ever"


def line(name: str, summary: Mapping[str, float]) -> str:
    """A simulation's `summary()` in one line below HEAD: medians and 95th percentiles over the requests."""
    gap, gap_p95 = 1e3 * summary["longest_gap_median"], 1e3 * summary["longest_gap_p95"]
    return (f"{name:27} {summary['ttft_median']:9.3f} {summary['ttft_p95']:9.3f} {gap:17.0f} {gap_p95:5.0f} {summary['throughput']:10,.0f} "
            f"{summary['unfinished'] or '-':>15}")


def summaries(num: int) -> dict[str, dict[str, float]]:
    """name -> summary of `num` simulated requests, on a T4 by its datasheet."""
    found = {}
    for rate in RATES:
        requests = poisson_requests(num, rate, lengths=measured_lengths())
        for mode in WAYS:
            found[f"{mode}, {rate} a second"] = simulate(requests, device="T4", mode=mode, max_num_seqs=32).summary()
    requests = poisson_requests(num, **LONG)
    for mode, budget in BUDGETS:
        made = simulate(requests, device="T4", mode=mode, max_num_seqs=32, max_num_batched_tokens=budget)
        found[f"{mode}, budget {budget}"] = made.summary()
    return found


def saved_lines() -> list[str]:
    """What was saved, a line a simulation; one line that says so where nothing was."""
    if not FILE.exists():
        return ["no simulation of 10,000 requests is saved beside this notebook yet"]
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return [f"{found['requests']:,} requests, saved", HEAD] + [line(name, summary) for name, summary in found["summaries"].items()]


if __name__ == "__main__":
    number = 10_000
    FILE.write_text(json.dumps({"requests": number, "summaries": summaries(number)}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(saved_lines()))
