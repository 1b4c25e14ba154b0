"""The real model with a learner's slot mapping or paged decode in place of the package's. As `plug`, for notebook 04."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.attention.metadata import AttentionMetadata
from minivllm.attention.torch_sdpa import TorchSDPABackend, _attend, _prefill_group
from minivllm.llm import LLM
from minivllm.prompts import Prompt
from minivllm.teach.compare import a_kind, as_tensor
from minivllm.teach.plug import PlugError, _call, _run_both

Row = tuple[int, int, int, list[int]]  # first token in the batch, tokens, context, block table


def _rows(metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> list[Row]:
    rows, begin = [], 0
    for table, num_tokens, context in zip(metadata.block_tables.tolist(), query_lens, context_lens):
        rows.append((begin, num_tokens, context, table[:-(-context // metadata.block_size)]))
        begin += num_tokens
    return rows


class PluggedSlots(TorchSDPABackend):
    """K/V go where `function(block_table, start, count, block_size) -> slots` says; they are read as the package does."""

    name = "plugged"

    def __init__(self, function: Callable):
        self.function = function

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> list:
        slots = [self._slots(table, context - num_tokens, num_tokens, metadata.block_size)
                 for _, num_tokens, context, table in _rows(metadata, query_lens, context_lens)]
        metadata.slot_mapping = torch.cat(slots).to(metadata.block_tables.device)
        metadata.writes_all = bool((metadata.slot_mapping >= 0).all())
        return super().prepare(metadata, query_lens, context_lens)

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> None:
        slots = metadata.slot_mapping
        if int(slots.max()) >= len(k_cache) or int(slots.min()) < -1:
            raise PlugError(f"your function returned slots {int(slots.min())} to {int(slots.max())}, the pool has 0 to {len(k_cache) - 1}")
        super().store(k, v, k_cache, v_cache, metadata)

    def _slots(self, *args: list[int] | int) -> Tensor:
        given = "(it was given block_table {}, start {}, count {}, block_size {})".format(*args)
        slots = as_tensor(_call(self.function, given, *args))
        if slots is None or slots.is_floating_point() or slots.shape != (args[2],):
            raise PlugError(f"your function must return {args[2]} whole numbers {given}")
        return slots.long()


class PluggedPagedDecode(TorchSDPABackend):
    """Every step of one token by `function(q [H, D], k_cache and v_cache [N, S, K, D], block_table, context_len) -> [H, D]`."""

    name = "plugged"

    def __init__(self, function: Callable):
        self.function = function

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> list[Row]:
        return _rows(metadata, query_lens, context_lens)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        out = torch.empty_like(q)
        pages = [cache.unflatten(0, (-1, metadata.block_size)) for cache in (k_cache, v_cache)]
        for row, (begin, num_tokens, context, table) in enumerate(metadata.plan):
            if num_tokens == 1:
                out[begin] = self._decode(q[begin].clone(), *pages, list(table), context)
            else:
                group = _prefill_group(metadata, row, begin, num_tokens, context)
                out[group.tokens] = _attend(q[group.tokens], k_cache, v_cache, group, scale)
        return out

    def _decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: list[int], context: int) -> Tensor:
        given = f"(it was given q {list(q.shape)}, caches {list(k_cache.shape)}, block_table {table}, context_len {context})"
        out = _call(self.function, given, q, k_cache, v_cache, table, context)
        if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
            got = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else a_kind(out)
            raise PlugError(f"your function returned {got}, the model needs {q.dtype} {list(q.shape)} {given}")
        return out


def slot_mapping(fn: Callable, llm: LLM | str, prompt: Prompt, max_tokens: int = 8) -> None:
    """Print what the model says when K/V are written where the learner's `slot_mapping` says, and whether the tokens agree."""
    _run_both(PluggedSlots, fn, llm, prompt, max_tokens)


def paged_decode(fn: Callable, llm: LLM | str, prompt: Prompt, max_tokens: int = 8) -> None:
    """The same for the learner's `paged_decode`: it serves every layer of every step of one token."""
    _run_both(PluggedPagedDecode, fn, llm, prompt, max_tokens)
