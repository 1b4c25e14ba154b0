"""From a plan to tensors."""

import torch

from minivllm import SamplingParams, attention
from minivllm.engine.step import PlanRow, StepPlan
from minivllm.worker.batch import build_batch, slot_mapping

CPU = torch.device("cpu")


def row(start, tokens, table, samples=True, write_start=None, seq_id=0):
    return PlanRow(seq_id, start, tokens, table, start if write_start is None else write_start, samples, SamplingParams(temperature=0), 0)


def test_slots_follow_the_block_table_across_a_boundary():
    assert slot_mapping(row(2, [7, 8, 9, 5], [6, 1]), block_size=4) == [26, 27, 4, 5]


def test_rows_lie_one_after_the_other():
    backend, _ = attention.select("auto", CPU)
    plan = StepPlan([row(0, [11, 12, 13], [5], samples=False, seq_id=0), row(6, [14], [2, 0], seq_id=1), row(4, [15, 16], [1, 3], seq_id=2)])
    batch = build_batch(plan, 4, backend, CPU)
    assert plan.num_tokens == 6
    assert batch.input_ids.tolist() == [11, 12, 13, 14, 15, 16]
    assert batch.positions.tolist() == [0, 1, 2, 6, 4, 5]
    assert batch.last_tokens.tolist() == [2, 3, 5]
    assert batch.sampling_rows == [1, 2]
    meta = batch.attention
    assert meta.slot_mapping.tolist() == [20, 21, 22, 2, 12, 13]
    assert meta.block_tables.tolist() == [[5, 0], [2, 0], [1, 3]]
    assert meta.context_lens.tolist() == [3, 7, 6]
    assert meta.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert meta.writes_all


def test_a_batch_that_samples_nothing_has_no_sampling():
    backend, _ = attention.select("auto", CPU)
    batch = build_batch(StepPlan([row(0, [1, 2], [0], samples=False)]), 4, backend, CPU)
    assert batch.sampling is None and batch.sampling_rows == []
