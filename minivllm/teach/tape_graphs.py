"""The package's decode graphs without a GPU: DecodeGraphs over tapes, and an attention backend of fixed shapes that can be recorded.

Everything but the recording is the package's own: the buffers, the sizes, the padding, the choice between replay and eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minivllm.attention.metadata import AttentionMetadata
from minivllm.attention.torch_sdpa import Group, TorchSDPABackend, _attend_decodes, slots_of
from minivllm.llm import LLM
from minivllm.teach.tape import Tape
from minivllm.worker.cuda_graphs import DecodeGraphs, graph_sizes
from minivllm.worker.decode_batch import DecodeBatch
from minivllm.worker.kv_cache import KVCachePool


class FixedShapes(TorchSDPABackend):
    """Decodes without a question to the data: all of a block table is read, and what lies behind the context is masked.

    Slot -1 becomes the pool's last slot, which must be nobody's. Steps with prompts go the usual way.
    """

    name = "fixed_shapes"
    in_graphs = True

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> list[Group] | None:
        return None if max(query_lens) == 1 else super().prepare(metadata, query_lens, context_lens)

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> None:
        slots = metadata.slot_mapping
        slots = torch.where(slots < 0, len(k_cache) - 1, slots)  # [T]
        k_cache.index_copy_(0, slots, k)
        v_cache.index_copy_(0, slots, v)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        if metadata.plan is not None:
            return super().attend(q, k_cache, v_cache, metadata, scale)
        tables, size = metadata.block_tables, metadata.block_size
        positions = torch.arange(tables.shape[1] * size, device=q.device).expand(len(q), -1)  # [B, M]
        slots = slots_of(tables, positions, size)
        mask = (positions < metadata.context_lens[:, None])[:, None, None]  # [B, 1, 1, M]
        group = Group(slice(None), slots, mask, decodes=True)
        return _attend_decodes(q, k_cache[slots], v_cache[slots], group, scale).nan_to_num(0.0)  # a row of padding attends to nothing


class TapeGraphs(DecodeGraphs):
    """DecodeGraphs whose graphs are tapes."""

    def _capture_one(self, size: int, pool: object) -> object:
        tape = Tape()
        with tape:
            hidden = self.forward(size)
        self.graphs[size] = (tape, hidden)
        return pool


@contextmanager
def recorded(llm: LLM, sizes: list[int] | None = None, graphs: type[TapeGraphs] = TapeGraphs) -> Iterator[TapeGraphs]:
    """`llm`, on a CPU and without a prefix cache, decodes by replay meanwhile, on a pool with one more block for the padding."""
    runner, config = llm.runner, llm.config
    if runner.device.type != "cpu" or config.enable_prefix_caching:
        raise ValueError("recorded() needs an LLM with device='cpu' and enable_prefix_caching=False: it decodes on another pool")
    kept = runner.backend, runner.pool, runner.graphs
    try:
        runner.backend = FixedShapes()
        runner.pool = KVCachePool(runner.spec, config.num_kv_blocks + 1, config.block_size, runner.device)
        runner.pool.bind(runner.model, runner.backend)
        runner.graphs = graphs(runner.model, runner.backend, new_batch(llm), sizes or graph_sizes(config.max_num_seqs))
        with torch.inference_mode():
            for size in sorted(runner.graphs.sizes, reverse=True):
                runner.graphs._capture_one(size, None)
        yield runner.graphs
    finally:
        runner.backend, runner.pool, runner.graphs = kept
        runner.pool.bind(runner.model, runner.backend)


def new_batch(llm: LLM) -> DecodeBatch:
    """The buffers of `llm`'s decode steps, as ModelRunner makes them."""
    config = llm.config
    return DecodeBatch(config.max_num_seqs, -(-config.max_model_len // config.block_size), config.block_size, llm.runner.device)
