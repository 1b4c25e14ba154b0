"""The exercises of notebook 05: every listed mistake gets its hint, every right way passes, and the impostors are what they claim to be."""

import hashlib
import inspect
import json
import re

import pytest
import torch
from lessons import in_one_line as text_of
from test_check import Strange, stub
from test_stub import above

import tiny_models
from minivllm import LLM
from minivllm.bench.limits import Machine
from minivllm.teach import check, plug_prefix, ttft
from minivllm.teach.exercises import engines_on_trial, hash_cases, prefix_cache
from minivllm.teach.exercises.engines_on_trial import ENGINES

NAMES = list(prefix_cache.CHECKERS)
REFERENCES = {"block_hashes": prefix_cache.block_hashes, "cache_works": prefix_cache.cache_works}


# --- block_hashes -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("index", range(len(prefix_cache.HASH_MISTAKES)))
def test_every_wrong_hash_gets_words_of_its_own(index):
    function, words = prefix_cache.HASH_MISTAKES[index]
    text = text_of("block_hashes", function)
    assert text.startswith("check ") and words in text.split("likely cause: ")[1] + text.split("want ")[1]


def as_hex(token_ids, block_size, extra=b""):
    return [digest.hex() for digest in prefix_cache.block_hashes(token_ids, block_size, extra)]


def as_int(token_ids, block_size, extra=b""):
    return tuple(int.from_bytes(digest, "big") for digest in prefix_cache.block_hashes(token_ids, block_size, extra))


def whole_prefix(token_ids, block_size, extra=b""):
    ends = range(block_size, len(token_ids) + 1, block_size)
    return [hashlib.md5(extra + b"|" + ",".join(map(str, token_ids[:end])).encode()).digest() for end in ends]


@pytest.mark.parametrize("function", [as_hex, as_int, whole_prefix, prefix_cache._chain(lambda parent, block: parent + repr(block).encode())])
def test_every_right_hash_passes(function):
    assert text_of("block_hashes", function) == f"{len(hash_cases.CASES)} checks passed"


def test_two_adapters_of_equal_length_are_told_apart():
    function = lambda ids, size, extra=b"": prefix_cache.block_hashes(ids, size, bytes(len(extra)))
    assert "`extra` has no part" in text_of("block_hashes", function)


def test_a_hash_of_all_but_the_last_token_is_found():
    function = lambda ids, size, extra=b"": prefix_cache.block_hashes([0, *ids[:-1]], size, extra)
    assert check.result("block_hashes", function).status == "failed"


def test_the_two_sequences_that_differ_are_shown():
    """Of 24 in a case: a hash that is right but for the longest sequences, all of which get one and the same."""
    function = lambda ids, size, extra=b"": [b"0" * 32 if len(ids) == 8 else digest for digest in prefix_cache.block_hashes(ids, size, extra)]
    found = check.result("block_hashes", function)
    assert found.check > 9
    text = " ".join(found.text.split())
    letters = re.search("hashes for block [0-9]+ of ([a-z]) and block [0-9]+ of ([a-z])", text).groups()
    assert sorted(re.findall(r" ([a-z]) = \[", text)) == sorted(letters)


# --- cache_works ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("index", range(len(prefix_cache.TEST_MISTAKES)))
def test_every_wrong_test_gets_its_own_hint(index):
    function, hint = prefix_cache.TEST_MISTAKES[index]
    assert check.result("cache_works", function).cause == hint and hint in text_of("cache_works", function)


def three_times(ask, prompt):
    answers = [ask(prompt) for _ in range(3)]
    return len({tuple(answer.token_ids) for answer in answers}) == 1 and answers[2].num_computed_tokens <= len(prompt) // 2


@pytest.mark.parametrize("function", [three_times, lambda ask, prompt: prefix_cache.cache_works(ask, list(prompt))])
def test_every_right_test_passes(function):
    assert text_of("cache_works", function) == f"{len(ENGINES)} checks passed"


def test_the_impostors_say_that_they_hit_and_each_lacks_one_thing():
    for engine in ENGINES:
        ask = engine.start()
        first, second = ask(engine.prompt), ask(engine.prompt)
        right, saved = second.token_ids == first.token_ids, second.num_computed_tokens < len(engine.prompt)
        assert first.num_cached_tokens == 0 and first.num_computed_tokens == len(engine.prompt)
        assert engine.works == (right and saved)
        if engine.caching:
            assert second.num_cached_tokens > 0 and (right or saved)
        if engine.works:
            assert second.num_cached_tokens + second.num_computed_tokens == len(engine.prompt)


@pytest.mark.parametrize("value, words", [(None, "is a `return` missing?"), (1, "return True or False"), ("yes", "return True or False")])
def test_what_is_no_answer_is_told(value, words):
    assert words in text_of("cache_works", lambda ask, prompt: value if ask(prompt) else None)


def test_an_attribute_that_does_not_exist_is_told():
    text = text_of("cache_works", lambda ask, prompt: ask(prompt).cached > 0)
    assert "raised AttributeError" in text and "num_cached_tokens and num_computed_tokens" in text


# --- both -------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_the_reference_passes_and_says_so(name, capsys):
    getattr(check, name)(REFERENCES[name])
    assert capsys.readouterr().out.endswith("checks passed\n")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", [stub, lambda *args: None, ..., None], ids=["raises", "None", "is dots", "is None"])
def test_a_stub_is_not_attempted(name, function):
    assert text_of(name, function) == "not attempted yet"


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_below_code_is_not_attempted_either(name):
    assert text_of(name, above).startswith("not attempted yet: the line")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [Strange(), {"a": 1}, 1j, [[1]], [None], torch.ones(2), "x" * 1000, [b"1", "1"], object()],
                         ids=lambda value: type(value).__name__)
def test_no_answer_is_too_strange(name, value):
    assert text_of(name, lambda *args: value if args else None).startswith("check 1 of ")


@pytest.mark.parametrize("name", NAMES)
def test_the_result_instead_of_the_function_is_told(name):
    assert "give the function itself" in text_of(name, 3)


def test_a_mistake_is_listed_for_each_of_many_things():
    assert len(prefix_cache.HASH_MISTAKES) >= 5 and len(prefix_cache.TEST_MISTAKES) >= 5
    assert len({hint for _, hint in prefix_cache.TEST_MISTAKES}) == len(prefix_cache.TEST_MISTAKES)
    assert str(inspect.signature(prefix_cache.block_hashes)).startswith("(token_ids: 'list[int]', block_size: 'int', extra: 'bytes' = b''")
    assert engines_on_trial.RecomputesHits.__doc__


# --- the real engine --------------------------------------------------------------------------------------------------------------

A, B, X = [5, 17, 40, 8], [33, 62, 11, 9], [1, 2, 3, 4]
PROMPTS = [A + X, B, B + X + [7], A + X]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save("llama", directory)
    with pytest.warns(UserWarning, match="max_model_len"):
        llm = LLM(directory, num_kv_blocks=8, block_size=4, max_num_batched_tokens=16, max_num_seqs=2, device="cpu")
    yield llm
    llm.close()


def plugged(tiny, capsys, function):
    plug_prefix.block_hashes(function, tiny, PROMPTS, max_tokens=4)
    return capsys.readouterr().out


def test_right_hashes_give_the_packages_hits_and_tokens(tiny, capsys):
    before, pool = dict(tiny.engine.blocks.cached_blocks), tiny.runner.pool
    for function in (prefix_cache.block_hashes, as_hex):
        out = plugged(tiny, capsys, function)
        assert out.splitlines() == ["yours:    cached tokens [0, 0, 4, 7]", "minivllm: cached tokens [0, 0, 4, 7]", "same tokens"]
    assert tiny.runner.pool is pool and dict(tiny.engine.blocks.cached_blocks) == before


def test_a_hash_of_the_own_tokens_alone_finds_more_and_answers_otherwise(tiny, capsys):
    out = plugged(tiny, capsys, prefix_cache._own_tokens)
    assert "yours:    cached tokens [0, 0, 8, 7]" in out and "prompt 2 got another answer" in out


@pytest.mark.parametrize("function, words", [
    (stub, "not attempted yet"), (None, "not attempted yet"), (lambda ids, size, extra: 1 / 0, "your function raised ZeroDivisionError"),
    (lambda ids, size, extra: [b"x"] * 9, "returned 9 hashes, the engine needs a list of 2"),
    (lambda ids, size, extra: bytes(ids), "returned a bytes"),
    (lambda ids, size, extra: print(end="") if ids else 1, "your function returned None"),
])
def test_what_a_function_does_wrong_is_one_line(tiny, capsys, function, words):
    out = plugged(tiny, capsys, function)
    assert words in out and out.count("\n") == 1


# --- time to the first token ------------------------------------------------------------------------------------------------------

def test_a_hit_and_a_miss_are_timed_and_what_is_saved_is_shown(tiny, tmp_path, monkeypatch):
    computed, execute = [], tiny.runner.execute
    monkeypatch.setattr(tiny.runner, "execute", lambda plan: computed.append(plan.num_tokens) or execute(plan))
    monkeypatch.setattr(ttft, "FILE", tmp_path / "ttft.json")
    monkeypatch.setattr(ttft, "NEW", 4)
    assert ttft.saved_lines() == ["no figures of an H200 are saved beside this notebook yet"]
    found = ttft.measure(tiny, lengths=(12,), repeats=2)
    assert computed == [12, 4] * 3  # the first pair does not count
    [row] = found["rows"]
    assert row["tokens"] == 12 and min(row.values()) > 0
    ttft.FILE.write_text(json.dumps({"device": "a GPU", "model": "a model", **found}))
    head, line = ttft.saved_lines()
    assert "a GPU, a model" in head and line.startswith("   12 tokens: ") and "8 of them found: " in line


def test_the_prediction_is_operations_or_bytes_whichever_takes_longer(tiny):
    slow_products, slow_memory = Machine(read_bandwidth=1e30, matmul_flops=1e3), Machine(read_bandwidth=1e3, matmul_flops=1e30)
    assert ttft.predicted_ms(tiny, slow_memory, 1, 1) == ttft.predicted_ms(tiny, slow_memory, 99, 99) == tiny.runner.weight_bytes
    config, weights = tiny.model_config, sum(p.numel() for p in tiny.runner.model.model.layers.parameters())
    assert ttft.predicted_ms(tiny, slow_products, 3, 5) == 2 * weights * 3 + 4 * config.num_heads * config.head_dim * config.num_layers * 15
