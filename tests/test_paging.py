"""What notebook 04 brings: first fit, the picture of a block's end, the saved figures, its fault, and its functions in the real model."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

import tiny_models
from minivllm import LLM
from minivllm.teach import boundary, decode_speed, fit, plug_paged
from minivllm.teach.break_it import attempt
from minivllm.teach.exercises import paged

ROOT = Path(__file__).parent.parent
PROMPT = [5, 17, 40, 8, 33, 62, 11]


def requests(seed, count=40):
    rng = random.Random(seed)
    return [{"prompt": rng.randrange(1, 20), "answer": rng.randrange(1, 60)} for _ in range(count)]


# --- first fit --------------------------------------------------------------------------------------------------------------------

def holes(taken, size):
    """Every free slot by itself, one at a time."""
    used = {slot for start, length in taken.items() for slot in range(start, start + length)}
    return [slot not in used for slot in range(size)]


@pytest.mark.parametrize("seed", range(20))
def test_first_fit_stops_where_no_row_of_free_slots_is_long_enough(seed):
    taken, need, free = fit.until_blocked(requests(seed, 200), 150)
    is_free = holes(taken, 150)
    assert sum(is_free) == free >= need
    assert not any(all(is_free[start:start + need]) for start in range(150 - need + 1))


def test_notebook_02_shows_the_same():
    """It has the code inline: both must tell one story."""
    source = (ROOT / "notebooks" / "02_kv_cache.py").read_text()
    code = re.search(r"^def first_fit.*?(?=^# %%)", source, re.MULTILINE | re.DOTALL)[0]
    rows = json.loads((ROOT / "minivllm" / "teach" / "lengths.json").read_text())
    space = {"rows": rows}
    exec(code, space)
    assert (space["taken"], space["need"], space["free"]) == fit.until_blocked(rows, 4000)


@pytest.mark.parametrize("seed", range(10))
def test_steps_by_a_simulation_of_every_step(seed):
    rows, size = requests(seed), 120
    waiting, running, step = list(rows), {}, 0  # start -> (length, steps left)
    while waiting or running:
        while waiting:
            need = waiting[0]["prompt"] + waiting[0]["answer"]
            is_free = holes({start: length for start, (length, _) in running.items()}, size)
            start = next((s for s in range(size - need + 1) if all(is_free[s:s + need])), None)
            if start is None:
                break
            running[start] = (need, waiting.pop(0)["answer"])
        step += 1
        running = {start: (length, left - 1) for start, (length, left) in running.items() if left > 1}
    assert fit.steps_needed(rows, size, lambda row: row["prompt"] + row["answer"]) == step


def test_one_at_a_time_takes_the_sum_and_what_never_fits_is_refused():
    rows = requests(0)
    assert fit.steps_needed(rows, 100, lambda row: 100) == sum(row["answer"] for row in rows)
    with pytest.raises(ValueError, match="never fits into 100"):
        fit.steps_needed(rows, 100, lambda row: 101)
    with pytest.raises(ValueError, match="take fewer slots"):
        fit.until_blocked(rows, 10**6)


# --- the picture ------------------------------------------------------------------------------------------------------------------

RECORDS = [boundary.StepRecord(3, 0, 3, (7,), (28, 29, 30)), boundary.StepRecord(4, 3, 4, (7,), (31,)),
           boundary.StepRecord(5, 4, 5, (7, 2), (8,))]


def test_the_table_has_a_line_a_step():
    lines = boundary.table(RECORDS).splitlines()
    assert [line.split() for line in lines[1:]] == ["0 3 0 0 to 2 7 28 29 30 4".split(), "1 4 3 3 7 31 5".split(), "2 5 4 4 7 2 8 "
            "6".split()]


def test_the_picture_shows_what_is_written_and_what_is_not():
    scene = boundary.scene(RECORDS, 4)
    boxes = [item for item in scene.items if type(item).__name__ == "Box"]
    assert [box.text for box in boxes if box.text.isdigit()] == ["28", "29", "30", "31", "8"]
    assert sum(box.text == "new" for box in boxes) == 3
    labels = [item.text for item in scene.items if type(item).__name__ == "Label"]
    assert [text for text in labels if text.startswith("takes")] == ["takes 1 block: 7", "takes no block", "takes 1 block: 2"]
    assert labels.count("no block yet") == 2
    assert max(item.x + getattr(item, "w", 0) for item in scene.items) <= scene.width
    boundary.figure(RECORDS, 4)


# --- saved figures ----------------------------------------------------------------------------------------------------------------

def test_the_saved_figures_are_those_of_the_benchmark():
    bench, saved = json.loads((ROOT / "benchmarks" / "h200" / "kernels.json").read_text()), decode_speed.saved()
    assert saved["cases"] == [case for case in bench["cases"] if case["case"].startswith("decode")]
    assert (saved["device"], saved["copy_bandwidth"]) == (bench["device"], bench["copy_bandwidth"])
    assert [case["case"] for case in saved["cases"]] == [f"decode {count} x {mean:,}" for count, mean in decode_speed.CASES]
    assert list(saved["block_sizes"]) == [str(size) for size in decode_speed.BLOCK_SIZES] and min(saved["block_sizes"].values()) > 0


# --- the fault --------------------------------------------------------------------------------------------------------------------

FAULT = "grows_at_remainder_one"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("prompt", range(1, 7))
@pytest.mark.parametrize("answer", range(1, 5))
def test_the_fault_shows_with_blocks_of_one_alone(prompt, answer, size):
    text = attempt(FAULT, prompt_tokens=prompt, max_tokens=answer, block_size=size)
    assert text.startswith("exposed" if size == 1 and answer > 1 else "not exposed"), text


@pytest.mark.parametrize("inputs, words", [
    (dict(prompt_tokens=3, max_tokens=1, block_size=1), "ask for more tokens"),
    (dict(prompt_tokens=3, max_tokens=2, block_size=8), "the prompt's 1 block of 8 hold them all"),
    (dict(prompt_tokens=3, max_tokens=4, block_size=4), "position 4 starts a block; with it there are 5 tokens, and 5 % 4 = 1"),
    (dict(prompt_tokens=3, max_tokens=4, block_size=0), "block_size must be 1 to 64, got 0"),
    (dict(prompt_tokens=65, max_tokens=4, block_size=1), "prompt_tokens must be 1 to 64, got 65"),
    (dict(prompt_tokens=3, max_tokens=4, block_size="x"), "must be a whole number"),
    (dict(prompt_tokens=3, max_tokens=4), "not attempted yet"),
])
def test_other_inputs_are_told_why_not(inputs, words):
    assert words in attempt(FAULT, **inputs)


# --- in the real model ------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=["llama", "qwen3"])
def tiny(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save(request.param, directory)
    with pytest.warns(UserWarning, match="max_model_len"):
        llm = LLM(directory, num_kv_blocks=8, block_size=4, max_num_batched_tokens=5, max_num_seqs=2, device="cpu")
    yield llm
    llm.close()


def test_the_right_functions_give_the_same_tokens(tiny, capsys):
    plug_paged.slot_mapping(paged.slot_mapping, tiny, PROMPT, max_tokens=8)
    plug_paged.slot_mapping(paged._slots_reference, tiny, PROMPT, max_tokens=8)
    plug_paged.paged_decode(paged.paged_decode, tiny, PROMPT, max_tokens=8)
    plug_paged.paged_decode(paged._oracle, tiny, PROMPT, max_tokens=8)
    assert capsys.readouterr().out.count("same tokens (") == 4


@pytest.mark.parametrize("run, wrong", [
    (plug_paged.slot_mapping, paged.SLOT_MAPPING.mistakes[3].function), (plug_paged.slot_mapping, paged._slots(lambda t, p, s, i: p)),
    (plug_paged.slot_mapping, lambda t, a, n, s: [0] * n),
    (plug_paged.paged_decode, paged._wrong(fade_mixed=False)), (plug_paged.paged_decode, paged._wrong(page=lambda t, i: i)),
])
def test_a_wrong_function_gives_other_tokens(tiny, capsys, run, wrong):
    run(wrong, tiny, PROMPT, max_tokens=8)
    assert "first difference: token " in capsys.readouterr().out


def stub(*args):
    raise NotImplementedError


@pytest.mark.parametrize("run, function, words", [
    (plug_paged.slot_mapping, stub, "not attempted yet"), (plug_paged.paged_decode, stub, "not attempted yet"),
    (plug_paged.slot_mapping, lambda *args: None, "not attempted yet"),
    (plug_paged.slot_mapping, lambda t, a, n, s: [1.0] * n, "must return 5 whole numbers (it was given block_table [3, 2], start 0, "
            "count 5"),
    (plug_paged.slot_mapping, lambda t, a, n, s: [1], "must return 5 whole numbers"),
    (plug_paged.slot_mapping, lambda t, a, n, s: [10**6] * n, "your function returned slots 1000000 to 1000000, the pool has 0 to "),
    (plug_paged.slot_mapping, lambda t, a, n, s: t[n], "your function raised IndexError: list index out of range (it was given"),
    (plug_paged.paged_decode, lambda q, k, v, t, n: q[0], "the model needs torch.float32 ["),
    (plug_paged.paged_decode, lambda q, k, v, t, n: 3, "returned an int, the model needs"),
    (plug_paged.paged_decode, lambda q, k, v, t, n: q * torch.nan, "is not finite"),
])
def test_what_a_function_does_wrong_is_one_line(tiny, capsys, run, function, words):
    run(function, tiny, PROMPT, max_tokens=8)
    out = capsys.readouterr().out
    assert words in out and out.count("\n") == 1


def test_the_llm_is_left_as_it_was(tiny):
    pool, backend = tiny.runner.pool, tiny.runner.backend
    before = pool.cache.clone()
    plug_paged.slot_mapping(paged.slot_mapping, tiny, PROMPT)
    plug_paged.paged_decode(lambda *args: 1 / 0, tiny, PROMPT)
    assert tiny.runner.pool is pool and tiny.runner.backend is backend and torch.equal(pool.cache, before)


def test_the_walk_is_the_oracle_on_random_ragged_cases():
    generator = torch.Generator().manual_seed(0)
    for seed in range(40):
        size, kv_heads, groups, dim = random.Random(seed).choice([(1, 1, 1, 4), (4, 2, 3, 8), (16, 3, 3, 16)])
        context = int(torch.randint(1, 60, (), generator=generator))
        case = paged._case(seed, (size, kv_heads * groups, kv_heads, dim), context)
        assert torch.allclose(paged.paged_decode(*case.args.values()), paged._oracle(*case.args.values()), atol=1e-5)
