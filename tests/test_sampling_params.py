"""SamplingParams: what is accepted, and what is said about the rest."""

import dataclasses
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from minivllm.sampling_params import SamplingParams


def message(error, **fields):
    with pytest.raises(error) as caught:
        SamplingParams(**fields)
    return str(caught.value)


def test_defaults_are_vllms_but_for_max_tokens():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.seed, params.max_tokens) == (1.0, 0, 1.0, None, 64)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.greedy) == ((), (), False, False)
    assert (params.min_p, params.presence_penalty, params.frequency_penalty, params.repetition_penalty, params.min_tokens) == (0, 0, 0, 1, 0)
    assert (params.logit_bias, params.allowed_token_ids, params.logprobs, params.prompt_logprobs, params.n) == ((), None, None, None, 1)
    assert not params.filters and not params.edits_logits and not params.has_options


@pytest.mark.parametrize("fields, want", [
    ({"temperature": -0.1}, "SamplingParams.temperature must be 0 (greedy) or more, got -0.1"),
    ({"temperature": float("nan")}, "SamplingParams.temperature must be a finite number, got nan"),
    ({"temperature": float("inf")}, "SamplingParams.temperature must be a finite number, got inf"),
    ({"temperature": -float("inf")}, "SamplingParams.temperature must be a finite number, got -inf"),
    ({"top_p": 0}, "SamplingParams.top_p must be above 0 and at most 1, got 0.0"),
    ({"top_p": -0.5}, "SamplingParams.top_p must be above 0 and at most 1, got -0.5"),
    ({"top_p": 1.01}, "SamplingParams.top_p must be above 0 and at most 1, got 1.01"),
    ({"top_p": float("nan")}, "SamplingParams.top_p must be a finite number, got nan"),
    ({"top_k": -2}, "SamplingParams.top_k must be at least -1, got -2"),
    ({"seed": -1}, "SamplingParams.seed must be between 0 and 18446744073709551615, got -1"),
    ({"seed": 2**64}, "SamplingParams.seed must be between 0 and 18446744073709551615, got 18446744073709551616"),
    ({"max_tokens": 0}, "SamplingParams.max_tokens must be at least 1, got 0"),
    ({"stop_token_ids": [3, -1]}, "SamplingParams.stop_token_ids must be at least 0, got -1"),
    ({"min_p": -0.1}, "SamplingParams.min_p must be between 0 and 1, got -0.1"),
    ({"min_p": 1.1}, "SamplingParams.min_p must be between 0 and 1, got 1.1"),
    ({"presence_penalty": 2.5}, "SamplingParams.presence_penalty must be between -2 and 2, got 2.5"),
    ({"frequency_penalty": -3}, "SamplingParams.frequency_penalty must be between -2 and 2, got -3.0"),
    ({"frequency_penalty": float("nan")}, "SamplingParams.frequency_penalty must be a finite number, got nan"),
    ({"repetition_penalty": 0}, "SamplingParams.repetition_penalty must be above 0 (1 changes nothing), got 0.0"),
    ({"repetition_penalty": -1}, "SamplingParams.repetition_penalty must be above 0 (1 changes nothing), got -1.0"),
    ({"logit_bias": {3: 101}}, "SamplingParams.logit_bias[3] must be between -100 and 100, got 101.0"),
    ({"logit_bias": {-3: 1}}, "SamplingParams.logit_bias must be at least 0, got -3"),
    ({"logit_bias": {3: float("-inf")}}, "SamplingParams.logit_bias[3] must be a finite number, got -inf"),
    ({"allowed_token_ids": []}, "SamplingParams.allowed_token_ids is empty, so no token could be chosen: leave it out to allow all"),
    ({"allowed_token_ids": [-1]}, "SamplingParams.allowed_token_ids must be at least 0, got -1"),
    ({"min_tokens": -1}, "SamplingParams.min_tokens must be at least 0, got -1"),
    ({"min_tokens": 65}, "SamplingParams.min_tokens must be at most max_tokens (64), got 65"),
    ({"logprobs": -1}, "SamplingParams.logprobs must be at least 0, got -1"),
    ({"prompt_logprobs": -2}, "SamplingParams.prompt_logprobs must be at least 0, got -2"),
    ({"n": 0}, "SamplingParams.n must be at least 1, got 0"),
    ({"n": 2, "temperature": 0}, "SamplingParams.n must be 1 with temperature 0, where all answers are equal, got 2: raise temperature"),
    ({"stop": ""}, "SamplingParams.stop holds an empty string, which would stop everything: leave it out"),
    ({"stop": ["a", ""]}, "SamplingParams.stop holds an empty string, which would stop everything: leave it out"),
])
def test_a_value_out_of_range_is_named(fields, want):
    assert message(ValueError, **fields) == want


@pytest.mark.parametrize("fields, want", [
    ({"temperature": "1"}, "SamplingParams.temperature must be a number, got '1'"),
    ({"temperature": True}, "SamplingParams.temperature must be a number, got True"),
    ({"temperature": None}, "SamplingParams.temperature must be a number, got None"),
    ({"temperature": 1j}, "SamplingParams.temperature must be a number, got 1j"),
    ({"top_p": [1]}, "SamplingParams.top_p must be a number, got [1]"),
    ({"top_k": 1.0}, "SamplingParams.top_k must be an int, got 1.0"),
    ({"top_k": True}, "SamplingParams.top_k must be an int, got True"),
    ({"top_k": None}, "SamplingParams.top_k must be an int, got None"),
    ({"seed": "1"}, "SamplingParams.seed must be an int, got '1'"),
    ({"seed": False}, "SamplingParams.seed must be an int, got False"),
    ({"max_tokens": 2.5}, "SamplingParams.max_tokens must be an int, got 2.5"),
    ({"max_tokens": True}, "SamplingParams.max_tokens must be an int, got True"),
    ({"stop": 5}, "SamplingParams.stop must be a string or a list of strings, got 5"),
    ({"stop": [5]}, "SamplingParams.stop must be a string or a list of strings, got [5]"),
    ({"stop": b"a"}, "SamplingParams.stop must be a string or a list of strings, got b'a'"),
    ({"stop_token_ids": 5}, "SamplingParams.stop_token_ids must be a list of token ids, got 5"),
    ({"stop_token_ids": "5"}, "SamplingParams.stop_token_ids must be a list of token ids, got '5'"),
    ({"stop_token_ids": [True]}, "SamplingParams.stop_token_ids must be an int, got True"),
    ({"stop_token_ids": ["5"]}, "SamplingParams.stop_token_ids must be an int, got '5'"),
    ({"min_p": "0.1"}, "SamplingParams.min_p must be a number, got '0.1'"),
    ({"presence_penalty": None}, "SamplingParams.presence_penalty must be a number, got None"),
    ({"repetition_penalty": True}, "SamplingParams.repetition_penalty must be a number, got True"),
    ({"logit_bias": 5}, "SamplingParams.logit_bias must be a dict of token id to bias, got 5"),
    ({"logit_bias": [1, 2]}, "SamplingParams.logit_bias must be a dict of token id to bias, got [1, 2]"),
    ({"logit_bias": {"5": 1.0}}, "SamplingParams.logit_bias must be an int, got '5'"),
    ({"logit_bias": {5: "1"}}, "SamplingParams.logit_bias[5] must be a number, got '1'"),
    ({"allowed_token_ids": 5}, "SamplingParams.allowed_token_ids must be a list of token ids, got 5"),
    ({"allowed_token_ids": [1.5]}, "SamplingParams.allowed_token_ids must be an int, got 1.5"),
    ({"min_tokens": None}, "SamplingParams.min_tokens must be an int, got None"),
    ({"logprobs": True}, "SamplingParams.logprobs must be an int, got True"),
    ({"prompt_logprobs": 1.0}, "SamplingParams.prompt_logprobs must be an int, got 1.0"),
    ({"n": None}, "SamplingParams.n must be an int, got None"),
    ({"n": 2.0}, "SamplingParams.n must be an int, got 2.0"),
    ({"ignore_eos": 1}, "SamplingParams.ignore_eos must be True or False, got 1"),
    ({"ignore_eos": None}, "SamplingParams.ignore_eos must be True or False, got None"),
])
def test_a_value_of_the_wrong_type_is_named(fields, want):
    assert message(TypeError, **fields) == want


@pytest.mark.parametrize("fields", [{"temperature": np.True_}, {"top_k": np.True_}, {"seed": np.False_}, {"max_tokens": np.True_}, {"ignore_eos": np.True_}])
def test_numpy_bools_are_refused_where_bools_are(fields):
    assert next(iter(fields)) in message(TypeError, **fields)


@pytest.mark.parametrize("value", [10**400, Decimal("NaN"), Decimal("sNaN"), np.float32("nan"), np.ones(3)],
                         ids=["huge", "nan", "snan", "numpy nan", "array"])
def test_numbers_that_are_no_finite_float_are_refused(value):
    assert message(ValueError, temperature=value).startswith("SamplingParams.temperature must be a finite number, got ")


@pytest.mark.parametrize("name, nearest", [("temprature", "temperature"), ("topp", "top_p"), ("max_token", "max_tokens"), ("stop_tokens_ids", "stop_token_ids")])
def test_a_misspelt_keyword_is_answered_with_the_nearest(name, nearest):
    assert message(TypeError, **{name: 1}) == f"SamplingParams has no keyword {name!r}: did you mean {nearest!r}?"


def test_a_keyword_like_no_other_is_answered_with_all():
    assert message(TypeError, zzz=1) == ("SamplingParams has no keyword 'zzz': valid keywords: temperature, top_k, top_p, seed, max_tokens, "
                                         "stop, stop_token_ids, ignore_eos, min_p, presence_penalty, frequency_penalty, repetition_penalty, "
                                         "logit_bias, allowed_token_ids, min_tokens, logprobs, prompt_logprobs, n")


def test_numpy_numbers_become_plain_ones():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.5), seed=np.uint64(7), max_tokens=np.int32(9),
                            stop_token_ids=[np.int64(1)])
    assert params == SamplingParams(0.5, 3, 0.5, 7, 9, (), (1,))
    assert [type(value) for value in (params.temperature, params.top_k, params.top_p, params.seed, params.max_tokens, *params.stop_token_ids)] == [
        float, int, float, int, int, int]


@pytest.mark.parametrize("value", [1, Fraction(1, 2), Decimal("0.5")])
def test_every_real_number_is_a_temperature(value):
    assert SamplingParams(temperature=value).temperature == float(value)


def test_the_bounds_are_inside():
    SamplingParams(temperature=0, top_k=-1, top_p=1, seed=0, max_tokens=1)
    SamplingParams(top_p=1e-9, seed=2**64 - 1, max_tokens=None, stop_token_ids=[0])


@pytest.mark.parametrize("top_k", [0, -1])
def test_both_ways_to_say_all_tokens(top_k):
    assert SamplingParams(top_k=top_k).top_k == 0


@pytest.mark.parametrize("stop, want", [("a", ("a",)), (["a", "bc"], ("a", "bc")), (("a",), ("a",)), ({"a"}, ("a",)), ([], ()), (None, ())])
def test_stop_is_a_string_or_several(stop, want):
    assert SamplingParams(stop=stop).stop == want


@pytest.mark.parametrize("ids, want", [([1, 2], (1, 2)), ((1,), (1,)), ({3}, (3,)), ([], ()), (None, ())])
def test_stop_token_ids_are_a_list(ids, want):
    assert SamplingParams(stop_token_ids=ids).stop_token_ids == want


def test_options_keep_their_bounds_and_can_be_given_back():
    SamplingParams(min_p=0, presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01, logit_bias={0: -100, 1: 100}, min_tokens=64, logprobs=0)
    SamplingParams(min_tokens=100, max_tokens=None, prompt_logprobs=0, n=1, temperature=0)
    params = SamplingParams(logit_bias={7: 1, np.int64(3): -2}, allowed_token_ids=[np.int64(4), 7], n=3)
    assert params.logit_bias == ((3, -2.0), (7, 1.0)) and params.allowed_token_ids == (4, 7)
    assert dataclasses.replace(params, n=1).logit_bias == params.logit_bias and hash(params) == hash(pickle.loads(pickle.dumps(params)))


@pytest.mark.parametrize("fields, filters, edits, options", [
    ({}, False, False, False), ({"top_k": 3}, True, False, False), ({"min_p": 0.1}, True, False, False), ({"top_p": 0.5, "temperature": 0}, False, False, False),
    ({"repetition_penalty": 1.1}, False, True, True), ({"min_tokens": 1}, False, True, True), ({"allowed_token_ids": [0]}, False, True, True),
    ({"logit_bias": {1: 1}}, False, True, True), ({"logprobs": 0}, False, False, True), ({"prompt_logprobs": 0}, False, False, True), ({"n": 2}, False, False, True),
])
def test_only_what_needs_it_leaves_the_fast_path(fields, filters, edits, options):
    params = SamplingParams(**fields)
    assert (params.filters, params.edits_logits, params.has_options) == (filters, edits, options)


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0).greedy and not SamplingParams(temperature=0.01).greedy


def test_params_are_frozen_compare_by_value_and_travel():
    params = SamplingParams(temperature=0.5, stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert pickle.loads(pickle.dumps(params)) == params == SamplingParams(0.5, stop="a")
    assert hash(params) == hash(SamplingParams(0.5, stop="a"))
    assert dataclasses.replace(params, top_k=3).top_k == 3
    with pytest.raises(ValueError, match="top_k"):
        dataclasses.replace(params, top_k=-5)
