"""Notebook 07: its exercises (every listed mistake gets its hint), the learner's rule in the real engine, and what a swap is timed by."""

import json
import random

import pytest
from lessons import text_of
from test_check import Strange, stub
from test_stub import above

import tiny_models
from minivllm import LLM
from minivllm.teach import check, plug_admission, swap
from minivllm.teach.break_it import attempt
from minivllm.teach.exercise import run
from minivllm.teach.exercises import preemption
from minivllm.teach.exercises.preemption import FIRST_PREEMPTION, MAY_ADMIT, first_preemption, may_admit

NAMES = {"first_preemption": first_preemption, "may_admit": may_admit}
EVERY = [(exercise, index) for exercise in (FIRST_PREEMPTION, MAY_ADMIT) for index in range(len(exercise.mistakes))]


@pytest.mark.parametrize("exercise, index", EVERY, ids=[f"{exercise.name}-{index}" for exercise, index in EVERY])
def test_every_mistake_gets_its_hint_and_no_other(exercise, index):
    found = check.result(exercise.name, exercise.mistakes[index].function)
    assert found.status == "failed" and found.cause == exercise.mistakes[index].hint


@pytest.mark.parametrize("name", NAMES)
def test_the_formula_agrees_with_the_engine(name):
    assert text_of(name, NAMES[name]).endswith("checks passed")


def test_the_formula_of_the_first_preemption_holds_on_many_workloads():
    rng = random.Random(1)
    for _ in range(100):
        size, prompts = rng.choice([1, 2, 5, 8]), [rng.randrange(1, 40) for _ in range(rng.randrange(2, 8))]
        blocks = sum(-(-prompt // size) for prompt in prompts) + len(prompts) - 1 + rng.randrange(20)
        assert first_preemption(prompts, blocks, size) == preemption._asked_of_the_engine(prompts, blocks, size)


def test_a_case_whose_requests_do_not_start_together_is_refused():
    with pytest.raises(RuntimeError, match="do not all start at once"):
        preemption._asked_of_the_engine([8, 8], 4, 4)


def test_every_admission_case_decides_something():
    wanted = [run(MAY_ADMIT.reference, case).value for case in MAY_ADMIT.cases]
    assert wanted.count(True) >= 6 and wanted.count(False) >= 6


@pytest.mark.parametrize("function", [lambda f, t, r, s: t + r * s <= f * s, lambda f, t, r, s: not (f - r) * s < t])
def test_other_right_rules_pass(function):
    assert text_of("may_admit", function).endswith("checks passed")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", [stub, lambda *args: None, ..., None, above], ids=["raises", "None", "dots", "is None", "above"])
def test_a_stub_is_not_attempted(name, function):
    assert text_of(name, function).startswith("not attempted yet")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [Strange(), 1j, "yes", [True], 2.5, {}], ids=lambda value: type(value).__name__)
def test_no_answer_is_too_strange(name, value):
    assert text_of(name, lambda *args: value if args else None).startswith("check 1 of ")


@pytest.mark.parametrize("kind", [int, float, str, lambda answer: [answer]])
def test_a_number_is_no_yes(kind):
    assert "True or False is wanted" in text_of("may_admit", lambda *args: kind(may_admit(*args)))


def test_the_fault_of_the_notebook_is_exposed_by_its_solution_and_not_by_its_example():
    two = [([1, 2, 3, 4, 5], 12), ([6, 7, 8, 9, 10], 12)]
    assert attempt("freed_block_in_table", requests=two, num_kv_blocks=5).startswith("exposed")
    example = [([1, 2, 3], 5), ([4, 5, 6], 5)]
    assert "were enough" in attempt("freed_block_in_table", requests=example, num_kv_blocks=8)


# --- the real engine --------------------------------------------------------------------------------------------------------------

PROMPTS = [[5, 17, 40, 8, 3], [33, 62, 11], [1, 2, 3, 4, 9, 7], [12, 13]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save("llama", directory)
    with pytest.warns(UserWarning, match="max_model_len"):
        llm = LLM(directory, num_kv_blocks=16, block_size=4, max_num_batched_tokens=64, max_num_seqs=4, device="cpu")
    yield llm
    llm.close()


def plugged(tiny, capsys, function, num_blocks=6):
    plug_admission.may_admit(function, tiny, PROMPTS, num_blocks, max_tokens=8)
    return capsys.readouterr().out


def test_the_packages_rule_gives_the_packages_run(tiny, capsys):
    pool = tiny.runner.pool
    yours, package, same = plugged(tiny, capsys, may_admit).splitlines()
    assert yours.split(":")[1].strip() == package.split(":")[1].strip() and same == "same tokens" and tiny.runner.pool is pool


def test_another_rule_gives_the_same_tokens_and_more_work(tiny, capsys):
    yours, package, same = plugged(tiny, capsys, lambda free, tokens, running, size: -(-tokens // size) <= free).splitlines()
    again = [int(line.split(" tokens computed")[0].split()[-1]) for line in (yours, package)]
    assert again[0] > again[1] and same == "same tokens"


@pytest.mark.parametrize("function, words", [
    (stub, "not attempted yet"), (None, "not attempted yet"), (lambda *args: 1 / 0, "your function raised ZeroDivisionError"),
    (lambda *args: True, "admits a request that needs"), (lambda *args: False, "the engine would stand still"),
    (lambda *args: print(end="") if args else 1, "your function returned None"),
])
def test_what_a_rule_does_wrong_is_one_line(tiny, capsys, function, words):
    out = plugged(tiny, capsys, function)
    assert words in out and out.count("\n") == 1


# --- swapping ---------------------------------------------------------------------------------------------------------------------

def test_a_swap_brings_back_what_it_took(tiny):
    cache = tiny.runner.pool.cache
    cache.normal_()
    before = cache.clone()
    assert min(swap._swap_ms(tiny, 13)) > 0 and bool((cache == before).all())


def test_what_is_measured_can_be_saved_and_shown(tiny, tmp_path, monkeypatch):
    computed, execute = [], tiny.runner.execute
    monkeypatch.setattr(tiny.runner, "execute", lambda plan: computed.append(plan.num_tokens) or execute(plan))
    monkeypatch.setattr(swap, "FILE", tmp_path / "swap.json")
    assert swap.saved_lines() == ["no figures of an H200 are saved beside this notebook yet"]
    found = swap.measure(tiny, lengths=(12, 20), repeats=2)
    assert computed == [12] * 3 + [20] * 3
    assert [row["mb"] * 1e6 for row in found["rows"]] == pytest.approx([n * tiny.runner.spec.bytes_per_token for n in (12, 20)])
    swap.FILE.write_text(json.dumps({"device": "a GPU", "model": "a model", **found}))
    head, *lines = swap.saved_lines()
    assert "a GPU, a model" in head and len(lines) == 2 and lines[0].startswith("    12 tokens, ")
