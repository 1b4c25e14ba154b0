"""The floors of top_k, top_p and min_p: kernel and torch against the definitions in float64, and the draws above them."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minivllm.engine.step import PlanRow
from minivllm.kernels import floors as floors_module
from minivllm.kernels.floors import row_floors_torch, row_floors_triton
from minivllm.kernels.jit import INTERPRETED
from minivllm.kernels.sample import sample_tokens_torch, sample_tokens_triton
from minivllm.sampling_params import SamplingParams
from minivllm.worker import filters
from minivllm.worker.sampler import SamplingBatch, sample

RUNS = [pytest.param(row_floors_torch, "cpu", id="torch"),
        pytest.param(row_floors_triton, "cpu", id="interpreter", marks=pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 is not set")),
        pytest.param(row_floors_torch, "cuda", id="torch on a GPU", marks=pytest.mark.gpu),
        pytest.param(row_floors_triton, "cuda", id="kernel", marks=pytest.mark.gpu)]


def assert_is_the_floor(logits, floor, temperature, top_k, top_p, min_p):
    """`logits` of one row, in float64: what is kept has each filter's amount, and without the floor's own ties it would not."""
    logits = logits.double()
    kept, above = logits >= floor, logits > floor
    assert kept[logits.argmax()], "the best is always kept"
    scores = (logits - logits.max()) / (temperature or 1.0)
    weights, slack = scores.exp(), 1e-4  # of sums in float32
    order = scores.sort(descending=True).values
    allowed = scores >= order[top_k - 1] if 0 < top_k < len(scores) else torch.ones_like(kept)
    tight = []
    assert not (kept & ~allowed).any(), "top_k leaves these out"
    tight.append(bool((allowed & ~kept).sum() == 0))
    if top_p < 1:
        whole = weights[allowed].sum()
        assert weights[above].sum() < top_p * whole + slack or not above.any(), "top_p needs less"
        tight.append(bool(weights[kept].sum() >= top_p * whole - slack))
    if min_p > 0:
        assert scores[kept].min() >= math.log(min_p) - slack * max(1.0, -math.log(min_p)), "less likely than min_p allows"
        tight.append(bool((weights[~kept] < min_p * (1 + slack)).all()))
    assert any(tight), "a filter leaves out more than any of them asks for"


def column(values, dtype, device):
    return torch.tensor(values, dtype=dtype, device=device)


def floors_of(run, logits, rows, device):
    """rows: (temperature, top_k, top_p, min_p) each."""
    temperatures, top_ks, top_ps, min_ps = zip(*rows)
    return run(logits.to(device), column(temperatures, torch.float32, device), column(top_ks, torch.int64, device) if any(top_ks) else None,
               column(top_ps, torch.float32, device) if min(top_ps) < 1 else None,
               column(min_ps, torch.float32, device) if any(min_ps) else None).cpu()


ROWS = [(1.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 0, 1.0, 0.05), (1.0, 40, 0.8, 0.0), (2.0, 3, 0.99, 0.2),
        (0.0, 4, 0.95, 0.0), (1.0, 0, 1e-50, 0.0), (1e-30, 0, 0.3, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 10**6, 0.999, 1e-4), (1.0, 0, 1.0, 1.0)]


@pytest.mark.parametrize("run, device", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 150, 5000])
def test_a_floor_keeps_what_the_filters_ask_for_and_no_more(run, device, dtype, size, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(floors_module, "_COLUMNS", 64 if size < 1000 else 2048)  # so that a row takes several turns
    logits = (4 * torch.randn(len(ROWS), size, generator=torch.Generator().manual_seed(size))).to(dtype)  # in 16 bit with ties
    for index, floor in enumerate(floors_of(run, logits, ROWS, device).tolist()):
        assert_is_the_floor(logits[index], floor, *ROWS[index])


@pytest.mark.parametrize("run, device", RUNS)
def test_ties_at_the_floor_are_kept(run, device):
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for row in ((1.0, 2, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 1.0, math.exp(-1) - 1e-6)):
        assert 0.0 < floors_of(run, logits, [row], device).item() <= 1.0


@pytest.mark.parametrize("run, device", RUNS)
def test_the_best_alone_and_nothing_between_it_and_the_next(run, device):
    logits = torch.tensor([[2.0, 1.9921875, 1.0]], dtype=torch.bfloat16)  # neighbours
    assert floors_of(run, logits, [(1.0, 1, 1.0, 0.0)], device).item() == 2.0


@pytest.mark.parametrize("run, device", RUNS)
def test_rows_that_are_not_finite_end_and_leave_the_others(run, device):
    logits = torch.randn(4, 300)
    want = floors_of(run, logits, [(1.0, 20, 0.5, 0.1)] * 4, device)[3]
    logits[0, 7], logits[1, 299], logits[2] = math.nan, math.inf, -math.inf
    assert floors_of(run, logits, [(1.0, 20, 0.5, 0.1)] * 4, device)[3] == want


@pytest.mark.parametrize("run, device", RUNS)
def test_what_is_forbidden_stays_so(run, device):
    logits = torch.randn(1, 100)
    logits[0, 3:] = -math.inf
    assert floors_of(run, logits, [(1.0, 20, 1.0, 0.0)], device).item() <= logits[0, :3].min()
    assert floors_of(run, logits, [(1.0, 20, 0.9999999, 0.0)], device).item() == logits[0, :3].min()


NEIGHBOURS = [1.0, 1.0, 2.0, 0.0, 1.0 - 2**-24]  # the last is not one of the two largest; but less 2.0, the best, it is rounded to -1.0, as 1.0 is


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40), st.sampled_from([0.3, 1.0, 2.0]), st.integers(0, 41),
       st.floats(0.01, 1.0), st.sampled_from([0.0, 0.01, 0.5]))
@example(NEIGHBOURS, 0.3, 2, 1.0, 0.0)
def test_any_row_has_its_floor(values, temperature, top_k, top_p, min_p):
    logits = torch.tensor([values])
    row = (temperature, top_k, top_p, min_p)
    with mock.patch.object(floors_module, "_COLUMNS", 16):  # no more than there are, or the interpreter counts nothing for long; so several turns
        for run in (row_floors_torch, row_floors_triton) if INTERPRETED else (row_floors_torch,):
            assert_is_the_floor(logits[0], floors_of(run, logits, [row], "cpu").item(), *row)


@pytest.mark.parametrize("run, device", [pytest.param(sample_tokens_torch, "cpu", id="torch"),
                                         pytest.param(sample_tokens_triton, "cpu", id="interpreter", marks=pytest.mark.skipif(
                                             not INTERPRETED, reason="TRITON_INTERPRET=1 is not set")),
                                         pytest.param(sample_tokens_triton, "cuda", id="kernel", marks=pytest.mark.gpu)])
def test_nothing_below_its_floor_is_drawn(run, device):
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(1)).expand(64, -1).contiguous().to(device)
    temperatures, seeds, at = column([1.0] * 63 + [0.0], torch.float32, device), torch.arange(64, device=device), torch.arange(64, device=device) // 2
    floors = logits.sort(descending=True).values[:, 4].clone()
    floors[0] = -math.inf
    masked = logits.masked_fill(logits < floors[:, None], -math.inf)
    got = run(logits, temperatures, seeds, at, floors)
    assert torch.equal(got, run(masked, temperatures, seeds, at))
    assert len(set(got[1:].tolist())) == 5 and got[63] == logits[63].argmax()


def test_the_filters_keep_what_the_floors_keep():
    logits = 3 * torch.randn(40, 500, generator=torch.Generator().manual_seed(2))
    logits = (2 * logits).round() / 2  # ties
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t in (0.7, 1.5) for k in (0, 1, 9, 60, 600) for p in (0.4, 1.0) for m in (0.0, 0.1)]
    batch = SamplingBatch.of([PlanRow(i, 6, [0], [0], 0, True, p, i) for i, p in enumerate(params)], torch.device("cpu"))
    floors = row_floors_torch(logits, batch.temperatures, batch.top_ks, batch.top_ps, batch.min_ps)
    assert torch.equal(filters.processed(logits, batch).isfinite(), logits >= floors[:, None])


def test_neighbours_stay_apart_at_any_temperature():
    logits, params = torch.tensor([NEIGHBOURS] * 3), [SamplingParams(temperature=t, top_k=2) for t in (1e-3, 0.3, 7.0)]
    batch = SamplingBatch.of([PlanRow(i, 6, [0], [0], 0, True, p, i) for i, p in enumerate(params)], torch.device("cpu"))
    assert filters.processed(logits, batch).isfinite().tolist() == 3 * [[True, True, True, False, False]]


@pytest.mark.gpu
def test_a_gpu_draws_with_filters_what_torch_draws():
    """The kernels' way, all rows at once, against the filters written out: the same tokens, but where rounding decides."""
    logits = (4 * torch.randn(100, 20_000, generator=torch.Generator().manual_seed(3))).cuda()
    params = [SamplingParams(temperature=0.9, top_k=k, top_p=p, min_p=m) for k in (0, 1, 50, 300) for p in (0.3, 0.95, 1.0) for m in (0.0, 0.02)] * 4
    params += [SamplingParams(temperature=0)] * 2 + [SamplingParams()] * 2
    batch = SamplingBatch.of([PlanRow(i, 6, [0], [0], 0, True, p, 50 + i) for i, p in enumerate(params)], torch.device("cuda"))
    assert filters.floors_of(logits, batch) is not None
    fast = sample(logits, batch)
    with filters.filters_in_torch():
        assert filters.floors_of(logits, batch) is None
        assert (fast == sample(logits, batch)).float().mean() > 0.98
    assert filters.floors_of(logits, batch) is not None
