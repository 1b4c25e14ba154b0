"""A StepPlan as tensors: the only place where positions and block tables become slots. Built in notebooks 03 and 04."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.attention import AttentionBackend
from minivllm.attention.metadata import AttentionMetadata
from minivllm.engine.step import PlanRow, StepPlan
from minivllm.worker.sampler import SamplingBatch


@dataclass(slots=True)
class Batch:
    """One step's tensors on the device. input_ids, positions [T] int64.

    last_tokens [B] int64: where in the T tokens each row ends. sampling_rows: which of the B rows sample, in order.
    """

    input_ids: Tensor
    positions: Tensor
    last_tokens: Tensor
    sampling_rows: list[int]
    attention: AttentionMetadata
    sampling: SamplingBatch | None


def slot_mapping(row: PlanRow, block_size: int) -> list[int]:
    """The slot of each token of `row`: block_table[pos // block_size] * block_size + pos % block_size; -1 below `write_start`."""
    return [row.block_table[pos // block_size] * block_size + pos % block_size if pos >= row.write_start else -1
            for pos in range(row.start, row.context_len)]


def build_batch(plan: StepPlan, block_size: int, backend: AttentionBackend, device: torch.device) -> Batch:
    """The tensors of `plan`, rows one after the other. Built on the host, then sent over."""
    rows = plan.rows
    input_ids = [token for row in rows for token in row.token_ids]
    positions = [pos for row in rows for pos in range(row.start, row.context_len)]
    slots = [slot for row in rows for slot in slot_mapping(row, block_size)]
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row.token_ids))
    context_lens = [row.context_len for row in rows]
    widest = max(len(row.block_table) for row in rows)
    attention = AttentionMetadata(
        slot_mapping=torch.tensor(slots, device=device),
        block_tables=torch.tensor([row.block_table + [0] * (widest - len(row.block_table)) for row in rows],
                                  dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(ends, dtype=torch.int32, device=device),
        block_size=block_size,
        writes_all=min(slots) >= 0,
    )
    attention.plan = backend.prepare(attention, [len(row.token_ids) for row in rows], context_lens)
    sampling_rows = [index for index, row in enumerate(rows) if row.samples]
    return Batch(
        input_ids=torch.tensor(input_ids, device=device),
        positions=torch.tensor(positions, device=device),
        last_tokens=torch.tensor(ends[1:], device=device) - 1,
        sampling_rows=sampling_rows,
        attention=attention,
        sampling=SamplingBatch.of([rows[index] for index in sampling_rows], device) if sampling_rows else None,
    )
