"""Engine: the door, the end of a request, seeds, and what an error or an interrupt leaves behind."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_fakes import Harness, interrupt_at_line, make_engine, run_to_end, tiny_config

from minivllm.engine.invariants import check_scheduler
from minivllm.engine.sequence import Sequence
from minivllm.engine.stopping import StopChecker
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import IncrementalDetokenizer

LETTERS = " abcdefghijk"  # token i is LETTERS[i]


def decode(token_ids):
    return "".join(LETTERS[token] for token in token_ids)


def letters_engine(**options):
    return make_engine(tiny_config(max_model_len=12), vocab=len(LETTERS), decode=decode, **options)


def answer(engine, forced, prompt=(1, 2), **sampling):
    """The sequence of a request that gets the `forced` tokens, run to its end."""
    seq = engine.add(list(prompt), SamplingParams(**sampling))
    engine.runner.forced[seq.seq_id] = list(forced)
    run_to_end(engine)
    return seq


def pool_is_whole(engine):
    check_scheduler(engine.scheduler)
    return not engine.has_unfinished_requests() and engine.blocks.num_used_blocks == 0


# The door.

BAD_PROMPTS = {
    "empty": ([], ValueError, "the prompt is empty: it needs at least one token"),
    "float": ([1, 2.0], TypeError, "a prompt of token ids must hold ints only, got [1, 2.0]"),
    "bool": ([1, True], TypeError, "a prompt of token ids must hold ints only, got [1, True]"),
    "strings": (["1"], TypeError, "a prompt of token ids must hold ints only, got ['1']"),
    "text": ("hello", TypeError, "a prompt of token ids must hold ints only, got 'hello'"),
    "nested": ([[1, 2]], TypeError, "a prompt of token ids must hold ints only, got [[1, 2]]"),
    "none inside": ([1, None], TypeError, "a prompt of token ids must hold ints only, got [1, None]"),
    "none": (None, TypeError, "a prompt of token ids must hold ints only, got None"),
    "one int": (3, TypeError, "a prompt of token ids must hold ints only, got 3"),
    "negative": ([1, -1], ValueError, "token id -1 is outside the vocabulary of 12 (0 to 11)"),
    "above the vocabulary": ([12, 1], ValueError, "token id 12 is outside the vocabulary of 12 (0 to 11)"),
    "no room for an answer": ([1] * 12, ValueError, "the prompt has 12 tokens and max_model_len is 12, which leaves no room for an answer: "
                                                    "shorten it to 11 or raise max_model_len"),
}


@pytest.mark.parametrize("prompt, error, message", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_nothing_has_changed(prompt, error, message):
    engine, untouched = letters_engine(), letters_engine()
    with pytest.raises(error) as caught:
        engine.add(prompt, SamplingParams())
    assert str(caught.value) == message
    assert not engine.has_unfinished_requests() and engine.stats == untouched.stats
    after, want = (each.add([1], SamplingParams()) for each in (engine, untouched))
    assert (after.seq_id, after.seed) == (want.seq_id, want.seed)


def test_the_whole_vocabulary_is_accepted():
    assert letters_engine().add([0, 11], SamplingParams()).token_ids == [0, 11]


def test_a_long_prompt_is_quoted_in_part():
    with pytest.raises(TypeError) as caught:
        letters_engine().add([1.5] * 1000, SamplingParams())
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("prompt", [(1, 2), np.array([1, 2]), [np.int32(1), np.uint8(2)], range(1, 3)], ids=["tuple", "array", "numpy ints", "range"])
def test_every_sequence_of_ints_is_a_prompt(prompt):
    seq = letters_engine().add(prompt, SamplingParams())
    assert seq.token_ids == [1, 2] and all(type(token) is int for token in seq.token_ids)


def test_the_longest_prompt_leaves_room_for_one_token():
    engine = letters_engine()
    seq = answer(engine, [3], [1] * 11)
    assert (seq.generated_token_ids, seq.finish_reason) == ([3], "length")


@pytest.mark.parametrize("stop, stream", [("x", False), ((), True)])
def test_text_needs_a_tokenizer(stop, stream):
    engine, untouched = make_engine(tiny_config()), make_engine(tiny_config())
    with pytest.raises(ValueError, match="stop strings and streaming need text, and this engine has no tokenizer: use stop_token_ids"):
        engine.add([1], SamplingParams(stop=stop), stream=stream)
    assert not engine.has_unfinished_requests()
    assert engine.add([1], SamplingParams()).seed == untouched.add([1], SamplingParams()).seed


def test_a_text_is_kept_up_to_date_only_where_it_is_needed():
    engine = letters_engine()
    assert engine.add([1], SamplingParams()).detokenizer is None
    assert engine.add([1], SamplingParams(), stream=True).detokenizer is not None
    assert engine.add([1], SamplingParams(stop="x")).detokenizer is not None


def test_the_prompt_is_copied():
    engine, prompt = letters_engine(), [1, 2]
    answer(engine, [3], prompt, max_tokens=1)
    assert prompt == [1, 2]


# The end of a request.

def ended(seq):
    return seq.generated_token_ids, seq.finish_reason, seq.stop_reason


def test_an_end_token_stops():
    assert ended(answer(letters_engine(), [3, 0, 4])) == ([3, 0], "stop", None)


def test_several_end_tokens():
    assert ended(answer(letters_engine(eos=(0, 7)), [3, 7, 4])) == ([3, 7], "stop", None)


def test_ignore_eos_goes_on():
    assert ended(answer(letters_engine(), [3, 0, 4], ignore_eos=True, max_tokens=3)) == ([3, 0, 4], "length", None)


def test_a_stop_token_stops_and_is_named():
    assert ended(answer(letters_engine(), [3, 5, 4], stop_token_ids=[5, 6])) == ([3, 5], "stop", 5)


def test_ignore_eos_does_not_ignore_stop_tokens():
    assert ended(answer(letters_engine(), [3, 0, 4], stop_token_ids=[0], ignore_eos=True)) == ([3, 0], "stop", 0)


def test_a_stop_string_stops_and_is_left_out_of_the_text():
    seq = answer(letters_engine(), [3, 4, 5, 6], stop=["de", "x"])
    assert ended(seq) == ([3, 4, 5], "stop", "de") and seq.detokenizer.text == "c"


def test_a_stop_string_in_the_prompt_is_none():
    assert ended(answer(letters_engine(), [3, 0], prompt=[4, 5], stop="de")) == ([3, 0], "stop", None)


def test_max_tokens_ends_with_length():
    assert ended(answer(letters_engine(), [3, 4, 5], max_tokens=2)) == ([3, 4], "length", None)


def test_max_model_len_ends_with_length():
    seq = answer(letters_engine(), [3] * 20, max_tokens=None)
    assert len(seq) == 12 and seq.finish_reason == "length"


@pytest.mark.parametrize("sampling, want", [
    ({}, ("stop", None)),
    ({"stop_token_ids": [0]}, ("stop", 0)),
    ({"ignore_eos": True}, ("length", None)),
    ({"ignore_eos": True, "stop": " "}, ("stop", " ")),
    ({"stop": " "}, ("stop", None)),
])
def test_stop_goes_before_length_and_a_token_before_a_string(sampling, want):
    params = SamplingParams(max_tokens=1, **sampling)
    seq = Sequence(0, [1], params, detokenizer=IncrementalDetokenizer(decode, params.stop))
    seq.token_ids.append(0)
    assert StopChecker(frozenset([0]), 100)(seq) == want


def test_generation_goes_on_until_something_ends_it():
    seq = Sequence(0, [1], SamplingParams(max_tokens=3))
    seq.token_ids.append(2)
    assert StopChecker(frozenset([0]), 4)(seq) is None


# Seeds.

def test_a_given_seed_is_kept():
    engine = letters_engine()
    engine.add([1], SamplingParams(seed=2**64 - 1))
    assert engine.scheduler.schedule().rows[0].seed == 2**64 - 1


def drawn_seeds(config_seed, given=()):
    engine = make_engine(tiny_config(seed=config_seed))
    for seed in given:
        engine.add([1], SamplingParams(seed=seed))
    return [engine.add([1], SamplingParams()).seed for _ in range(4)]


def test_seeds_are_drawn_from_the_configs_seed():
    assert drawn_seeds(1) == drawn_seeds(1)
    assert len(set(drawn_seeds(1) + drawn_seeds(2))) == 8
    assert all(0 <= seed < 2**64 for seed in drawn_seeds(1))


def test_given_seeds_do_not_shift_the_drawn_ones():
    assert drawn_seeds(1, given=[5, 6]) == drawn_seeds(1)


# Aborts, errors and interrupts.

def test_abort_ends_some_and_leaves_the_rest():
    engine = letters_engine()
    waiting, running, other = (engine.add([1, token], SamplingParams(max_tokens=3)) for token in (2, 3, 4))
    engine.abort([waiting])
    engine.step()
    engine.abort([running])
    assert {waiting.finish_reason, running.finish_reason} == {"abort"} and not running.block_table
    run_to_end(engine)
    assert other.finish_reason != "abort" and pool_is_whole(engine)


def test_aborting_the_finished_changes_nothing():
    engine = letters_engine()
    seq = answer(engine, [0])
    before = engine.stats.as_dict()
    engine.abort([seq, seq])
    assert seq.finish_reason == "stop" and engine.stats.as_dict() == before


def test_output_that_is_not_finite_aborts_its_request_alone():
    engine = letters_engine()
    bad, good = engine.add([1, 2, 3], SamplingParams(max_tokens=2)), engine.add([4, 5, 6], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.runner.poisoned = {bad.seq_id}
    assert engine.step() == [bad]
    assert (bad.finish_reason, bad.generated_token_ids) == ("abort", []) and "not finite" in bad.error
    run_to_end(engine)
    assert (good.finish_reason, good.error) == ("length", None)
    assert engine.blocks.find_prefix(Sequence(9, [1, 2], SamplingParams())) == []
    assert engine.blocks.find_prefix(Sequence(9, [4, 5], SamplingParams())) != []
    assert pool_is_whole(engine)


def test_an_error_in_a_step_aborts_all_and_goes_on_up():
    engine = letters_engine()
    sequences = [engine.add([1, 2, token], SamplingParams()) for token in range(6)]
    engine.step()
    engine.runner.error = RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        engine.step()
    assert all(seq.finished for seq in sequences) and sequences[-1].finish_reason == "abort"
    assert pool_is_whole(engine)
    engine.runner.error = None
    assert answer(engine, [3, 0]).finish_reason == "stop"


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_in_the_runner_goes_on_up_and_leaves_the_engine_usable(when):
    engine = letters_engine()
    seq = engine.add([1, 2, 3], SamplingParams())
    engine.runner.interrupt = when
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert seq.finish_reason == "abort" and pool_is_whole(engine)
    engine.runner.check_cached_blocks()
    engine.runner.interrupt = None
    assert answer(engine, [3, 0], [1, 2, 3]).num_cached_tokens == 0


def crowded_harness():
    """Hits, a chunk, growth and a preemption are all due in its next step."""
    harness = Harness(tiny_config(block_size=1, num_blocks=9, budget=4))
    harness.add([1, 2, 3], max_tokens=1)
    harness.step()
    harness.add([1, 2, 4], ignore_eos=True)
    harness.add([2], ignore_eos=True)
    harness.step()
    harness.add([1, 2, 3, 4, 1], ignore_eos=True)
    harness.step()
    return harness


def test_an_interrupt_at_any_line_of_a_step_leaves_the_pool_whole():
    for steps in range(4):
        for line in range(1, 1000):
            harness = crowded_harness()
            for _ in range(steps):
                harness.step()
            harness.interrupted_step(line)
            if harness.scheduler.sequences:
                break  # the step had fewer lines
            harness.add([1, 2, 3, 4])
            harness.finish()
        assert line > 50


def test_interrupt_at_line_counts_lines():
    with pytest.raises(KeyboardInterrupt), interrupt_at_line(1):
        letters_engine()
    with interrupt_at_line(10**6):
        letters_engine()


# What passes between engine and runner, and what the engine is made of.

def test_plans_can_be_pickled_and_replayed():
    engine = letters_engine()
    answer(engine, [3, 0])
    assert pickle.loads(pickle.dumps(engine.runner.plans)) == engine.runner.plans


ENGINE = Path(__file__).parent.parent / "minivllm" / "engine"


@pytest.mark.parametrize("module", sorted(path.stem for path in ENGINE.glob("*.py") if path.stem != "__init__"))
def test_the_engine_imports_without_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import minivllm.engine.{module}; assert 'minivllm.worker' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ENGINE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_observers_are_called_after_every_step_and_a_failing_one_is_dropped():
    engine, seen = make_engine(tiny_config()), []

    def broken():
        raise ValueError("cannot draw")

    engine.observers += [broken, lambda: seen.append(engine.stats.num_steps)]
    seq = engine.add([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.warns(UserWarning, match="cannot draw"):
        engine.step()
    run_to_end(engine)
    assert seen == [1, 2, 3] and seq.finish_reason == "length"


def test_an_interrupt_in_an_observer_goes_up_and_leaves_the_engine_usable():
    engine = make_engine(tiny_config())

    def interrupt():
        engine.observers.clear()
        raise KeyboardInterrupt

    engine.observers.append(interrupt)
    seq = engine.add([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    run_to_end(engine)
    assert seq.finish_reason == "length" and engine.blocks.num_used_blocks == 0
