"""Notebook 06: every wrong policy gets its hint, every right one passes, the planted policy starves somebody, and figures count right."""

import json
import random

import lessons
import pytest
import tiny_models
from test_check import Strange, stub
from test_stub import above

from minivllm import LLM
from minivllm.engine.policies import Aged, first_come_first_served
from minivllm.teach import arrivals, check, lanes, plug_policy, stall, traffic
from minivllm.teach.break_it import attempt
from minivllm.teach.bugs.policy import OVERTAKEN, in_order, overtaken, whoever_fits
from minivllm.teach.exercises import batching
from minivllm.teach.exercises.policies_on_trial import TRIALS


def text_of(function):
    return lessons.text_of("policy", function)


# --- the exercise: a policy -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("index", range(len(batching.POLICY_MISTAKES)))
def test_every_wrong_policy_gets_words_of_its_own(index):
    function, words = batching.POLICY_MISTAKES[index]
    text = text_of(function)
    assert text.startswith("check ") and words in " ".join(text.split())


def by_hand(running, waiting, budget):
    left = budget - len(running)
    for seq in running:
        extra = min(seq.num_uncomputed_tokens - 1, left)
        left -= extra
        yield seq, 1 + extra
    for seq in sorted(waiting, key=lambda seq: (seq.num_prompt_tokens + 5 * seq.arrival_time, seq.seq_id)):
        yield seq, budget


class AfterFiftySteps:
    """No rank that grows: who has waited for 50 steps goes first."""

    def __init__(self):
        self.step, self.since = 0, {}

    def __call__(self, running, waiting, budget):
        self.step += 1
        for seq in waiting:
            self.since.setdefault(seq.seq_id, self.step)
        old = [seq for seq in waiting if self.step - self.since[seq.seq_id] > 50]
        return list(first_come_first_served(running, [*old, *sorted((s for s in waiting if s not in old), key=len)], budget))


@pytest.mark.parametrize("function", [batching.policy, by_hand, AfterFiftySteps(), Aged(len, ageing=8)], ids=["solution", "by "
            "hand", "limit", "Aged"])
def test_every_right_policy_passes(function):
    assert check.result("policy", function).text == f"{len(TRIALS)} checks passed"


@pytest.mark.parametrize("function", [stub, lambda *args: None, lambda *args: ..., ..., None], ids=["raises", "None", "dots", "is "
            "dots", "is None"])
def test_a_stub_is_not_attempted(function):
    assert text_of(function) == "not attempted yet"


def test_a_stub_below_code_is_not_attempted_either():
    assert text_of(above).startswith("not attempted yet: the line")


@pytest.mark.parametrize("value", [Strange(), 1j, [[1]], [None], "x" * 1000, [(1, 2)], object(), {1: 2}, 7],
                         ids=lambda value: type(value).__name__)
def test_no_answer_is_too_strange(value):
    assert text_of(lambda *args: value if args else None).startswith("check 1 of ")


def test_the_result_instead_of_the_function_is_told():
    assert "give the function itself" in text_of(3)


def test_an_error_of_the_learners_is_told():
    assert "raised AttributeError" in text_of(lambda running, waiting, budget: [(seq, budget) for seq in waiting if seq.length])


# --- requests that come one by one ------------------------------------------------------------------------------------------------

def test_what_the_record_says():
    record = arrivals.run([(0, 4, 3), (3, 10, 2)], first_come_first_served, max_num_seqs=2, budget=8)
    assert record.finished and record.plans == [{0: 4}, {0: 1}, {0: 1}, {1: 8}, {1: 2}, {1: 1}]
    assert record.order == [0, 1] and record.stalled == [] and record.first_step(1) == 3 and record.first_step(2) is None


def test_idle_steps_count_and_stalls_are_seen():
    newest_only = lambda running, waiting, budget: [*((seq, budget) for seq in running[-1:]), *((seq, budget) for seq in waiting)]
    record = arrivals.run([(0, 2, 1), (5, 2, 3), (6, 2, 2)], newest_only, max_num_seqs=2, budget=8)
    assert record.plans[1:5] == [{}] * 4 and record.first_step(1) == 5
    assert record.stalled == [(7, 1)]


def test_an_error_and_an_endless_run_are_in_the_record():
    assert isinstance(arrivals.run([(0, 2, 1)], lambda *args: 1 / 0, 1, 8).error, ZeroDivisionError)
    assert not arrivals.run([(0, 2, 9)], first_come_first_served, 1, 8, max_steps=3).finished


# --- the planted policy -----------------------------------------------------------------------------------------------------------

SHORT = [(0, 4, 8), (0, 4, 8)]


@pytest.mark.parametrize("given, words", [
    (SHORT, "nobody ever waited"),
    ([*SHORT, (1, 24, 4)], "nobody came after it"),
    ([*SHORT, (1, 24, 4), (2, 24, 4)], "none was overtaken"),
    ([*SHORT, (1, 24, 4), *[(1, 4, 8)] * 9], "let the short ones come in later steps"),
    ([*SHORT, (1, 24, 4), (2, 4, 8)], f"was overtaken by 1, and {OVERTAKEN} are wanted"),
])
def test_arrivals_that_starve_nobody_get_a_hint_of_their_own(given, words):
    text = attempt("whoever_fits", arrivals=given)
    assert text.startswith("not exposed: ") and words in text


@pytest.mark.parametrize("given, words", [
    (3, "must be a list"), ([], "must be a list"), ([(0, 4)], "an arrival is"), ([(0, 4, 8.0)], "answer tokens must be a whole number"),
    ([(3, 4, 8), (1, 4, 8)], "in the order of their steps"), ([(0, 30, 8)], "do not fit into the pool of 32 "
                "slots"), ([(0, 1, 1)] * 65, "1 to 64"),
])
def test_bad_arrivals_are_one_clear_line(given, words):
    text = attempt("whoever_fits", arrivals=given)
    assert text.startswith("this input cannot be run: ") and words in text and "\n" not in text


def test_the_planted_policy_starves_and_the_right_one_does_not_on_random_arrivals():
    rng, starved = random.Random(3), 0
    for _ in range(30):
        given = sorted((rng.randrange(60), rng.choice([2, 4, 22]), rng.randint(1, 8)) for _ in range(40))
        faulty, right = (arrivals.run(given, policy, 4, 64, 8, 4, of_blocks=True) for policy in (whoever_fits, in_order))
        assert right.finished and faulty.finished and overtaken(right, given)[1] == 0
        starved += overtaken(faulty, given)[1] >= OVERTAKEN
    assert starved > 5


def test_more_tokens_in_the_same_steps_are_why_somebody_would_do_it():
    rng, written = random.Random(3), [0, 0]
    for _ in range(10):
        given = sorted((rng.randrange(60), rng.choice([2, 4, 22]), rng.randint(1, 8)) for _ in range(60))
        for number, policy in enumerate((whoever_fits, in_order)):
            written[number] += sum(map(len, arrivals.run(given, policy, 4, 64, 8, 4, of_blocks=True).plans[:80]))
    assert written[0] > 1.2 * written[1]


# --- figures and saved numbers ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(10))
def test_idle_pieces_are_what_no_bar_takes(seed):
    rng, bars = random.Random(seed), []
    for row in range(3):
        at = rng.randrange(3)
        for _ in range(rng.randrange(4)):
            length = rng.randint(1, 5)
            bars.append((row, at, at + length))
            at += length + rng.choice([0, 0, 2])
    end = 1 + max([stop for *_, stop in bars], default=0)
    taken = {(row, step) for row, start, stop in bars for step in range(start, stop)}
    pieces = lanes.idle(rng.sample(bars, len(bars)), 3, end)
    assert sorted((row, step) for row, start, stop in pieces for step in range(start, stop)) == sorted(
        {(row, step) for row in range(3) for step in range(end)} - taken)


def test_figures_are_drawn():
    pytest.importorskip("matplotlib")
    assert lanes.figure({"a": [(0, 0, 30), (1, 0, 5), (1, 5, 30)], "b": [(0, 0, 3)]}, rows=2)._repr_png_().startswith(b"\x89PNG")
    drawn = lanes.batches({"a": ([3, 0], [0, 2]), "b": ([1], [1])})
    assert [text.get_text() for text in drawn.axes[0].texts] == ["3", "2"] and [text.get_text() for text in drawn.axes[1].texts] == ["2"]


def test_traffic_is_simulated_and_what_is_saved_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic, "FILE", tmp_path / "traffic.json")
    assert traffic.saved_lines() == ["no simulation of 10,000 requests is saved beside this notebook yet"]
    found = traffic.summaries(36)
    assert len(found) == len(traffic.RATES) * len(traffic.WAYS) + len(traffic.BUDGETS)
    assert found["wait_until_full, 2 a second"]["unfinished"] == 4
    assert found["mixed, 2 a second"]["ttft_median"] < found["static, 2 a second"]["ttft_median"]
    assert found["mixed, budget 256"]["longest_gap_median"] < found["prefill_first, budget 4096"]["longest_gap_median"]
    traffic.FILE.write_text(json.dumps({"requests": 36, "summaries": found}))
    head, columns, first, *_ = traffic.saved_lines()
    assert head == "36 requests, saved" and first.startswith("wait_until_full, 2 a second ") and first.endswith(" 4")
    assert len(columns) == len(first)


# --- the real engine --------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save("llama", directory)
    with pytest.warns(UserWarning, match="max_model_len"):
        llm = LLM(directory, num_kv_blocks=16, block_size=4, max_num_batched_tokens=16, max_num_seqs=2, device="cpu")
    yield llm
    llm.close()


REQUESTS = [(0, [5, 17, 40, 8], 3), (1, list(range(1, 21)), 3), (1, [33, 62, 11, 9, 2], 3)]


def plugged(tiny, capsys, function):
    pool = tiny.runner.pool
    plug_policy.policy(function, tiny, REQUESTS, max_num_seqs=1, budget=8)
    assert tiny.runner.pool is pool
    return capsys.readouterr().out


def test_another_order_and_the_same_tokens(tiny, capsys):
    lines = ["yours:    first tokens in the order A C B", "minivllm: first tokens in the order A B C", "the same tokens for each of the "
                "3 requests"]
    for function in (batching.policy, by_hand):
        assert plugged(tiny, capsys, function).splitlines() == lines


@pytest.mark.parametrize("function, words", [
    (stub, "not attempted yet"), (None, "not attempted yet"), (lambda *args: 1 / 0, "raised ZeroDivisionError"),
    (lambda running, waiting, budget: list(waiting), "your policy gave a Sequence among what it yields"),
    (lambda running, waiting, budget: [(seq, budget) for seq in running], "chose nothing"),
])
def test_what_a_policy_does_wrong_is_one_line(tiny, capsys, function, words):
    out = plugged(tiny, capsys, function)
    assert words in out and out.count("\n") == 1


def test_stalls_are_timed_and_what_is_saved_is_shown(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(stall, "FILE", tmp_path / "stall.json")
    monkeypatch.setattr(stall, "DECODING", 2)
    monkeypatch.setattr(stall, "ANSWER", 12)
    assert stall.saved_lines() == ["no figures of an H200 are saved beside this notebook yet"]
    found = stall.measure(tiny, prompt=24, budgets=(32, 8))
    assert [row["way"] for row in found["rows"]] == ["prefill first", "mixed, budget 32", "mixed, budget 8"]
    assert all(row["longest_gap_ms"] >= row["median_gap_ms"] > 0 and row["ttft_ms"] > 0 for row in found["rows"])
    stall.FILE.write_text(json.dumps({"device": "a GPU", "model": "a model", **found}))
    assert stall.saved_lines()[0] == "saved from a GPU, a model, a prompt of 24 tokens:" and len(stall.saved_lines()) == 4
