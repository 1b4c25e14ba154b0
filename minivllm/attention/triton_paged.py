"""Attention by Triton kernels that read the paged cache where it lies: no gather, no copy.

Decodes and prefills of a mixed step go to a kernel each. Where the matrix unit is missing (a T4: Triton makes scalar code of `tl.dot`
there), decodes are computed without it, and prefills gather their pages and use torch's own attention. Built in notebooks 03 and 04.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.attention.metadata import AttentionMetadata
from minivllm.attention.torch_sdpa import Group, _attend, _prefill_group
from minivllm.kernels.paged_decode import paged_decode_triton
from minivllm.kernels.paged_prefill import paged_prefill_triton
from minivllm.kernels.store_kvcache import store_kvcache


@dataclass(slots=True)
class TritonPlan:
    """Which rows go to which kernel; all None: every row is a decode, in order.

    decode_rows, decode_tokens [R] int32: rows of one token and the places of these tokens. prefill_rows [P] int32, none with more than
    `most_tokens` tokens; groups: the same rows for torch's attention.
    """

    decode_rows: Tensor | None = None
    decode_tokens: Tensor | None = None
    prefill_rows: Tensor | None = None
    most_tokens: int = 0
    groups: list[Group] | None = None


class TritonBackend:
    """dot: whether `tl.dot` reaches a matrix unit on this device."""

    default_block_size = 16
    fuses_store = True
    in_graphs = True

    def __init__(self, dot: bool = True):
        self.dot = dot
        self.name = "triton" if dot else "triton_t4"

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> TritonPlan:
        if max(query_lens) == 1:
            return TritonPlan()
        decodes, prefills, begin = [], [], 0
        for row, num_tokens in enumerate(query_lens):
            (decodes if num_tokens == 1 else prefills).append((row, begin, num_tokens))
            begin += num_tokens
        plan = TritonPlan(most_tokens=max(query_lens))
        device = metadata.block_tables.device
        if decodes:
            plan.decode_rows, plan.decode_tokens = torch.tensor([(row, at) for row, at, _ in decodes], dtype=torch.int32, device=device).t().contiguous()
        if self.dot:
            plan.prefill_rows = torch.tensor([row for row, _, _ in prefills], dtype=torch.int32, device=device)
        else:
            plan.groups = [_prefill_group(metadata, row, at, count, context_lens[row]) for row, at, count in prefills]
        return plan

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> None:
        store_kvcache(k, v, k_cache, v_cache, metadata.slot_mapping)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        plan: TritonPlan = metadata.plan
        cache = (k_cache, v_cache, metadata.block_tables, metadata.context_lens)
        if plan.decode_rows is None and not plan.most_tokens:
            return paged_decode_triton(q, *cache, metadata.block_size, scale, dot=self.dot)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.decode_rows is not None:
            paged_decode_triton(q, *cache, metadata.block_size, scale, plan.decode_rows, plan.decode_tokens, out, dot=self.dot)
        if plan.prefill_rows is not None:
            paged_prefill_triton(q, *cache, metadata.cu_seqlens_q, plan.prefill_rows, plan.most_tokens, metadata.block_size, scale, out)
        for group in plan.groups or ():
            out[group.tokens] = _attend(q[group.tokens], k_cache, v_cache, group, scale)
        return out
