"""AttentionMetadata: all that an attention backend must know of a batch. An argument of every layer, never a global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """Tensors of one step; rows of B sequences lie one after the other in the batch's T tokens.

    slot_mapping [T] int64: where each token's K/V goes, block_table[pos // S] * S + pos % S; -1: write nothing.
    block_tables [B, most blocks] int32, padded with 0. context_lens [B] int32: tokens each row's last token attends to.
    cu_seqlens_q [B + 1] int32: row b's tokens are cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1.
    writes_all: whether slot_mapping is free of -1, known on the host, so that no device has to be asked.
    plan: what the backend prepared for this step; nobody else reads it.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    block_size: int
    writes_all: bool
    plan: Any = None
