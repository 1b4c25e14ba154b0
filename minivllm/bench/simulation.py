"""`minivllm bench simulate`: one stream of requests through every batching mode, on a GPU that need not be there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from minivllm.simulate import MODES, Simulation, measured_lengths, poisson_requests, simulate

_COLUMNS = ("throughput", "ttft_median", "ttft_p95", "tpot_median", "tpot_p95", "longest_gap_p95", "latency_median", "latency_p95")


def measure(device: str, rate: float, num_requests: int, *, seed: int = 0, input_len: tuple[int, int] = (64, 512),
            output_len: tuple[int, int] = (16, 192), real_lengths: bool = False, modes: list[str] | None = None,
            **settings: Any) -> dict[str, Any]:
    """Each mode's summary, and the seconds that simulating it took here. settings: those of `simulate`."""
    requests = poisson_requests(num_requests, rate, seed, input_len, output_len, measured_lengths() if real_lengths else None)
    result: dict[str, Any] = {"requests": num_requests, "rate": rate, "seed": seed, "settings": settings, "modes": {}}
    for mode in modes or MODES:
        begin = time.perf_counter()
        simulation: Simulation = simulate(requests, device, mode, **settings)
        result["device"] = simulation.device
        result["modes"][mode] = {**simulation.summary(), "wall_seconds": time.perf_counter() - begin}
    return result


def show(result: dict[str, Any]) -> Iterator[str]:
    """A row a mode: tokens a second, and medians and 95th percentiles in milliseconds."""
    yield f"{result['requests']:,} requests, {result['rate']:g} a second, {result['device']}; times in ms, median / 95th percentile"
    yield (f"  {'mode':<17}{'tokens/s':>9}{'TTFT':>19}{'TPOT':>15}{'longest gap':>14}{'latency':>19}{'unfinished':>12}{'preempted':>11}"
           f"{'simulated in':>14}")
    for mode, row in result["modes"].items():
        rate, *times = (row[name] * (1 if name == "throughput" else 1e3) for name in _COLUMNS)
        ttft, ttft95, tpot, tpot95, gap95, latency, latency95 = times
        yield (f"  {mode:<17}{rate:9,.0f}{_pair(ttft, ttft95):>19}{f'{tpot:.1f} / {tpot95:.1f}':>15}{gap95:14,.0f}"
               f"{_pair(latency, latency95):>19}{row['unfinished']:12,}{row['num_preemptions']:11,}{row['wall_seconds']:12.1f} s")


def _pair(median: float, p95: float) -> str:
    return f"{median:,.0f} / {p95:,.0f}"
