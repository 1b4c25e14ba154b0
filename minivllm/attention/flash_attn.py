"""Attention by the flash-attn package (Dao, 2023), which reads the paged cache through the block table as our own kernels do.

It runs on sm80 and newer, in 16 bit, and wants blocks of a multiple of 256 tokens in its second version. The cache is written by our
own kernel, as for the Triton backend. Nothing here is needed: where the package is missing, the Triton backend takes its place.
On an H200 its prefill is a third faster than our kernel and its decode slower, so the best of both is a backend too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.attention.metadata import AttentionMetadata
from minivllm.kernels.paged_decode import paged_decode
from minivllm.kernels.store_kvcache import store_kvcache


@dataclass(slots=True)
class FlashPlan:
    """A step with rows of several tokens. cu_seqlens_k [B + 1] int32: the contexts' lengths added up."""

    cu_seqlens_k: Tensor
    most_queries: int
    most_keys: int


class FlashAttentionBackend:
    """own_decode: whether decodes go to our own kernel. Raises ImportError where flash-attn is not installed."""

    default_block_size = 256
    fuses_store = True
    in_graphs = True

    def __init__(self, own_decode: bool = False) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.own_decode = own_decode
        self.name = "flash_triton" if own_decode else "flash_attn"
        self._varlen, self._with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> FlashPlan | None:
        """None for a step of decodes: it needs nothing but the metadata, and so can be captured."""
        if max(query_lens) == 1:
            return None
        ends = torch.tensor([0, *context_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return FlashPlan(ends.to(metadata.context_lens.device), max(query_lens), max(context_lens))

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> None:
        store_kvcache(k, v, k_cache, v_cache, metadata.slot_mapping)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        """flash-attn's causal mask is lower-right: a row's tokens are the last ones of its context, as ours are."""
        plan: FlashPlan | None = metadata.plan
        if plan is None and self.own_decode:
            return paged_decode(q, k_cache, v_cache, metadata.block_tables, metadata.context_lens, metadata.block_size, scale)
        pages = [cache.unflatten(0, (-1, metadata.block_size)) for cache in (k_cache, v_cache)]  # [N, S, K, D]
        if plan is None:
            return self._with_kvcache(q.unsqueeze(1), *pages, cache_seqlens=metadata.context_lens, block_table=metadata.block_tables,
                                      softmax_scale=scale, causal=True).squeeze(1)
        return self._varlen(q, *pages, cu_seqlens_q=metadata.cu_seqlens_q, cu_seqlens_k=plan.cu_seqlens_k, max_seqlen_q=plan.most_queries,
                            max_seqlen_k=plan.most_keys, softmax_scale=scale, causal=True, block_table=metadata.block_tables)
