"""The learner's function in the real model: the same tokens from a right one, and one clear line for any other."""

import math

import pytest
import torch
from test_check import append_in_one_index, stub
from test_stub import above, keeps_it

import tiny_models
from minivllm import LLM, SamplingParams
from minivllm.teach import plug
from minivllm.teach.exercises import attention, kv_cache

PROMPT = [5, 17, 40, 8, 33, 62, 11]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def tiny(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save(request.param, directory)
    with pytest.warns(UserWarning, match="max_model_len"):
        llm = LLM(directory, num_kv_blocks=8, block_size=4, max_num_batched_tokens=5, max_num_seqs=2, device="cpu")
    yield llm
    llm.close()


def answer(llm):
    return llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]["token_ids"]


def test_a_right_function_gives_the_same_tokens(tiny, capsys):
    plug.attention(attention._attend, tiny, PROMPT, max_tokens=8)
    plug.kv_append(append_in_one_index, tiny, PROMPT, max_tokens=8)
    assert capsys.readouterr().out.count("same tokens (") == 2


@pytest.mark.parametrize("wrong", [attention._wrong(mask=None), attention._wrong(spread=lambda x, groups: x.repeat(1, groups, 1)),
                                   attention._wrong(mask=lambda q, k: torch.ones(q, k).bool().tril())])
def test_a_wrong_function_gives_other_tokens_and_the_first_is_named(tiny, capsys, wrong):
    plug.attention(wrong, tiny, PROMPT, max_tokens=8)
    assert "first difference: token " in capsys.readouterr().out


def test_the_llm_is_left_as_it_was(tiny):
    before = answer(tiny)
    pool, backend, stats = tiny.runner.pool, tiny.runner.backend, repr(tiny.stats)
    cache, published = pool.cache.clone(), dict(tiny.engine.blocks.cached_blocks)
    for function in (attention._attend, lambda q, k, v: q * 0, stub, lambda q, k, v: 1 / 0, lambda q, k, v: q * math.nan):
        plug.attention(function, tiny, PROMPT, max_tokens=8)
    assert tiny.runner.pool is pool and tiny.runner.backend is backend and torch.equal(pool.cache, cache)
    assert repr(tiny.stats) == stats and dict(tiny.engine.blocks.cached_blocks) == published
    assert answer(tiny) == before


def test_the_graphs_of_the_llm_are_left_alone(tiny, monkeypatch):
    """They hold the LLM's own attention and pool: a step through them would pass the learner's function by."""
    graphs, calls = object(), []
    monkeypatch.setattr(tiny.runner, "graphs", graphs)  # any use of it fails

    def function(q, k, v):
        calls.append(len(q))
        return attention._attend(q, k, v)

    plug.run_with_attention(tiny, function, PROMPT, 4)
    assert 1 in calls and tiny.runner.graphs is graphs


def prints_nothing(q, k, v):
    print(end="")


@pytest.mark.parametrize("function, words", [
    (stub, "not attempted yet"), (lambda *args: None, "not attempted yet"), (..., "not attempted yet"),
    (lambda q, k, v: 1 / 0, "your function raised ZeroDivisionError: division by zero (it was given q ["),
    (lambda q, k, v: q[0], "the model needs torch.float32 ["), (lambda q, k, v: 3, "returned an int, the model needs a tensor"),
    (lambda q, k, v: q * math.nan, "is not finite"),
    (keeps_it, "your function returned None: is a `return` missing? (it was given q ["), (prints_nothing, "`return` hands it back"),
    (above, "not attempted yet: the line `raise NotImplementedError` is still reached, delete it"),
])
def test_what_a_function_does_wrong_is_one_line(tiny, capsys, function, words):
    plug.attention(function, tiny, PROMPT, max_tokens=8)
    out = capsys.readouterr().out
    assert words in out and out.count("\n") == 1


@pytest.mark.parametrize("function, words", [(stub, "not attempted yet"),
                                             (lambda cache, length, k, v: length, "the model needs the new length"),
                                             (kv_cache._new_tensor, "first difference"), (kv_cache._at_length_minus_1, "first difference")])
def test_a_wrong_append_is_told(tiny, capsys, function, words):
    plug.kv_append(function, tiny, PROMPT, max_tokens=8)
    assert words in capsys.readouterr().out


def test_run_with_attention_returns_tokens_and_raises(tiny):
    assert plug.run_with_attention(tiny, attention._attend, PROMPT, 8) == answer(tiny)[:8]
    with pytest.raises(NotImplementedError):
        plug.run_with_attention(tiny, stub, PROMPT, 8)
    with pytest.raises(plug.PlugError, match="your function raised IndexError"):
        plug.run_with_attention(tiny, lambda q, k, v: q[99], PROMPT, 8)


@pytest.mark.slow
def test_the_embedded_model_speaks_through_the_learners_functions(embedded, capsys):
    plug.attention(attention._attend, embedded, "The capital of France is", max_tokens=6)
    plug.kv_append(append_in_one_index, embedded, "The capital of France is", max_tokens=6)
    out = capsys.readouterr().out
    assert out.count("Paris") == 4 and out.count("same tokens (6)") == 2


@pytest.mark.slow
def test_a_model_may_be_given_by_name(capsys):
    plug.attention(attention._attend, "smollm2", "The capital of France is", max_tokens=2)
    assert "same tokens (2)" in capsys.readouterr().out
