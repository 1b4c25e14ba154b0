"""A runner without a model whose tokens depend on all that it reads through the block table, so a wrong block gives other tokens.

It works as a model of two attention layers does, with a checksum in place of each layer's arithmetic. It believes the plan alone
and knows neither the scheduler nor the truth about any sequence. Used by the "break it" exercises, and wherever milliseconds count.
"""

from __future__ import annotations

import zlib

from minivllm.engine.step import PlanRow, StepPlan, StepResult

#: Small enough to type, large enough that a wrong read hardly ever gives the right token by chance.
VOCAB = 1000


class MirrorRunner:
    """`slots`, one list a layer, hold what was written there last: the first layer the token, the second a checksum of all that the

    first layer read at that position. So the second layer's K/V depends on the whole prefix, as a real model's does.
    """

    def __init__(self, block_size: int, num_blocks: int, vocab: int = VOCAB):
        self.block_size, self.vocab = block_size, vocab
        self.slots = [[0] * (block_size * num_blocks) for _ in range(2)]

    def execute(self, plan: StepPlan) -> StepResult:
        """Layer by layer, as a model does: every row writes before any row reads."""
        for row in plan.rows:
            self._write(0, row, row.token_ids)
        hidden = [self._read(0, row) for row in plan.rows]
        for row, values in zip(plan.rows, hidden):
            self._write(1, row, values)
        last = [self._read(1, row)[-1] for row in plan.rows]
        return StepResult({row.seq_id: value % self.vocab for row, value in zip(plan.rows, last) if row.samples})

    def _slot(self, row: PlanRow, position: int) -> int:
        return row.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, layer: int, row: PlanRow, values: list[int]) -> None:
        for position, value in enumerate(values, start=row.start):
            if position >= row.write_start:  # what lies below it came from the prefix cache
                self.slots[layer][self._slot(row, position)] = value

    def _read(self, layer: int, row: PlanRow) -> list[int]:
        """For each of the row's tokens a checksum of the slots of all positions up to its own."""
        state, results = 0, []
        for position in range(row.context_len):
            content = self.slots[layer][self._slot(row, position)]
            state = zlib.crc32(content.to_bytes(4, "little"), state)
            if position >= row.start:
                results.append(state)
        return results
