"""A table of bad input: each case a clear error or a documented result, and the engine answers as before."""

import numpy as np
import pytest
import tiny_models

from minivllm import LLM, SamplingParams
from minivllm.engine.invariants import check_scheduler

NAN, INF = float("nan"), float("inf")

#: What is wrong, how it is said.
PARAMETERS = [
    (dict(temperature=-0.1), ValueError, "temperature.*-0.1"), (dict(temperature=NAN), ValueError, "temperature"), (dict(temperature=INF), ValueError, "temperature"),
    (dict(temperature="1"), TypeError, "temperature"), (dict(temperature=None), TypeError, "temperature"), (dict(temperature=True), TypeError, "temperature"),
    (dict(temperature=10**400), ValueError, "temperature"), (dict(top_k=-2), ValueError, "top_k.*-2"), (dict(top_k=1.5), TypeError, "top_k"),
    (dict(top_k="5"), TypeError, "top_k"), (dict(top_k=None), TypeError, "top_k"), (dict(top_p=0), ValueError, "top_p"), (dict(top_p=1.01), ValueError, "top_p.*1.01"),
    (dict(top_p=NAN), ValueError, "top_p"), (dict(top_p=-INF), ValueError, "top_p"), (dict(top_p=[0.5]), TypeError, "top_p"), (dict(seed=-1), ValueError, "seed"),
    (dict(seed=2**64), ValueError, "seed"), (dict(seed=0.5), TypeError, "seed"), (dict(seed=True), TypeError, "seed"), (dict(max_tokens=0), ValueError, "max_tokens"),
    (dict(max_tokens=-5), ValueError, "max_tokens.*-5"), (dict(max_tokens=2.0), TypeError, "max_tokens"), (dict(max_tokens="many"), TypeError, "max_tokens"),
    (dict(stop=""), ValueError, "stop"), (dict(stop=["a", ""]), ValueError, "stop"), (dict(stop=5), TypeError, "stop"), (dict(stop=["a", 5]), TypeError, "stop"),
    (dict(stop=b"a"), TypeError, "stop"), (dict(stop_token_ids=5), TypeError, "stop_token_ids"), (dict(stop_token_ids=[-1]), ValueError, "stop_token_ids"),
    (dict(stop_token_ids=["2"]), TypeError, "stop_token_ids"), (dict(stop_token_ids=[1.0]), TypeError, "stop_token_ids"), (dict(ignore_eos=1), TypeError, "ignore_eos"),
    (dict(ignore_eos=None), TypeError, "ignore_eos"), (dict(temprature=1), TypeError, "did you mean 'temperature'"), (dict(max_token=1), TypeError, "did you mean 'max_tokens'"),
    (dict(topk=1), TypeError, "did you mean 'top_k'"), (dict(quality="best"), TypeError, "no keyword 'quality'"),
]

PROMPTS = [
    ("", ValueError, "empty"), ([[]], ValueError, "empty"), (["good", ""], ValueError, "empty"), ([[1, 49152]], ValueError, "49152"), ([[-1, 1]], ValueError, "-1"),
    ([[2**63]], ValueError, "outside"), ([[10**100]], ValueError, "outside"), ([[1, None]], TypeError, "ints only"), ([[1, "2"]], TypeError, "ints only"),
    ([[1, 2.0]], TypeError, "ints only"), ([[1, NAN]], TypeError, "ints only"), ([[True]], TypeError, "ints only"), ([[[1]]], TypeError, "ints only"),
    ([np.array([1.5])], TypeError, "ints only"), ([np.array([[1, 2]])], TypeError, "ints only"), ([np.array([], dtype=int)], ValueError, "empty"),
    (b"abc", TypeError, "text or a list"), ([bytearray(b"abc")], TypeError, "text or a list"), ([None], TypeError, "text or a list"), (None, TypeError, "prompts must be"),
    (5, TypeError, "prompts must be"), ([5.5], TypeError, "text or a list"), (["good", 5.5], TypeError, "text or a list"), ({"promt": "x"}, TypeError, "did you mean 'prompt'"),
    ({}, ValueError, "empty"), ({"prompt": ""}, ValueError, "empty"), ({"prompt_token_ids": []}, ValueError, "empty"), ("\ud800", ValueError, "surrogate at position 0"),
    (["ok", "a\udfffb"], ValueError, "surrogate at position 1"), ([[1] * 256], ValueError, "256 tokens and max_model_len is 256"),
    (["word " * 5000], ValueError, "max_model_len is 256"), ([{1, "a"}], TypeError, "ints only"), ([{"prompt_token_ids": "abc"}], None, None),
]

SETTINGS = [
    (dict(max_model_len=10**6), ValueError, "max_model_len"), (dict(max_model_len=1), ValueError, "max_model_len"), (dict(max_model_len=200, num_kv_blocks=8), ValueError, "does not fit"),
    (dict(num_kv_blocks=0), ValueError, "num_kv_blocks"), (dict(num_kv_blocks=1, block_size=1), ValueError, "not even"), (dict(block_size=-16), ValueError, "block_size"),
    (dict(block_size=16.0), TypeError, "block_size"), (dict(gpu_memory_utilization=0), ValueError, "gpu_memory_utilization"),
    (dict(gpu_memory_utilization=1.1), ValueError, "gpu_memory_utilization"), (dict(gpu_memory_utilization=NAN), ValueError, "gpu_memory_utilization"),
    (dict(max_num_seqs=0), ValueError, "max_num_seqs"), (dict(max_num_seqs=8, max_num_batched_tokens=4), ValueError, "below max_num_seqs"),
    (dict(max_num_batched_tokens="big"), TypeError, "max_num_batched_tokens"), (dict(max_num_queued_requests=0), ValueError, "max_num_queued_requests"),
    (dict(dtype="fp16"), ValueError, "dtype.*fp16"), (dict(dtype=16), TypeError, "dtype"), (dict(device="gpu"), ValueError, "gpu"), (dict(device="cuda:77"), ValueError, "cuda:77"),
    (dict(device="meta"), ValueError, "meta"), (dict(attention_backend="flash"), ValueError, "flash"), (dict(tensor_parallel_size=5), ValueError, "tensor_parallel_size 5 does not divide"),
    (dict(tensor_parallel_size=0), ValueError, "tensor_parallel_size"), (dict(enforce_eager="yes"), TypeError, "enforce_eager"), (dict(seed=-1), ValueError, "seed"),
    (dict(policy="best"), ValueError, "policy"), (dict(load_format="quick"), ValueError, "load_format"), (dict(enforce_eagr=True), TypeError, "did you mean 'enforce_eager'"),
    (dict(gpu_memory_utilisation=0.5), TypeError, "did you mean 'gpu_memory_utilization'"), (dict(num_kvcache_blocks=4, num_kv_blocks=4), TypeError, "both"),
    (dict(model=""), TypeError, "model"), (dict(model=7), TypeError, "model"), (dict(model="no/such/place"), FileNotFoundError, "no/such/place"),
]


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2", device="cpu", num_kv_blocks=64, block_size=4, max_model_len=256) as llm:
        yield llm
        if answer(llm) != " Paris.":  # after all that was refused, once: it takes longer than a case
            pytest.fail("the engine no longer answers as it should")


def answer(llm):
    return llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)[0]["text"]


def demand_whole(llm):
    check_scheduler(llm.engine.scheduler)
    if llm.engine.has_unfinished_requests() or llm.engine.blocks.num_used_blocks:
        pytest.fail("something was left behind")


def number(cases):
    return [f"{i}-{case[2]}" for i, case in enumerate(cases)]


def test_there_are_enough_cases():
    if len(PARAMETERS) + len(PROMPTS) + len(SETTINGS) < 60:
        pytest.fail("fewer than 60 cases")


@pytest.mark.parametrize("fields, error, match", PARAMETERS, ids=number(PARAMETERS))
def test_bad_parameters(fields, error, match):
    with pytest.raises(error, match=match):
        SamplingParams(**fields)


@pytest.mark.parametrize("prompts, error, match", PROMPTS, ids=number(PROMPTS))
def test_bad_prompts(llm, prompts, error, match):
    params = SamplingParams(temperature=0, max_tokens=2)
    if error is None:  # a text in the place of token ids is a text
        llm.generate(prompts, params, use_tqdm=False)
    else:
        with pytest.raises(error, match=match):
            llm.generate(prompts, params, use_tqdm=False)
    demand_whole(llm)


@pytest.mark.parametrize("settings, error, match", SETTINGS, ids=number(SETTINGS))
def test_bad_settings(settings, error, match, tmp_path):
    tiny_models.save("llama", tmp_path)
    with pytest.raises(error, match=match):
        LLM(**{"model": tmp_path, "device": "cpu", **settings})


@pytest.mark.parametrize("length", [1, 255])
def test_the_shortest_and_the_longest_prompt_are_good(llm, length):
    [output] = llm.generate([[504] * length], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    if len(output["token_ids"]) != 1 or output["finish_reason"] != "length":
        pytest.fail(str(output))
    demand_whole(llm)
