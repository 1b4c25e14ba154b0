"""Simulation: what came out of one, and the figures derived from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minivllm.simulate.requests import Request


class StepRecord(NamedTuple):
    """One step. `time` is its start; token counts are those of real requests, `padding` what a static batch computed beside them."""

    time: float
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    padding: int
    running: int
    waiting: int


@dataclass
class Simulation:
    """Times in simulated seconds. The lists have one entry for each finished request, in the order in which they arrived.

    ttft: arrival to first token. latency: arrival to last token. longest_gap: the longest wait between two of its tokens.
    tpot: mean time between two of its tokens; requests of one token have none, and are left out.
    itl: every time between two tokens of a request. unfinished: requests that would wait for ever.
    """

    device: str
    mode: str
    requests: list[Request] = field(default_factory=list, repr=False)  # the finished ones
    ttft: list[float] = field(default_factory=list, repr=False)
    tpot: list[float] = field(default_factory=list, repr=False)
    latency: list[float] = field(default_factory=list, repr=False)
    longest_gap: list[float] = field(default_factory=list, repr=False)
    itl: Sequence[float] = field(default=(), repr=False)
    unfinished: int = 0
    seconds: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    step_log: list[StepRecord] = field(default_factory=list, repr=False)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def throughput(self) -> float:
        """Output tokens a second, from time 0 to the last step's end."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, float]:
        """Throughput and counts, and the median and 95th percentile of each time; nan where nothing finished."""
        times = {"ttft": self.ttft, "tpot": self.tpot, "latency": self.latency, "longest_gap": self.longest_gap}
        figures = {f"{name}_{word}": percentile(values, share) for name, values in times.items()
                   for word, share in (("median", 0.5), ("p95", 0.95))}
        return {"throughput": self.throughput, "finished": len(self.requests), "unfinished": self.unfinished, "seconds": self.seconds,
                "num_steps": self.num_steps, "num_preemptions": self.num_preemptions, **figures}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; nan of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan
