"""The planted faults: each is exposed by its own example and hidden by its harmless one, and the right code is never blamed."""

import contextlib
import random
from dataclasses import replace

import pytest
from engine_fakes import Violation, run_to_end, tiny_config
from engine_fakes import make_engine as make_strict_engine

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.step import PlanRow, StepPlan
from minivllm.sampling_params import SamplingParams
from minivllm.teach import bugs, check
from minivllm.teach.break_it import attempt
from minivllm.teach.bugs import FAULTS
from minivllm.teach.mirror import MirrorRunner
from minivllm.teach.trial import BadInput, Setup, read_setup, run_trial

ENGINE_FAULTS = [name for name, fault in FAULTS.items() if "requests" in fault.inputs]


# --- the catalogue ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_exposed_by_its_example(name):
    text = attempt(name, **FAULTS[name].exposing)
    assert text.startswith("exposed: ") and "the faulty one" in text and len(text.splitlines()) == 2


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_hidden_by_its_harmless_example_and_a_hint_says_why(name):
    text = attempt(name, **FAULTS[name].harmless)
    assert text.startswith("not exposed: both give ") and len(text.split("hint: ")[1]) > 30


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("example", ["exposing", "harmless"])
def test_the_right_code_in_the_place_of_the_faulty_is_not_blamed(name, example):
    fault = FAULTS[name]
    found = fault.compare(replace(fault, faulty=fault.right), **{**fault.inputs, **getattr(fault, example)})
    assert not found.exposed


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_tells_its_story_and_shows_its_code(name):
    fault, source = FAULTS[name], bugs.source(name)
    assert fault.title and fault.story.count(". ") + fault.story.count("; ") >= 1 and fault.story.endswith(".")
    assert fault.faulty.__name__ in source and '"""' in source
    assert not any(word in source.lower() for word in ("bug", "fault", "wrong", "forgot")), "the code must not give itself away"


def test_the_names_asked_for_are_there():
    assert set(FAULTS) == {"stale_hash", "full_hit_crash", "boundary_off_by_one", "freed_block_in_table", "hit_never_reads", "starvation",
                           "slots_by_head_dim", "upper_left_mask", "stale_buffer", "rebound_tensor", "grows_at_remainder_one", "whoever_fits", "noise_by_place", "reduced_columns"}
    with pytest.raises(KeyError, match="no planted fault is called 'x'"):
        bugs.get("x")


# --- the right engine on anything -------------------------------------------------------------------------------------------------

def random_setup(seed):
    rng = random.Random(seed)
    size, blocks = rng.choice([1, 2, 4]), rng.randrange(4, 10)
    room = size * blocks

    def request():
        length = rng.randrange(1, room // 2 + 1)
        return [rng.randrange(3) for _ in range(length)], rng.randrange(1, (room - length) + 1)

    return Setup([[request() for _ in range(rng.randrange(1, 4))] for _ in range(rng.randrange(1, 4))], blocks, size, rng.randrange(1, 4))


@pytest.mark.parametrize("seed", range(40))
def test_tokens_depend_on_the_prompt_alone_in_the_right_engine(seed):
    setup = random_setup(seed)
    trial = run_trial(setup)
    assert trial.ending == ""
    for (prompt, max_tokens), tokens in zip(setup.requests, trial.tokens):
        alone = run_trial(Setup([[(prompt, max_tokens)]], 64, 64, 1))
        assert tokens == alone.tokens[0] and len(tokens) == max_tokens


def test_the_random_setups_meet_hits_evictions_and_preemptions():
    trials = [run_trial(random_setup(seed), traced=True) for seed in range(40)]
    for kind in ("share", "evict", "preempt"):
        assert sum(trial.count(kind) > 0 for trial in trials) >= 5, kind


@pytest.mark.parametrize("name", ENGINE_FAULTS)
def test_random_setups_find_the_fault_too(name):
    fault = FAULTS[name]
    classes = {"block_manager": fault.faulty} if issubclass(fault.faulty, BlockManager) else {"scheduler": fault.faulty}
    trials = [(run_trial(setup), run_trial(setup, **classes)) for setup in map(random_setup, range(40))]
    differ = sum(faulty.ending != "" or faulty.tokens != right.tokens for right, faulty in trials)
    assert 1 <= differ < 40


@pytest.mark.parametrize("name", ["stale_hash", "freed_block_in_table", "hit_never_reads"])
def test_the_stricter_runner_of_the_tests_agrees(name):
    fault = FAULTS[name]
    setup = read_setup(**{**fault.inputs, **fault.exposing})
    config = tiny_config(setup.block_size, setup.num_kv_blocks, setup.max_num_seqs, 64)
    found = pytest.raises((Violation, AssertionError, KeyError))
    for classes, expected in (({}, contextlib.nullcontext()), ({"block_manager": fault.faulty}, found)):
        engine = make_strict_engine(config, eos=(), vocab=1000, **classes)
        with expected:
            for wave in setup.waves:
                for prompt, max_tokens in wave:
                    engine.add(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
                run_to_end(engine)


# --- the mirror -------------------------------------------------------------------------------------------------------------------

def row(tokens, table, start=0, write_start=0):
    return PlanRow(0, start, tokens, table, write_start, True, SamplingParams(), 0)


def last_token(runner, *args, **kwargs):
    return runner.execute(StepPlan([row(*args, **kwargs)])).tokens[0]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("position", range(6))
def test_the_mirrors_token_depends_on_every_slot_it_reads_and_on_no_other(layer, position):
    def decode(spoiled):
        runner = MirrorRunner(2, 8)
        last_token(runner, [7, 1, 5, 3, 2, 9], [4, 0, 6])
        table = [4, 0, 6, 5]
        runner.slots[layer][table[spoiled // 2] * 2 + spoiled % 2] += 1
        return last_token(runner, [8], table, start=6)

    assert decode(position) != decode(7)


def test_the_mirror_reads_the_same_through_any_blocks_and_chunks():
    whole = last_token(MirrorRunner(2, 8), [7, 1, 5, 3], [0, 1])
    runner = MirrorRunner(2, 8)
    for start, token in enumerate([7, 1, 5]):
        last_token(runner, [token], [5, 2], start=start)
    assert last_token(runner, [3], [5, 2], start=3) == whole
    assert last_token(MirrorRunner(2, 8), [1, 7, 5, 3], [0, 1]) != whole


def test_the_mirror_writes_nothing_below_write_start():
    runner = MirrorRunner(2, 4)
    last_token(runner, [1, 2], [0], write_start=2)
    assert runner.slots == [[0] * 8] * 2


def test_the_second_layer_depends_on_the_prefix():
    runner = MirrorRunner(1, 8)
    last_token(runner, [1, 9], [0, 1])
    last_token(runner, [2, 9], [2, 3])
    assert runner.slots[0][1] == runner.slots[0][3] and runner.slots[1][1] != runner.slots[1][3]


# --- hints ------------------------------------------------------------------------------------------------------------------------

A, B = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]

HINTS = [
    ("boundary_off_by_one", dict(prompt_tokens=4, max_tokens=1), "comes out of the prompt's own step"),
    ("boundary_off_by_one", dict(prompt_tokens=1, max_tokens=4), "positions 0 to 3 are computed"),
    ("upper_left_mask", dict(num_queries=3, num_keys=3), "equal lengths both triangles are the same"),
    ("rebound_tensor", dict(answers=[4, 4, 4]), "nobody ever moves up"), ("rebound_tensor", dict(answers=[5, 5, 1]), "stands behind those that go on"),
    ("stale_buffer", dict(first_tokens=3, second_tokens=3), "is as long as the first"),
    ("stale_buffer", dict(first_tokens=3, second_tokens=9), "is longer than the first"),
    ("slots_by_head_dim", dict(num_kv_heads=1, slot_mapping=[5]), "with one kv head"),
    ("slots_by_head_dim", dict(num_kv_heads=2, slot_mapping=[0, -1]), "only slot 0 is written"),
    ("slots_by_head_dim", dict(num_kv_heads=2, slot_mapping=[-1]), "nothing is written at all"),
    ("stale_hash", dict(requests=[([1], 1)]), "no block was ever full"),
    ("stale_hash", dict(requests=[(A, 2), (B, 2)]), "no published block was evicted"),
    ("stale_hash", dict(requests=[[(A, 2)], [([*B, *B], 5)]], num_kv_blocks=4), "once more, in a later wave"),
    ("freed_block_in_table", dict(requests=[(A, 12)]), "a single request is never preempted"),
    ("freed_block_in_table", dict(requests=[(A, 12), (B, 12)], max_num_seqs=1), "one request runs at a time"),
    ("freed_block_in_table", dict(requests=[(A, 2), (B, 2)]), "no request was preempted"),
    ("hit_never_reads", dict(requests=[([1], 1), ([1], 1)]), "no prompt fills a block"),
    ("hit_never_reads", dict(requests=[(A, 2), (A, 2)]), "in a later wave"),
    ("hit_never_reads", dict(requests=[[(A, 2)], [(B, 2)]]), "must begin with the same full block"),
    ("full_hit_crash", dict(requests=[[(A, 2)], [(A, 2)]]), "a multiple of 4"),
    ("full_hit_crash", dict(requests=[(A[:4], 2), (A[:4], 2)]), "send the same prompt again in a later wave"),
    ("full_hit_crash", dict(requests=[[(A[:4], 2)], [(A[:4] + B[:4], 2)]]), "some of its blocks, but not all"),
    ("starvation", dict(requests=[(A, 2)], max_num_seqs=1), "every request is a full batch"),
    ("starvation", dict(requests=[(A, 2), (B, 2)]), "at least max_num_seqs = 2 requests waited"),
]


@pytest.mark.parametrize("name, inputs, words", HINTS)
def test_an_input_that_exposes_nothing_gets_a_hint_of_its_own(name, inputs, words):
    text = attempt(name, **inputs)
    assert text.startswith("not exposed: ") and words in text


@pytest.mark.parametrize("name, inputs", [
    ("boundary_off_by_one", dict(prompt_tokens=4, max_tokens=2)), ("boundary_off_by_one", dict(prompt_tokens=3, max_tokens=3)),
    ("boundary_off_by_one", dict(prompt_tokens=6, max_tokens=4)), ("upper_left_mask", dict(num_queries=1, num_keys=2)),
    ("stale_buffer", dict(first_tokens=2, second_tokens=1)), ("starvation", dict(requests=[(A, 2), (B, 2), (A, 2)])),
    ("full_hit_crash", dict(requests=[(A[:4], 2), (A[:4], 2)], max_num_seqs=1)),
    ("hit_never_reads", dict(requests=[("same start a", 2), ("same start b", 2)], max_num_seqs=1)),
])
def test_other_inputs_that_expose(name, inputs):
    assert attempt(name, **inputs).startswith("exposed: ")


@pytest.mark.parametrize("prompt_tokens", range(1, 10))
@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_the_boundary_fault_shows_exactly_where_a_decode_starts_a_block(prompt_tokens, max_tokens):
    decodes = range(prompt_tokens, prompt_tokens + max_tokens - 1)
    exposed = attempt("boundary_off_by_one", prompt_tokens=prompt_tokens, max_tokens=max_tokens).startswith("exposed")
    assert exposed == any(position % 4 == 0 for position in decodes)


# --- inputs that cannot be run ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, inputs, words", [
    ("boundary_off_by_one", dict(prompt_tokens=-1, max_tokens=4), "prompt_tokens must be 1 to 256, got -1"),
    ("boundary_off_by_one", dict(prompt_tokens=2, max_tokens=10**9), "max_tokens must be 1 to 256, got 1000000000"),
    ("boundary_off_by_one", dict(prompt_tokens=2.5, max_tokens=4), "must be a whole number, got 2.5"),
    ("boundary_off_by_one", dict(prompt_token=2, max_tokens=4), "did you mean prompt_tokens?"),
    ("upper_left_mask", dict(num_queries=5, num_keys=3), "5 queries and 3 keys"),
    ("upper_left_mask", dict(num_queries=True, num_keys=3), "whole number"),
    ("rebound_tensor", dict(answers=[3]), "a list of 2 to 4 lengths, got [3]"), ("rebound_tensor", dict(answers=[3, 17]), "must be 1 to 16, got 17"),
    ("stale_buffer", dict(first_tokens=0, second_tokens=3), "first_tokens must be 1"),
    ("slots_by_head_dim", dict(num_kv_heads=2, slot_mapping=[16]), "a slot must be -1 to 15, got 16"),
    ("slots_by_head_dim", dict(num_kv_heads=2, slot_mapping=[3, 3]), "same slot"),
    ("slots_by_head_dim", dict(num_kv_heads=2, slot_mapping=3), "must be a list"),
    ("starvation", dict(requests=[]), "requests must be a list"),
    ("starvation", dict(requests=[[]]), "there must be 1 to 64 requests, got 0"),
    ("starvation", dict(requests=[(A, 2)] * 65), "got 65"),
    ("starvation", dict(requests=[A]), "a request is (prompt, max_tokens)"),
    ("starvation", dict(requests=[([], 2)]), "at least one token id"),
    ("starvation", dict(requests=[([1000], 2)]), "a token id must be 0 to 999, got 1000"),
    ("starvation", dict(requests=[(A, 0)]), "max_tokens must be 1"),
    ("starvation", dict(requests=[(A, 100)]), "do not fit: the pool has 8 blocks of 4, 32 slots in all"),
    ("starvation", dict(requests=[(A, 2)], num_kv_blocks=0), "num_kv_blocks must be 1 to 256, got 0"),
    ("starvation", dict(requests=[(A, 2)], max_num_seqs=1000), "max_num_seqs must be 1 to 64"),
    ("nothing", dict(), "no planted fault is called 'nothing'; there are stale_hash"),
])
def test_a_bad_input_is_one_clear_line(name, inputs, words):
    text = attempt(name, **inputs)
    assert words in text and "\n" not in text and "xposed" not in text


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_left_open_is_not_attempted(name):
    assert attempt(name) == "not attempted yet"
    for blank in (None, ...):
        assert attempt(name, **{next(iter(FAULTS[name].inputs)): blank}) == "not attempted yet"
    if name in ENGINE_FAULTS:
        assert attempt(name, requests=[[([1, 2], 3)], [(..., 3)]]) == "not attempted yet"


def test_a_none_in_place_of_a_default_is_a_wrong_input():
    text = attempt("starvation", requests=[(A, 2)], num_kv_blocks=None)
    assert text == "this input cannot be run: num_kv_blocks must be a whole number, got None"
    assert attempt("starvation", requests=[(A, 2)], num_kv_blocks=...) == attempt("starvation", requests=None, num_kv_blocks=None) == "not attempted yet"


def test_break_it_prints(capsys):
    assert check.break_it("stale_buffer", first_tokens=None, second_tokens=None) is None
    check.break_it("upper_left_mask", num_queries=2, num_keys=5)
    assert capsys.readouterr().out == ("not attempted yet\nexposed: with the right mask query 0 reads 4 keys of 5,\n"
                                       "         with the faulty one query 0 reads 1 key\n")


def test_an_endless_loop_of_a_faulty_engine_is_told():
    class NeverAppends(Scheduler):
        def update(self, plan, result):
            return []

    trial = run_trial(Setup([[(A, 2)]], 8, 4, 2), scheduler=NeverAppends)
    assert "still running" in trial.ending


@pytest.mark.parametrize("prompt_tokens, max_tokens, block_size, words", [
    (8, 2, 4, "(position 8 needed block number 3, and the table had 2 blocks)"),
    (4, 2, 4, "(position 4 needed block number 2, and the table had 1 block)"),
    (6, 4, 4, "(position 8 needed block number 3, and the table had 2 blocks)"),
    (3, 2, 1, "(position 3 needed block number 4, and the table had 3 blocks)"),
])
def test_the_boundary_fault_says_which_position_had_no_block(prompt_tokens, max_tokens, block_size, words):
    text = attempt("boundary_off_by_one", prompt_tokens=prompt_tokens, max_tokens=max_tokens, block_size=block_size)
    assert text.startswith("exposed: ") and text.endswith(words)


def test_the_boundary_hint_makes_sense_where_only_the_prompt_is_asked_for():
    assert attempt("boundary_off_by_one", prompt_tokens=None, max_tokens=2) == "not attempted yet"
    text = attempt("boundary_off_by_one", prompt_tokens=5, max_tokens=2)
    assert "positions 0 to 5 are computed" in text and "they fit into the 2 blocks of the prompt, which reach to position 7" in text
    assert "when a token of the answer starts a new block: take another prompt length, or ask for more tokens" in text
    assert "into the 1 block of the prompt, which reaches to position 3" in attempt("boundary_off_by_one", prompt_tokens=1, max_tokens=2)


def test_a_fault_of_the_right_engine_is_not_hidden(monkeypatch):
    monkeypatch.setattr(Scheduler, "update", lambda self, plan, result: 1 / 0)
    with pytest.raises(RuntimeError, match="a fault of the package: it crashes: ZeroDivisionError"):
        attempt("starvation", requests=[(A, 2)])


def test_bad_input_is_a_value_error():
    assert issubclass(BadInput, ValueError)
