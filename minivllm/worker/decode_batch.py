"""DecodeBatch: the tensors of a step in which every row computes one token, kept from step to step.

From one decode to the next little changes: a row's block table grows by a block every `block_size` steps, its sampling parameters never.
So the arrays stay on the host and on the device, and only what changed is written. Every address stays the same, as a CUDA graph needs.
"""

from __future__ import annotations

import numpy as np
import torch

from minivllm.attention.metadata import AttentionMetadata
from minivllm.engine.step import StepPlan
from minivllm.worker.sampler import SamplingBatch


def is_decode(plan: StepPlan) -> bool:
    """Whether every row computes one token and samples."""
    return all(row.samples and len(row.token_ids) == 1 for row in plan.rows)


class DecodeBatch:
    """Room for `max_rows` rows of `max_blocks` blocks. After `load` the first rows are the plan's; those behind them are padding:

    they write nothing (slot -1) and attend to nothing (context 0), so they cannot disturb and cannot make a NaN.
    """

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device):
        self.block_size, self.device = block_size, device
        self._columns = torch.zeros(3, max_rows, dtype=torch.int64, pin_memory=device.type == "cuda")  # ids, positions, slots
        self._contexts = torch.zeros(max_rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._columns[2] = -1  # until the first plan every row is padding
        self.columns, self.contexts = self._columns.to(device, copy=True), self._contexts.to(device, copy=True)
        self.tables = self._tables.to(device, copy=True)
        self._host_tables = self._tables.numpy()
        self._known: list[list[int]] = [[] for _ in range(max_rows)]  # the block table that stands in each row
        self._sampled: tuple[int, ...] = ()                           # whose parameters `sampling` holds
        self.sampling: SamplingBatch | None = None

    def load(self, plan: StepPlan, size: int) -> None:
        """Take in `plan`, padded to `size` rows. The caller must have waited for the step before: the host's arrays are reused."""
        rows, count = plan.rows, len(plan.rows)
        changed = [index for index, row in enumerate(rows) if row.block_table != self._known[index]]
        for index in changed:
            table = self._known[index] = rows[index].block_table
            self._host_tables[index, :len(table)] = table
        positions = np.array([row.start for row in rows])
        unwritten = positions < np.array([row.write_start for row in rows])
        blocks = self._host_tables[np.arange(count), positions // self.block_size].astype(np.int64)
        columns, contexts = self._columns.numpy(), self._contexts.numpy()
        columns[0, :count] = [row.token_ids[0] for row in rows]
        columns[1, :count] = positions
        columns[2, :count] = np.where(unwritten, -1, blocks * self.block_size + positions % self.block_size)
        contexts[:count] = positions + 1
        columns[:2, count:size], columns[2, count:size], contexts[count:size] = 0, -1, 0
        self.columns[:, :size].copy_(self._columns[:, :size], non_blocking=True)
        self.contexts[:size].copy_(self._contexts[:size], non_blocking=True)
        if changed:
            first, last, widest = changed[0], changed[-1] + 1, max(len(row.block_table) for row in rows)
            self.tables[first:last, :widest].copy_(self._tables[first:last, :widest], non_blocking=True)
        self._load_sampling(plan)

    def attention(self, size: int) -> AttentionMetadata:
        """Metadata of the first `size` rows; `plan` is left to the backend."""
        starts = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        return AttentionMetadata(self.columns[2, :size], self.tables[:size], self.contexts[:size], starts, self.block_size, writes_all=False)

    def _load_sampling(self, plan: StepPlan) -> None:
        who = tuple(row.seq_id for row in plan.rows)
        if who != self._sampled or self.sampling is None:
            self.sampling, self._sampled = SamplingBatch.of(plan.rows, self.device), who
        if self.sampling.positions is not None:
            self.sampling.positions = self.columns[1, :len(who)] + 1  # the token takes the position behind its row's last
            if self.sampling.siblings is not None:
                self.sampling.positions += self.sampling.siblings
