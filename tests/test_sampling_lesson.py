"""Notebook 08's parts: its exercises against independent rules, the planted fault, the plug, the measurements and the figures."""

import math

import pytest
import tiny_models
import torch

from minivllm import LLM, SamplingParams
from minivllm.teach import check, plug_sampling, sampling_bench, sampling_figures
from minivllm.teach.break_it import attempt
from minivllm.teach.bugs.sampling import by_column, draw, run_batch
from minivllm.teach.exercises import sampling
from minivllm.worker import filters


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.save("llama", path)
    with LLM(path, device="cpu", block_size=4, num_kv_blocks=32, max_model_len=64, max_num_seqs=4) as llm:
        yield llm


def drawn(seed, size=200, sharpness=2.0):
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * sharpness).softmax(0)


# --- top_p_keep -------------------------------------------------------------------------------------------------------------------

def by_counting(probabilities, p):
    """Add one token after the other, in fractions of Python's floats, until p is reached."""
    values, kept, total = probabilities.tolist(), [False] * len(probabilities), 0.0
    for index in sorted(range(len(values)), key=lambda i: (-values[i], i)):
        if total >= p and any(kept) and p < 1:
            break
        kept[index], total = True, total + values[index]
    return torch.tensor(kept)


@pytest.mark.parametrize("seed", range(20))
def test_top_p_keeps_what_counting_one_by_one_keeps(seed):
    probabilities = drawn(seed, 20 + 30 * seed)
    for p in (0.05, 0.3, 0.77, 0.95, 1.0):
        assert sampling.top_p_keep(probabilities, p).equal(by_counting(probabilities, p))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99])
def test_top_p_keeps_what_the_sampler_and_transformers_keep(seed, p):
    probabilities = drawn(seed)
    kept = sampling.top_p_keep(probabilities, p)
    assert kept.equal(filters._keep_top_p(probabilities.log()[None], torch.tensor([p]))[0].isfinite())
    warper = pytest.importorskip("transformers").TopPLogitsWarper(p)
    assert kept.equal(warper(None, probabilities.log()[None])[0].isfinite())


def test_other_right_ways_pass():
    def by_loop(probabilities, p):
        return by_counting(probabilities, p)

    def from_the_cut(probabilities, p):
        if p == 1:
            return probabilities >= 0
        values, order = torch.sort(probabilities, descending=True, stable=True)
        count = int((values.cumsum(0) < p).sum()) + 1
        mask = torch.zeros(len(probabilities), dtype=torch.bool)
        mask[order[:count]] = True
        return mask

    for function in (by_loop, from_the_cut):
        assert str(check.result("top_p_keep", function)) == "10 checks passed"


def test_the_repetition_penalty_is_that_of_transformers():
    processor = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor(1.3)
    logits, ids = drawn(1).log() + 4, [3, 5, 3, 17]
    assert torch.allclose(sampling.repetition_penalty(logits, ids, 1.3), processor(torch.tensor([ids]), logits[None].clone())[0])

    def by_loop(logits, token_ids, penalty):
        out = logits.tolist()
        for token in set(token_ids):
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        return torch.tensor(out)

    assert str(check.result("repetition_penalty", by_loop)) == "8 checks passed"


# --- the plug ---------------------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(top_p=0.6, seed=4, max_tokens=6, ignore_eos=True)


def plugged(tiny, function, capsys):
    plug_sampling.top_p_keep(function, tiny, [3, 1, 4, 1, 5], PARAMS)
    return capsys.readouterr().out


def test_the_right_function_gives_the_same_tokens(tiny, capsys):
    out = plugged(tiny, sampling.top_p_keep, capsys)
    assert "6 times" in out and "same tokens (6)" in out


def test_another_set_gives_other_tokens_and_leaves_the_sampler_alone(tiny, capsys):
    before = filters._keep_top_p
    assert "first difference" in plugged(tiny, lambda q, p: q == q.min(), capsys)
    assert filters._keep_top_p is before


@pytest.mark.parametrize("function, words", [
    (lambda q, p: 1 / 0, "raised ZeroDivisionError"),
    (lambda q, p: q * 1, "returned torch.float32"),
    (lambda q, p: q > 2, "keeps no token"),
    (lambda q, p: [True], "returned a list"),
    (lambda q, p: print(end=""), "is a `return` missing?"),
    (None, "not attempted yet"),
    (lambda q, p: None, "not attempted yet"),
])
def test_what_cannot_serve_the_engine_is_told_in_one_line(tiny, capsys, function, words):
    before = filters._keep_top_p
    out = plugged(tiny, function, capsys)
    assert words in out and len(out.splitlines()) == 1 and filters._keep_top_p is before


# --- break it ---------------------------------------------------------------------------------------------------------------------

def test_only_the_faulty_draw_knows_its_row():
    batch = [(3, 2), (7, 8), (9, 8)]
    alone = [run_batch(by_column, [request])[0][0] for request in batch]
    assert run_batch(by_column, batch)[0] == alone
    assert run_batch(draw, batch)[0] != alone and run_batch(draw, batch)[0][0] == alone[0]
    assert run_batch(draw, batch)[1] == [[0, 0], [1, 1] + [0] * 6, [2, 2] + [1] * 6]


@pytest.mark.parametrize("first, second, words", [
    ([(7, 6)], [(3, 6), (7, 6)], "exposed: "),
    ([(3, 2), (7, 8)], [(3, 8), (7, 8)], "exposed: "),  # it moves up in one of them
    ([(1, 6)], [(2, 6)], "no seed stands in both"),
    ([(7, 6)], [(7, 6), (3, 6)], "the same row in every step"),
    ([(7, 6), (3, 6)], [(9, 6), (3, 6)], "the same row in every step"),
    ([(7, 6), (7, 2)], [(7, 6)], "must differ from each other"),
    ([7, 6], [(7, 6)], "a request is (seed, max_tokens)"),
    ((7, 6), [(7, 6)], "a list of 1 to 6 requests"),
    ([(7, 0)], [(7, 6)], "max_tokens must be 1 to 16"),
    ([(7, 6)], None, "not attempted yet"),
])
def test_what_two_batches_show(first, second, words):
    assert words in attempt("noise_by_place", first=first, second=second)


# --- measurements and figures -----------------------------------------------------------------------------------------------------

def test_every_way_is_measured_on_any_device():
    found = sampling_bench.measure(3, 500, repeats=1)
    assert set(found) == set(sampling_bench.WAYS) and all(ms > 0 for ms in found.values())
    assert len(sampling_bench.lines(found)) == len(found)


def test_what_was_saved_has_every_way_in_the_shape_that_is_measured():
    found = sampling_bench.saved()
    assert set(found["milliseconds"]) == {*sampling_bench.WAYS, sampling_bench.SORTED}
    assert (found["rows"], found["vocab_size"]) == (sampling_bench.ROWS, sampling_bench.VOCAB)
    assert len(sampling_bench.saved_lines()) == 1 + len(found["milliseconds"])


def test_without_a_file_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sampling_bench, "FILE", tmp_path / "none.json")
    assert sampling_bench.saved_lines() == ["no figures of an H200 are saved beside this notebook yet"]


def test_figures_take_any_token():
    pytest.importorskip("matplotlib")
    odd = ["$x$", "\n", " a", "", "_^{"]
    values = [0.5, 0.3, 0.1, 0.0, 0.1]
    for drawn in (sampling_figures.kept(odd, {"one": values, "two": values}), sampling_figures.counts(odd, values, {"way": values}),
                  sampling_figures.text({"a line": list(zip(odd * 20, values * 20))})):
        assert drawn._repr_png_().startswith(b"\x89PNG")
    assert math.isclose(sum(values), 1)
