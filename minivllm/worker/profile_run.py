"""profile_run: what the largest steps take beside weights and KV cache, found by running them before the cache is made.

vLLM's way of sizing the pool. The steps read and write a cache of one block, in every place of their block tables: they compute
nothing sensible, but they take what a real one takes.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minivllm.attention.torch_sdpa import MOST_GATHERED_TOKENS
from minivllm.config import DEFAULT_MAX_NUM_SEQS, EngineConfig
from minivllm.engine.step import PlanRow, StepPlan
from minivllm.sampling_params import SamplingParams
from minivllm.worker.filters import filters_in_torch
from minivllm.worker.kv_cache import num_blocks_that_fit

if TYPE_CHECKING:
    from minivllm.worker.model_runner import ModelRunner

_NEVER = 1 << 30  # no position is written
#: In torch these sort all logits, and take more than any other option does with or without a kernel.
_SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)


@dataclass(frozen=True)
class Profile:
    """Bytes. activations: the most that a step held at once. graphs: what CUDA graphs of every size will hold. no_graphs: capturing failed."""

    activations: int = 0
    graphs: int = 0
    no_graphs: bool = False


def profile_run(runner: ModelRunner, config: EngineConfig, max_num_batched_tokens: int, block_size: int, gpu_memory_utilization: float) -> Profile:
    """Run the largest steps and capture the largest graph, over a pool of one block that is gone afterwards. Only on a GPU."""
    fitting = num_blocks_that_fit(runner.spec.bytes_per_token * block_size, runner.device, gpu_memory_utilization)  # at most
    fitting = runner.ranks.smallest(fitting)  # ranks take the same steps
    positions = max(2, min(config.max_model_len or runner.model_config.max_positions, fitting * block_size))
    num_tokens = max(config.max_num_batched_tokens or max_num_batched_tokens, config.max_num_seqs or 1)
    num_rows = min(config.max_num_seqs or DEFAULT_MAX_NUM_SEQS, num_tokens)
    runner.allocate(1, block_size)
    try:
        torch.cuda.reset_peak_memory_stats(runner.device)
        base = torch.cuda.memory_allocated(runner.device)
        with filters_in_torch():
            for plan in largest_steps(num_tokens, num_rows, positions, block_size):
                runner.compute(plan)
        activations = torch.cuda.max_memory_allocated(runner.device) - base
        graphs = _graph_bytes(runner, num_rows, -(-positions // block_size), block_size) if runner.wants_graphs(config) else 0
    finally:
        runner.release_pool()
    return Profile(activations, graphs or 0, no_graphs=graphs is None)


def largest_steps(num_tokens: int, num_rows: int, positions: int, block_size: int) -> list[StepPlan]:
    """Many prompts that all sample; one long chunk at the end of the longest context; the most decodes.

    Of these the first is over the longest context, the others over enough for a backend that gathers pages to gather all it ever will.
    """
    def row(index: int, start: int, count: int) -> PlanRow:
        return PlanRow(index, start, [0] * count, [0] * -(-(start + count) // block_size), _NEVER, True, _SAMPLING, 0)

    each = min(num_tokens // num_rows, positions)
    chunk, most = min(num_tokens, positions), 2 * MOST_GATHERED_TOKENS // num_rows
    return [StepPlan([row(index, 0, each) for index in range(num_rows)]),
            StepPlan([row(0, positions - chunk, chunk)]),
            StepPlan([row(index, (min(positions, most) if index else positions) - 1, 1) for index in range(num_rows)])]


def _graph_bytes(runner: ModelRunner, num_rows: int, most_blocks: int, block_size: int) -> int | None:
    """What graphs of every size take; None: capturing failed.

    They share one memory, which the largest one fills; but each keeps its own hidden states, and a little more, which the smallest one shows.
    """
    from minivllm.worker.cuda_graphs import DecodeGraphs, graph_sizes
    from minivllm.worker.decode_batch import DecodeBatch

    def free() -> int:
        torch.cuda.synchronize(runner.device)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(runner.device)[0]  # the device's own word: graphs take memory that torch does not count

    sizes, readings = graph_sizes(num_rows), [free()]
    batch, kept = DecodeBatch(num_rows, most_blocks, block_size, runner.device), []
    for some in ([sizes[-1]], [sizes[0]]):
        kept.append(DecodeGraphs.capture(runner.model, runner.backend, batch, some, runner.ranks.size))
        readings.append(free())
        if kept[-1] is None:  # which was said
            return None
    largest, smallest = (max(0, before - after) for before, after in zip(readings, readings[1:]))
    hidden = sum(sizes[:-1]) * runner.model_config.hidden_size * runner.dtype.itemsize
    return largest + hidden + smallest * (len(sizes) - 1)
