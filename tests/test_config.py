"""EngineConfig: what is accepted, what is adjusted and said, what is refused."""

import dataclasses
import warnings

import numpy as np
import pytest

from minivllm.config import EngineConfig
from minivllm.keywords import require_int, require_number, unknown_keyword


def message(error, **fields):
    with pytest.raises(error) as caught:
        EngineConfig(**fields)
    return str(caught.value)


def complete(num_kv_blocks=100, max_positions=512, **fields):
    return EngineConfig(**fields).complete(num_kv_blocks=num_kv_blocks, max_positions=max_positions)


@pytest.fixture
def silent():
    """Every warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Construction.

def test_defaults_leave_the_choice_to_the_device():
    config = EngineConfig()
    assert (config.device, config.dtype, config.attention_backend) == ("auto", "auto", "auto")
    assert (config.block_size, config.num_kv_blocks, config.gpu_memory_utilization, config.max_model_len) == (None, None, None, None)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (None, None)
    assert (config.enable_prefix_caching, config.enforce_eager, config.tensor_parallel_size, config.seed) == (True, False, 1, 0)


@pytest.mark.parametrize("name", ["block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "overlap_chunk_size"])
def test_counts_are_positive_ints(name):
    assert message(ValueError, **{name: 0}) == f"LLM.{name} must be at least 1, got 0"
    assert message(TypeError, **{name: 1.0}) == f"LLM.{name} must be an int, got 1.0"
    assert message(TypeError, **{name: True}) == f"LLM.{name} must be an int, got True"
    value = getattr(EngineConfig(**{"tensor_parallel_size": 2, name: np.int64(1)}), name)
    assert value == 1 and type(value) is int


@pytest.mark.parametrize("fields, error, want", [
    ({"max_model_len": 1}, ValueError, "LLM.max_model_len must be at least 2, got 1"),
    ({"overlap_chunk_size": 512}, ValueError,
     "LLM.overlap_chunk_size is about what several GPUs add up: leave it out, or raise tensor_parallel_size"),
    ({"seed": -1}, ValueError, "LLM.seed must be between 0 and 18446744073709551615, got -1"),
    ({"seed": 2**64}, ValueError, "LLM.seed must be between 0 and 18446744073709551615, got 18446744073709551616"),
    ({"seed": None}, TypeError, "LLM.seed must be an int, got None"),
    ({"enforce_eager": 1}, TypeError, "LLM.enforce_eager must be True or False, got 1"),
    ({"enable_prefix_caching": "yes"}, TypeError, "LLM.enable_prefix_caching must be True or False, got 'yes'"),
    ({"model": 3}, TypeError, "LLM.model must be a string, got 3"),
    ({"model": ""}, TypeError, "LLM.model must be a string, got ''"),
    ({"device": None}, TypeError, "LLM.device must be a string, got None"),
    ({"attention_backend": 1}, TypeError, "LLM.attention_backend must be a string, got 1"),
    ({"dtype": "int8"}, ValueError, "LLM.dtype must be one of auto, float32, float16, bfloat16, got 'int8'"),
    ({"enforce_eager": True, "torch_compile": True}, ValueError, "LLM.enforce_eager=True means no torch.compile at all: leave out torch_compile, or enforce_eager"),
    ({"limit_gpu_memory": 1}, TypeError, "LLM.limit_gpu_memory must be True or False, got 1"),
    ({"gpu_memory_utilization": 0}, ValueError, "LLM.gpu_memory_utilization must be above 0 and at most 1, got 0.0"),
    ({"gpu_memory_utilization": 1.1}, ValueError, "LLM.gpu_memory_utilization must be above 0 and at most 1, got 1.1"),
    ({"gpu_memory_utilization": float("nan")}, ValueError, "LLM.gpu_memory_utilization must be a finite number, got nan"),
    ({"gpu_memory_utilization": True}, TypeError, "LLM.gpu_memory_utilization must be a number, got True"),
    ({"gpu_memory_utilization": "0.9"}, TypeError, "LLM.gpu_memory_utilization must be a number, got '0.9'"),
    ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, ValueError,
     "LLM.max_num_batched_tokens (4) is below max_num_seqs (8): every running sequence needs one token a step, so raise the first or lower the second"),
])
def test_a_bad_setting_is_named(fields, error, want):
    assert message(error, **fields) == want


@pytest.mark.parametrize("name, nearest", [("block_sise", "block_size"), ("max_seqs", "max_num_seqs"), ("gpu_memory_utilisation", "gpu_memory_utilization")])
def test_a_misspelt_keyword_is_answered_with_the_nearest(name, nearest):
    assert message(TypeError, **{name: 1}).endswith(f" has no keyword {name!r}: did you mean {nearest!r}?")


def test_a_misspelt_keyword_is_one_of_what_the_user_called():
    assert message(TypeError, block_sise=1).startswith("LLM has no keyword")


def test_a_keyword_like_no_other_is_answered_with_all():
    error = unknown_keyword("Owner", "zzz", ["one", "two"])
    assert isinstance(error, TypeError) and str(error) == "Owner has no keyword 'zzz': valid keywords: one, two"


def test_the_bounds_are_inside(silent):
    EngineConfig(block_size=1, num_kv_blocks=1, max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1, seed=2**64 - 1, gpu_memory_utilization=1)


def test_the_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1


# Completion.

def test_every_limit_is_a_number_afterwards(silent):
    config = complete()
    assert (config.block_size, config.num_kv_blocks, config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (16, 100, 512, 256, 2048)


def test_what_the_user_set_comes_first(silent):
    config = complete(block_size=8, num_kv_blocks=50, max_model_len=300, max_num_seqs=4, max_num_batched_tokens=64, seed=3)
    assert (config.block_size, config.num_kv_blocks, config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (8, 50, 300, 4, 64)
    assert config.seed == 3


def test_completing_twice_changes_nothing(silent):
    config = complete()
    assert config.complete(num_kv_blocks=7, max_positions=512) == config


def test_max_model_len_is_fitted_to_the_pool_and_said():
    with pytest.warns(UserWarning) as caught:
        assert complete(num_kv_blocks=10).max_model_len == 160
    assert [str(warning.message) for warning in caught] == ["max_model_len is 160, not the model's 512: the KV cache holds 160 tokens (10 blocks of 16)"]


def test_a_pool_that_just_holds_the_model_is_no_matter(silent):
    assert complete(num_kv_blocks=32).max_model_len == 512
    assert complete(num_kv_blocks=32, max_model_len=512).max_model_len == 512


def refusal(**fields):
    with pytest.raises(ValueError) as caught:
        complete(**fields)
    return str(caught.value)


def test_a_given_max_model_len_that_does_not_fit_the_pool_is_refused(silent):
    assert refusal(num_kv_blocks=10, max_model_len=161) == ("LLM.max_model_len 161 does not fit: the KV cache holds 160 tokens (10 blocks of 16); "
                                                           "lower it, or raise num_kv_blocks or gpu_memory_utilization")
    assert complete(num_kv_blocks=10, max_model_len=160).max_model_len == 160


def test_a_given_max_model_len_above_the_models_is_refused(silent):
    assert refusal(max_model_len=513) == "LLM.max_model_len 513 is above the 512 positions the model was made for"


def test_a_pool_of_one_token_is_refused(silent):
    assert refusal(num_kv_blocks=1, block_size=1) == ("the KV cache holds 1 tokens (1 blocks of 1): not even a prompt of one token and its answer fit; "
                                                     "raise num_kv_blocks")


def test_a_pool_of_two_tokens_is_enough():
    with pytest.warns(UserWarning, match="max_model_len is 2, not the model's 512"):
        assert complete(num_kv_blocks=2, block_size=1).max_model_len == 2


def test_a_pool_without_a_block_is_refused(silent):
    with pytest.raises(ValueError, match="the KV cache holds 0 tokens"):
        EngineConfig().complete(num_kv_blocks=0, max_positions=512)


@pytest.mark.parametrize("fields, changed, seqs, tokens", [
    ({"max_num_seqs": 3000}, "max_num_batched_tokens", 3000, 3000),
    ({"max_num_batched_tokens": 100}, "max_num_seqs", 100, 100),
])
def test_the_one_of_two_limits_that_was_left_out_is_adjusted_and_said(fields, changed, seqs, tokens):
    with pytest.warns(UserWarning) as caught:
        config = complete(**fields)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)
    assert [str(warning.message) for warning in caught] == [f"{changed} is {tokens}: every running sequence needs one token a step, "
                                                            f"so max_num_seqs may not exceed max_num_batched_tokens"]


@pytest.mark.parametrize("fields", [{"num_kv_blocks": 10}, {"max_num_seqs": 3000}])
def test_a_warning_points_at_whoever_called_the_caller_of_complete(fields):
    """That is the line that says LLM(...)."""
    with pytest.warns(UserWarning) as caught:
        complete(**fields)
    assert [warning.filename for warning in caught] == [__file__]


def test_limits_that_agree_are_kept_in_silence(silent):
    assert complete(max_num_seqs=2048).max_num_batched_tokens == 2048
    assert complete(max_num_batched_tokens=256).max_num_seqs == 256


# keywords.py, as everyone uses it.

def test_require_int_returns_a_plain_int():
    assert type(require_int("Owner", "name", np.uint8(3), 0)) is int


@pytest.mark.parametrize("value", [3.0, "3", None, [3], True, np.float64(3), np.array([3, 4])])
def test_require_int_refuses_what_is_no_int(value):
    with pytest.raises(TypeError, match="^Owner.name must be an int, got "):
        require_int("Owner", "name", value, 0)


@pytest.mark.parametrize("value", ["3", b"3", None, [3], True, 1j])
def test_require_number_refuses_what_is_no_number(value):
    with pytest.raises(TypeError, match="^Owner.name must be a number, got "):
        require_number("Owner", "name", value)
