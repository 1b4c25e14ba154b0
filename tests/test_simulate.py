"""The simulator: step times by hand, nothing lost and nothing free, each mode as it says it is, and the H200 as far off as stated."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import doctor
from minivllm.__main__ import main
from minivllm.simulate import DEVICES, MODES, QWEN3_0_6B, Device, Request, StepWork, calibration, measured_lengths, poisson_requests
from minivllm.simulate import simulate, step_seconds
from minivllm.simulate.devices import Cost
from minivllm.simulate.runner import PaddedBatch

ROOT = Path(__file__).parent.parent
#: 2 layers of 16 (q) + 16 (o) + 16 (k, v) + 96 (mlp) weights and an output layer of 40: 656 bytes; 16 bytes of K/V a token.
TOY_MODEL = replace(QWEN3_0_6B, vocab_size=10, hidden_size=4, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2)
TOY = Device("toy", bandwidth=1000.0, flops=1e4, memory=1e4, read_efficiency=1.0, flops_efficiency=1.0, step_overhead=0.5,
             row_overhead=0.01)
APART = [mode for mode in MODES if mode in ("prefill_first", "chunked")]
STATIC = [mode for mode, how in MODES.items() if how.batches]


def toy_seconds(rows, kv_tokens):
    """A step of the toy that its bytes bound."""
    return (656 + 16 * kv_tokens) / 1000 + 0.5 + 0.01 * rows


def run(requests, mode="mixed", **options):
    """On the toy; and every plan of it."""
    plans = []

    def watch(engine):
        execute = engine.runner.execute
        engine.runner.execute = lambda plan: plans.append(plan) or execute(plan)

    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "num_kv_blocks": 100, "block_size": 4}
    return simulate(requests, TOY, mode, TOY_MODEL, on_start=watch, **{**defaults, **options}), plans


def test_a_step_takes_the_longer_of_bytes_and_flops_and_the_overheads():
    prompt = StepWork(tokens=3, kv_tokens=3, attended=6, samples=1, rows=1)
    assert Cost(TOY, TOY_MODEL).num_bytes(prompt) == 656 + 3 * 16
    assert Cost(TOY, TOY_MODEL).num_flops(prompt) == 2 * (3 * 288 + 40) + 4 * 2 * 2 * 2 * 6
    assert step_seconds(TOY, prompt, TOY_MODEL) == pytest.approx(0.704 + 0.5 + 0.01)
    slow = replace(TOY, flops=2000.0, flops_efficiency=0.5)
    assert step_seconds(slow, prompt, TOY_MODEL) == pytest.approx(2.0 + 0.5 + 0.01)
    assert step_seconds(replace(TOY, read_efficiency=0.5), replace(prompt, rows=7), TOY_MODEL) == pytest.approx(1.408 + 0.5 + 0.07)


def test_the_shape_of_qwen3_06b_is_the_facts():
    cost = Cost(DEVICES["H200"])
    assert cost.kv_bytes_per_token == 114_688
    assert cost.weight_bytes == 2 * (28 * 15_728_640 + 151_936 * 1024)
    assert Cost(DEVICES["T4"]).num_kv_blocks(16) == int((0.9 * 16e9 - cost.weight_bytes - 1e9) // (16 * 114_688))


def test_one_request_by_hand():
    result, _ = run([Request(2.0, 3, 3)])
    first, second, third = (toy_seconds(1, context) for context in (3, 4, 5))
    assert result.ttft == pytest.approx([first])
    assert result.latency == pytest.approx([first + second + third])
    assert result.tpot == pytest.approx([(second + third) / 2])
    assert result.longest_gap == pytest.approx([third])
    assert list(result.itl) == pytest.approx([second, third])
    assert result.seconds == pytest.approx(2.0 + first + second + third)
    assert result.throughput == pytest.approx(3 / result.seconds)
    assert [record[2:] for record in result.step_log] == [(3, 0, 0, 1, 0), (0, 1, 0, 1, 0), (0, 1, 0, 1, 0)]


@pytest.mark.parametrize("mode", STATIC)
def test_a_static_batch_is_padded_and_keeps_its_size_to_the_end(mode):
    result, _ = run([Request(0.0, 3, 1), Request(0.0, 5, 3), Request(0.1, 2, 1)], mode, max_num_seqs=2)
    steps = [toy_seconds(2, 10), toy_seconds(2, 12), toy_seconds(2, 14)]
    assert result.latency[:2] == pytest.approx([steps[0], sum(steps)])
    assert [record.padding for record in result.step_log[:3]] == [2, 1, 1]
    if mode == "static":
        assert result.ttft[2] == pytest.approx(sum(steps) - 0.1 + toy_seconds(1, 2))


def test_the_work_of_a_static_batch():
    batch = PaddedBatch(rows=2, prompt_tokens=5)
    assert batch.next_work() == StepWork(tokens=10, kv_tokens=10, attended=2 * (1 + 2 + 3 + 4 + 5), samples=2, rows=2)
    assert batch.next_work() == StepWork(tokens=2, kv_tokens=12, attended=12, samples=2, rows=2)
    assert batch.next_work().kv_tokens == 14


def test_wait_until_full_leaves_the_last_partial_batch_waiting():
    requests = [Request(float(i), 3, 4) for i in range(10)]
    result, _ = run(requests, "wait_until_full")
    assert (len(result.requests), result.unfinished, len(result.ttft)) == (8, 2, 8)
    assert result.step_log[0].time == 3.0  # when the fourth has come
    assert run(requests, "static")[0].unfinished == 0
    assert run(requests[:3], "wait_until_full")[0].summary()["unfinished"] == 3


@pytest.mark.parametrize("mode", STATIC)
def test_a_static_batch_reserves_blocks_for_its_longest(mode):
    result, plans = run([Request(0.0, 7, 9)] * 5, mode, num_kv_blocks=10)  # 4 blocks each and one of reserve: two at once
    assert len(plans[0].rows) == 2 and result.num_preemptions == 0
    assert result.unfinished == (1 if mode == "wait_until_full" else 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=9), st.sampled_from(list(MODES)),
       st.sampled_from([11, 14, 100]))
def test_nothing_is_lost_and_nothing_is_free(drawn, mode, num_kv_blocks):
    requests = [Request(*each) for each in drawn]
    result, plans = run(requests, mode, num_kv_blocks=num_kv_blocks)
    assert len(result.requests) + result.unfinished == len(requests)
    assert mode == "wait_until_full" or result.requests == sorted(requests, key=lambda request: request.arrival)
    computed = sum(request.prompt_tokens + request.output_tokens - 1 for request in result.requests)
    planned = sum(record.prefill_tokens + record.decode_tokens for record in result.step_log)
    assert planned == computed if result.num_preemptions == 0 else planned > computed
    assert len(result.itl) == sum(request.output_tokens - 1 for request in result.requests)
    assert sum(row.samples for plan in plans for row in plan.rows) == result.output_tokens
    ends = [record.time + record.seconds for record in result.step_log]
    assert all(end <= record.time + 1e-9 for end, record in zip(ends, result.step_log[1:]))
    assert result.num_steps == len(plans) == len(ends) and result.seconds == (ends[-1] if ends else 0.0)
    for request, ttft, latency, gap in zip(result.requests, result.ttft, result.latency, result.longest_gap):
        n = request.prompt_tokens
        alone = step_seconds(TOY, StepWork(n, n, n * (n + 1) // 2, 1, 1), TOY_MODEL)
        assert ttft >= alone - 1e-9 and latency >= ttft + gap - 1e-9


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in STATIC])
def test_a_pool_too_small_for_all_preempts_and_still_finishes(mode):
    result, _ = run([Request(0.0, 8, 20)] * 6, mode, num_kv_blocks=12)
    assert result.num_preemptions > 0 and len(result.requests) == 6


@pytest.mark.parametrize("mode", APART)
def test_prompts_and_decodes_never_share_a_step(mode):
    result, plans = run([Request(0.7 * i, 5 + 3 * i % 7, 6) for i in range(12)], mode)
    assert not any(record.prefill_tokens and record.decode_tokens for record in result.step_log)
    if mode == "prefill_first":
        assert all(row.samples for plan in plans for row in plan.rows)  # no prompt is cut
    else:
        assert max(plan.num_tokens for plan in plans) <= 8 and not all(row.samples for plan in plans for row in plan.rows)


def test_chunks_and_decodes_take_turns():
    result, _ = run([Request(0.0, 2, 8), Request(0.1, 40, 2)], "chunked")
    kinds = "".join("p" if record.prefill_tokens else "d" for record in result.step_log)
    assert kinds == "p" + "dp" * 5 + "d" * 2  # five chunks of 8; the prompt's end samples, then one decode of both and one more


def test_continuous_cuts_no_prompt_and_mixed_keeps_to_the_budget():
    requests = [Request(0.2 * i, 20, 6) for i in range(6)]
    _, whole = run(requests, "continuous")
    assert all(row.samples for plan in whole for row in plan.rows)
    result, cut = run(requests, "mixed")
    assert max(plan.num_tokens for plan in cut) == 8
    assert any(record.prefill_tokens and record.decode_tokens for record in result.step_log)


def test_continuous_gets_more_done_than_static():
    requests = poisson_requests(60, math.inf, prompt=(3, 9), output=(1, 30))
    static, continuous = (run(requests, mode)[0] for mode in ("static", "continuous"))
    assert continuous.throughput > 1.2 * static.throughput and continuous.num_steps < static.num_steps / 1.2


def test_what_each_mode_is_for():
    """Long prompts among running answers: whom each mode makes wait, on the predicted T4."""
    requests = poisson_requests(80, 3, prompt=(200, 4000), output=(50, 100))
    results = {mode: simulate(requests, "T4", mode, max_num_batched_tokens=512) for mode in MODES}
    median = {mode: result.summary() for mode, result in results.items()}
    assert median["continuous"]["latency_median"] < median["static"]["latency_median"]
    assert median["continuous"]["ttft_median"] < median["static"]["ttft_median"]
    gaps = [median[mode]["longest_gap_p95"] for mode in ("mixed", "chunked", "continuous", "prefill_first")]
    assert gaps == sorted(gaps) and gaps[-1] > 4 * gaps[0]
    assert median["prefill_first"]["ttft_median"] < median["mixed"]["ttft_median"]
    assert "T4 (predicted)" == results["mixed"].device


def test_the_same_seed_gives_the_same_result_and_another_another():
    def twice(seed):
        return simulate(poisson_requests(40, 10, seed), "L4", max_num_seqs=8)

    assert twice(1) == twice(1)
    assert twice(1).ttft != twice(2).ttft


def test_poisson_requests():
    requests = poisson_requests(4000, 5, seed=3, prompt=(2, 4), output=(7, 7))
    gaps = [b.arrival - a.arrival for a, b in zip(requests, requests[1:])]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 5, rel=0.05)
    assert sum(gap > 1 / 5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.05)
    assert {request.prompt_tokens for request in requests} == {2, 3, 4} and {request.output_tokens for request in requests} == {7}
    assert {request.arrival for request in poisson_requests(3, math.inf)} == {0.0}
    real = measured_lengths()
    assert {request[1:] for request in poisson_requests(2000, 5, lengths=real)} == set(real)


@pytest.mark.parametrize("call, message", [
    (lambda: simulate([Request(0, 1, 1)], "T5"), "T5.*T4, L4, A100, H200"),
    (lambda: simulate([Request(0, 1, 1)], mode="dynamic"), "dynamic.*static.*mixed"),
    (lambda: simulate([]), "no requests"),
    (lambda: run([Request(0, 30, 30)], num_kv_blocks=14), "num_kv_blocks"),
    (lambda: simulate([Request(0, 1, 1)], "T4", model=replace(QWEN3_0_6B, num_layers=2000)), "T4.*smaller model"),
    (lambda: poisson_requests(0, 1), "num \\(0\\)"),
    (lambda: poisson_requests(1, 0), "rate \\(0\\)"),
    (lambda: poisson_requests(1, 1, output=(0, 3)), "output \\(0, 3\\)"),
])
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture(scope="module")
def figures():
    return [(figure, calibration.works(figure)) for figure in calibration.measured()]


@pytest.fixture(scope="module")
def raw():
    return json.loads((ROOT / "benchmarks" / "h200" / "simulation.json").read_text())


def test_the_calibrated_h200_is_as_far_off_as_stated(figures):
    errors = calibration.errors(figures, DEVICES["H200"])
    assert max(map(abs, errors)) <= calibration.STATED_ERROR
    assert [figure.fitted for figure, _ in figures].count(False) == 1
    assert max(map(abs, errors)) > calibration.STATED_ERROR / 2, "the stated error is larger than it need be"


def test_the_overheads_are_what_the_fit_gives(figures):
    device = DEVICES["H200"]
    fitted = calibration.fit([each for each in figures if each[0].fitted], device)
    assert fitted == pytest.approx((device.step_overhead, device.row_overhead), rel=0.02)
    assert [name for name, each in DEVICES.items() if each.calibrated] == ["H200"]


def test_the_measured_figures_are_the_raw_ones(figures, raw):
    rates = [sum(each) / len(each) for each in raw["batches"]["tokens_per_second"].values()]
    rates.append(raw["benchmark"]["output_tokens"] / sorted(raw["benchmark"]["seconds"])[1])
    assert [figure.tokens_per_second for figure, _ in figures] == pytest.approx(rates, rel=1e-5)


def test_without_overheads_it_is_the_limit_that_was_measured_with_the_real_engine(figures, raw):
    machine = raw["benchmark"]["machine"]
    ideal = replace(DEVICES["H200"], bandwidth=machine["read_bandwidth"], flops=machine["matmul_flops"], read_efficiency=1.0,
                    flops_efficiency=1.0, step_overhead=0.0, row_overhead=0.0)
    seconds = sum(map(Cost(ideal).seconds, figures[-1][1]))
    assert seconds == pytest.approx(raw["benchmark"]["limit_seconds"], rel=0.01)
    assert DEVICES["H200"].read_efficiency == pytest.approx(machine["read_bandwidth"] / 4800e9, abs=0.002)


def test_the_bandwidths_are_those_that_doctor_tells():
    assert {name.split()[0]: value for name, value in doctor.BANDWIDTH.items()} == {name: each.bandwidth for name, each in DEVICES.items()}


def test_the_command_prints_every_mode_and_saves_the_figures(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert main([*"bench simulate --device L4 --num-requests 70 --rate 50 --output-len 2 20 --output".split(), str(file)]) == 0
    printed = capsys.readouterr().out
    saved = json.loads(file.read_text())
    assert list(saved["modes"]) == list(MODES) and saved["modes"]["wait_until_full"]["unfinished"] == 6
    assert all(f"\n  {mode} " in printed for mode in MODES) and "L4 (predicted)" in printed


def test_the_command_prints_the_calibration(capsys, monkeypatch):
    monkeypatch.setattr(calibration, "measured", lambda: [calibration.Measured("two", 900.0, (Request(0.0, 5, 4),) * 2, False)])
    assert main(["bench", "simulate", "--calibration"]) == 0
    printed = capsys.readouterr().out
    assert "two" in printed and "held out" in printed and "predicted: T4, L4, A100" in printed
