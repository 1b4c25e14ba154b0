"""Counters of what the engine did, under vLLM's metric names. The scheduler counts; views and the command line read."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """Gauges (`num_requests_*`, `kv_cache_usage_perc`, `batch_size`) hold for the last step; all else counts up from 0.

    A request of n answers counts as n in `num_requests_*`, as in vLLM.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0   # used blocks / all blocks, 0 to 1 as in vLLM
    batch_size: int = 0                # tokens in the last step's batch
    num_steps: int = 0
    prompt_tokens: int = 0             # tokens computed as prefill, recomputed ones included
    generation_tokens: int = 0         # tokens sampled
    prefix_cache_queries: int = 0      # prompt tokens looked up
    prefix_cache_hits: int = 0         # of these, found
    num_preemptions: int = 0
    recomputed_tokens: int = 0         # computed before a preemption and again after it
    num_requests_finished: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else 0.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
