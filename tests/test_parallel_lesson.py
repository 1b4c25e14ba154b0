"""Notebook 10: ranks as threads, its exercises and planted fault, the real model with a learner's function, its view, its predictions."""

import itertools
import json
import random
import time
from pathlib import Path

import psutil
import pytest
import tiny_models
import torch
from lessons import text_of
from test_check import Strange, stub
from test_stub import above
from torch.nn import functional as F

from minivllm import SamplingParams
from minivllm.teach import RankView, check, plug_parallel, scaling, two_gpus
from minivllm.teach.break_it import attempt
from minivllm.teach.exercises.parallel import ROW_PARALLEL, row_parallel
from minivllm.teach.exercises.sharding import SHARD_QKV, shard_qkv
from minivllm.teach.thread_ranks import MeetingError, Table, ThreadRank, on_ranks, run
from minivllm.teach.thread_runner import ThreadRunner, random_model

# --- ranks as threads -------------------------------------------------------------------------------------------------------------


def test_collectives_on_threads():
    work = lambda rank: (rank.all_reduce(torch.tensor([10 ** rank.rank])).item(), rank.all_gather(torch.tensor([[rank.rank]])).tolist(),
                         rank.smallest(7 - rank.rank), rank.calls)
    for size in (1, 2, 5):
        for total, gathered, least, calls in on_ranks(size, work):
            assert total == sum(10 ** rank for rank in range(size)) and gathered == [list(range(size))] and least == 8 - size
            assert calls == [("all-reduce", (1,)), ("all-gather", (1, 1)), ("smallest", ())]


def test_a_rank_may_change_what_it_laid_down_while_others_read():
    def work(rank):
        x, sums = torch.ones(10_000), []
        for _ in range(50):
            sums.append(rank.all_reduce(x).unique().tolist())
            x += 1
        return sums

    assert on_ranks(3, work) == [[[3.0 * (n + 1)] for n in range(50)]] * 3


@pytest.mark.parametrize("work, words", [
    (lambda rank: rank.rank or rank.all_reduce(torch.ones(1)), "rank 0 waits in an all-reduce for ranks 1, 2, which ended without it"),
    (lambda rank: rank.rank and rank.all_reduce(torch.ones(1)), "ranks 1, 2 wait in an all-reduce for rank 0, which ended without it"),
    (lambda rank: rank.all_reduce(torch.ones(1 + rank.rank)), r"different things: all-reduce of \[1\], all-reduce of \[2\], all-reduce of \[3\]"),
    (lambda rank: (rank.all_gather if rank.rank else rank.all_reduce)(torch.ones(1, 1)), "all-reduce of .*, all-gather of"),
])
def test_who_does_not_meet_is_told_and_nobody_waits_for_ever(work, words):
    for _ in range(20):  # the same words, whoever came first
        with pytest.raises(MeetingError, match=words):
            on_ranks(3, work)


def test_the_error_of_the_rank_that_failed_is_raised_and_the_ranks_can_go_on():
    table = Table(3)
    ranks = [ThreadRank(rank, table) for rank in range(3)]
    with pytest.raises(ZeroDivisionError):
        run(ranks, lambda rank: 1 / (rank.rank - 2) and rank.all_reduce(torch.ones(1)))
    assert run(ranks, lambda rank: rank.all_reduce(torch.ones(1)).item()) == [3, 3, 3]


# --- the exercises ----------------------------------------------------------------------------------------------------------------

GIVEN = {"shard_qkv": [mistake.function for mistake in SHARD_QKV.mistakes],
         "row_parallel": [mistake.function.__wrapped__ for mistake in ROW_PARALLEL.mistakes]}
EVERY = [(exercise, index) for exercise in (SHARD_QKV, ROW_PARALLEL) for index in range(len(exercise.mistakes))]


@pytest.mark.parametrize("exercise, index", EVERY, ids=[f"{exercise.name}-{index}" for exercise, index in EVERY])
def test_every_mistake_gets_its_hint_and_no_other(exercise, index):
    found = check.result(exercise.name, GIVEN[exercise.name][index])
    assert found.status == "failed" and found.cause == exercise.mistakes[index].hint


def shard_by_rows(weight, num_heads, num_kv_heads, rank, size):
    """Which head a row belongs to, and whether the rank holds it, row by row."""
    dim, rows = len(weight) // (num_heads + 2 * num_kv_heads), []
    mine = set(range(num_heads * rank // size, num_heads * (rank + 1) // size))
    needed = {head // (num_heads // num_kv_heads) for head in mine}  # the kv heads that these query heads read
    for row in range(len(weight)):
        head = row // dim
        if head in mine if head < num_heads else (head - num_heads) % num_kv_heads in needed:
            rows.append(weight[row])
    return torch.stack(rows)


def shard_at_once(weight, num_heads, num_kv_heads, rank, size):
    heads = weight.view(num_heads + 2 * num_kv_heads, -1, weight.shape[1])
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads])
    held = max(1, num_kv_heads // size)
    k, v = (part[rank * num_kv_heads // size:][:held] for part in (k, v))
    return torch.cat((q.chunk(size)[rank], k, v)).flatten(0, 1)


@pytest.mark.parametrize("function", [shard_qkv, shard_by_rows, shard_at_once])
def test_every_right_way_to_cut_passes(function):
    assert text_of("shard_qkv", function) == f"{len(SHARD_QKV.cases)} checks passed"


def test_the_packages_rows_are_those_that_the_query_heads_need_on_many_shapes():
    rng = random.Random(10)
    for _ in range(60):
        size, group, dim = rng.choice([1, 2, 3, 4, 6, 8]), rng.choice([1, 2, 4]), rng.randrange(1, 5)
        kv = rng.choice([n for n in range(1, 13) if (n % size == 0 or size % n == 0) and n * group % size == 0] or [size])
        weight = torch.randn((group + 2) * kv * dim, 3)
        for rank in range(size):
            args = weight, kv * group, kv, rank, size
            assert torch.equal(shard_qkv(*args), shard_by_rows(*args)), args[1:]


def bias_after_on_every_rank(x, weight, bias, rank, all_reduce):
    y = all_reduce(x @ weight.T)
    return y if bias is None else y + bias


def bias_by_another_rank(x, weight, bias, rank, all_reduce):
    total = all_reduce(torch.ones(1))  # how many ranks there are
    return all_reduce(F.linear(x, weight, bias if rank == total - 1 else None))


@pytest.mark.parametrize("function", [row_parallel, bias_after_on_every_rank, bias_by_another_rank])
def test_every_right_row_parallel_layer_passes(function):
    assert text_of("row_parallel", function) == f"{len(ROW_PARALLEL.cases)} checks passed"


@pytest.mark.parametrize("name", ["shard_qkv", "row_parallel"])
@pytest.mark.parametrize("function", [stub, lambda *args: None, ..., None, above], ids=["raises", "None", "dots", "is None", "above"])
def test_a_stub_is_not_attempted(name, function):
    assert text_of(name, function).startswith("not attempted yet")


@pytest.mark.parametrize("value", [Strange(), 1j, "yes", [True], torch.ones(2, 2).to_sparse(), {}], ids=lambda value: type(value).__name__)
def test_no_answer_is_too_strange(value):
    assert text_of("row_parallel", lambda *args: value if args else None).startswith("check 1 of ")


@pytest.mark.parametrize("function, words", [
    (lambda x, weight, bias: x, "in this order: row_parallel(x, weight, bias, rank, all_reduce)"),
    (lambda *args: print(end="") if args else 1, "`return` hands it back"),
    (lambda x, weight, bias, rank, all_reduce: all_reduce(x @ weight), "the shapes of two tensors do not fit"),
    (lambda x, weight, bias, rank, all_reduce: all_reduce(x[rank:]), "every rank must call each collective"),
    (lambda x, weight, bias, rank, all_reduce: 1 / rank, "ZeroDivisionError"),
    (lambda *args: row_parallel(*args).tolist(), "returns a list where a tensor [T, out] is wanted"),
    (lambda *args: row_parallel(*args) if args[3] == 0 else all_and(None, args), "rank 1 returns None: every rank must return"),
    (lambda x, weight, bias, rank, all_reduce: row_parallel(x, weight, bias, rank, all_reduce)[:, rank:], "nothing in its shape may depend on rank"),
    (lambda x, weight, bias, rank, all_reduce: all_reduce([x @ weight.T]), "all_reduce takes one tensor"),
    (3, "give the function itself"),
])
def test_what_a_row_parallel_layer_does_wrong_is_told(function, words):
    assert words in " ".join(text_of("row_parallel", function).split())


def all_and(value, args):
    row_parallel(*args)
    return value


@pytest.mark.parametrize("index, name", [(0, "x"), (1, "weight"), (2, "bias")])
@pytest.mark.parametrize("only", [None, 1], ids=["every rank", "rank 1"])
def test_a_rank_that_changes_what_it_was_given_is_found(index, name, only):
    def function(*args):
        y = row_parallel(*args)
        if args[index] is not None and only in (None, args[3]):
            args[index].add_(1)
        return y

    assert f"changes its input {name} in place" in check.result("row_parallel", function).cause


def test_in_the_first_check_every_rank_has_something_to_add():
    """Else a rank without all_reduce would print the right numbers."""
    first = ROW_PARALLEL.cases[0].args
    parts = zip(first["x"].chunk(2, dim=1), first["weight"].chunk(2, dim=1))
    assert all((x @ weight.T).all() for x, weight in parts)


def test_only_halves_that_are_rounded_down_pass():
    """The cases tell // from round(), which goes to the even neighbour, and from a product of what was divided before."""
    for first in (lambda rank, kv, size: min(kv - 1, round(rank * kv / size)), lambda rank, kv, size: rank * (kv // size)):
        def function(weight, num_heads, num_kv_heads, rank, size):
            heads = weight.view(num_heads + 2 * num_kv_heads, -1, weight.shape[1])
            start, held, own = first(rank, num_kv_heads, size), max(1, num_kv_heads // size), num_heads // size
            rows = [*range(rank * own, (rank + 1) * own)]
            return heads[rows + [num_heads + part * num_kv_heads + start + n for part in (0, 1) for n in range(held)]].flatten(0, 1)
        assert check.result("shard_qkv", function).status == "failed"


def test_one_rank_alone_is_no_excuse_for_the_bias():
    """Most wrong answers are right on one rank: the cases must not be of that kind."""
    assert sum(case.args["size"] > 2 and case.args["bias"] is not None for case in ROW_PARALLEL.cases) >= 3


# --- the planted fault ------------------------------------------------------------------------------------------------------------

def by_hand(x, size):
    """The MLP in plain Python: right, and with the sums in the place of the pieces."""
    a, b = x
    units, down = [a - 2 * b, b - 2 * a, a - b, b - a], [[1, 0, 2, 1], [0, 1, 1, 3]]
    each = 4 // size
    summed = [sum(units[place % each::each]) for place in range(4)]
    return [[sum(w * max(0, u) for w, u in zip(row, which)) for row in down] for which in (units, summed)]


def test_the_fault_is_exposed_where_arithmetic_says_so():
    for a, b, size in itertools.product(range(-9, 10, 3), range(-9, 10, 3), (1, 2, 4)):
        right, wrong = by_hand([a, b], size)
        text = attempt("reduced_columns", x=[a, b], ranks=size)
        assert text.startswith("exposed: " if right != wrong else "not exposed: ") and str(right) in text
        assert right == wrong or str(wrong) in text


def test_on_several_ranks_only_equal_numbers_that_are_not_negative_hide_the_fault():
    """What the hint says of them, that relu makes 0 of every unit, holds for no other input."""
    for a, b, size in itertools.product(range(-9, 10), range(-9, 10), (2, 4)):
        right, wrong = by_hand([a, b], size)
        assert (right == wrong) == (a == b >= 0)


@pytest.mark.parametrize("inputs, words", [
    (dict(x=[1, 1], ranks=2), "the four units are [-1, -1, 0, 0]: relu makes 0 of each"), (dict(x=[0, 0], ranks=4), "Take another x"),
    (dict(x=[1, 0], ranks=1), "with one rank an all-reduce returns what it was given"),
    (dict(x=[1, 0], ranks=3), "ranks must divide the 4 units: use one of 1, 2, 4, got 3"), (dict(x=[1], ranks=2), "a list of 2 whole numbers"),
    (dict(x=[1, 0.5], ranks=2), "must be a whole number"), (dict(x=[10, 0], ranks=2), "must be -9 to 9, got 10"), (dict(x=None, ranks=2), "not attempted yet"),
])
def test_an_input_that_exposes_nothing_is_answered(inputs, words):
    assert words in attempt("reduced_columns", **inputs)


# --- the real model on threads ----------------------------------------------------------------------------------------------------

PROMPTS = [[5, 17, 40, 8, 3], [33, 62, 11], list(range(3, 24))]


@pytest.fixture(scope="module", params=[("llama-biased", 4), ("qwen3", 2), ("llama-tied", 1)], ids=lambda param: f"{param[0]}-{param[1]}")
def tiny(request, tmp_path_factory):
    family, size = request.param
    directory = tmp_path_factory.mktemp(family)
    tiny_models.save(family, directory, hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=80)
    with ThreadRunner(str(directory), 1) as runner:
        want = runner.generate(PROMPTS, [6, 6, 6])
    return str(directory), size, want


@pytest.mark.parametrize("name, function", [("shard_qkv", shard_at_once), ("row_parallel", bias_after_on_every_rank)])
def test_a_learners_function_serves_every_layer(tiny, capsys, name, function):
    directory, size, want = tiny
    seen = []

    def counted(*args):
        seen.append(args)
        return function(*args)

    getattr(plug_parallel, name)(counted, directory, size, PROMPTS, want)
    assert capsys.readouterr().out.endswith("the same tokens as one rank's: True\n")
    of_checks = len(SHARD_QKV.cases) if name == "shard_qkv" else sum(case.args["size"] for case in ROW_PARALLEL.cases)
    a_step = 3 * size * (1 if name == "shard_qkv" else 2)  # 3 layers, two of these in each
    assert len(seen) - of_checks == a_step * (1 if name == "shard_qkv" else 6)


def test_rows_in_lists_serve_as_they_pass_and_what_fits_the_checks_alone_is_told_in_a_line(tiny, capsys):
    plug_parallel.shard_qkv(lambda *args: shard_qkv(*args).tolist(), *tiny[:2], PROMPTS, tiny[2])
    assert capsys.readouterr().out.endswith("the same tokens as one rank's: True\n")
    plug_parallel.shard_qkv(lambda weight, *args: shard_qkv(weight, *args)[:-1 if weight.shape[1] == 64 else None], *tiny[:2], PROMPTS, tiny[2])
    plug_parallel.shard_qkv(lambda weight, *args: shard_qkv(weight, *args) if weight.shape[1] < 64 else 1 // 0, *tiny[:2], PROMPTS, tiny[2])
    plug_parallel.row_parallel(lambda x, *args: row_parallel(x, *args) if x.shape[1] < 8 else 1 // 0, *tiny[:2], PROMPTS, tiny[2])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("your function returned [") and "rank 0 needs [" in first
    assert second.startswith(told := "your function raised ZeroDivisionError") and third.startswith(told)


def test_other_weights_give_other_tokens(tiny, capsys):
    """What the comparison in the plug rests on: the learner's weights are those that run."""
    directory, size, want = tiny

    def zeros(module, rank, whole):
        for layer in module.modules():
            if hasattr(layer, "qkv_proj"):
                layer.qkv_proj.weight.zero_()

    with torch.no_grad(), ThreadRunner(directory, size, zeros) as runner:
        assert runner.generate(PROMPTS, [6, 6, 6]) != want


@pytest.mark.parametrize("function, words", [(stub, "not attempted yet"), (None, "not attempted yet"), (above, "run the check above first"),
                                             (lambda *args: 1 / 0, "run the check above first: check.row_parallel does not pass yet")])
def test_a_function_that_its_check_refuses_is_not_run(tiny, capsys, function, words):
    plug_parallel.row_parallel(function, *tiny[:2], PROMPTS, tiny[2])
    out = capsys.readouterr().out
    assert words in out and out.count("\n") == 1


def test_kv_heads_fewer_than_ranks_are_held_twice_and_a_number_that_does_not_divide_is_refused():
    prompts, answers = [[5, 6, 7, 8, 9], list(range(20, 37))], [6, 6]
    with random_model() as directory:
        with ThreadRunner(directory, 1, load_format="dummy") as runner:
            want, [whole] = runner.generate(prompts, answers), [rank.pool.cache for rank in runner.runners]
        with ThreadRunner(directory, 4, load_format="dummy") as runner:
            assert runner.generate(prompts, answers) == want and len(set(want[0])) > 3
            caches = [rank.pool.cache for rank in runner.runners]
        assert torch.equal(caches[0], caches[1]) and torch.equal(caches[2], caches[3]) and not torch.equal(caches[0], caches[2])
        assert torch.allclose(torch.cat(caches[::2], dim=4), whole, atol=1e-5)
        with pytest.raises(ValueError, match="use one of 1, 2, 4, 8"):
            ThreadRunner(directory, 3, load_format="dummy")


# --- the view ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def engine():
    with random_model() as directory, ThreadRunner(directory, 4, load_format="dummy") as runner:
        yield runner.engine(num_blocks=16, block_size=4)


def test_the_view_draws_a_pool_for_each_rank_with_the_heads_it_holds(engine):
    view = RankView(engine, ranks=4, heads=(8, 2))
    engine.add([5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert [list(view.kv_heads(rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(view.query_heads(rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    scene = view.scene(view.steps[0])
    texts = [item.text for item in scene.items if item.text]
    assert texts.count("A") >= 4 and all(f"rank {rank}" in texts for rank in range(4))
    assert "read by query heads 2 to 3; the same K/V on rank 0" in texts and "Rank 2 holds kv head 1." in scene.alt
    assert sum(item.text == "kv 1" and getattr(item, "border", "") == "thick" for item in scene.items) == 2
    assert all(0 <= item.x <= scene.width and 0 <= item.y <= scene.height for item in scene.items)
    assert view.figure() is not None and "RankView: 4 ranks, 16 blocks each" == repr(view)
    view.close()


def test_a_view_without_ranks_says_what_it_needs(engine):
    with pytest.raises(ValueError, match="give ranks=3 and heads="):
        RankView(engine)


# --- predictions and saved figures ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"architectures": ["LlamaForCausalLM"]}])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_predicted_bytes_are_those_of_real_ranks(changes, size):
    with random_model(**changes) as directory, ThreadRunner(directory, size, load_format="dummy") as runner:
        held = [rank.weight_bytes for rank in runner.runners]
        shape = json.loads(Path(directory, "config.json").read_text())
        own = scaling.rank_bytes(shape, size, itemsize=4)
        assert held == [own.held] * size and own.kv == runner.runners[0].spec.bytes_per_token
        head = runner.runners[0].model.lm_head.weight.nbytes
        assert own.held - own.read == (0 if shape["tie_word_embeddings"] else head)


def test_more_ranks_read_less_and_talk_more():
    shape, pair = scaling.SHAPES["qwen3-8b"], scaling.PAIRS["H200"]
    one, two = (scaling.decode_ms(shape, pair, ranks, 64) for ranks in (1, 2))
    assert two["weights"] == pytest.approx(one["weights"] / 2, rel=1e-3) and two["K/V"] == pytest.approx(one["K/V"] / 2)
    assert two["launches, host"] == one["launches, host"] and one["all-reduces: latency"] == one["all-reduces: bytes"] == 0
    assert two["all-reduces: latency"] == pytest.approx(74 * 10e-3)
    sent = 73 * 64 * 4096 * 2 + 64 * 75968 * 2  # on two ranks a ring sends as much as the tensor has
    assert two["all-reduces: bytes"] == pytest.approx(1e3 * sent / 450e9)
    assert not scaling.fits(shape, scaling.PAIRS["T4"], 1) and scaling.fits(shape, scaling.PAIRS["T4"], 2)
    assert sum("too large" in line for line in scaling.lines()) == 2


def raw(shape="qwen3-0.6b", device="NVIDIA H200"):
    throughput = [{"ranks": ranks, "eager": eager, "dtype": "torch.bfloat16", "graphs": not eager, "sequences": 64, "prompt": 128, "answer": 128,
                   "seconds": [1.0, 1.1], "tokens_per_second": 1000.0 * ranks, "step_ms": 64 / ranks + eager, "rank_weight_bytes": 1_200_000_000 // ranks}
                  for ranks in (1, 2) for eager in (False, True)]
    reduce = {"ranks": 2, "rows": 64, "bytes": 131072, "count": 57, "us": 12.345678, "predicted_us": 11.0, "step_ms": 0.7, "predicted_step_ms": 0.6,
              "latency_us": 10.0, "bandwidth_gb_s": 300.0}
    step = {"ranks": 2, "eager": False, "sequences": 64, "profiled_step_ms": 3.0, "kernels": {
        "ncclDevKernel_AllReduce": {"a_step": 57.0, "ms_a_step": 0.8, "median_us": 12.0}, "ncclDevKernel_AllGather": {"a_step": 1.0, "ms_a_step": 0.1, "median_us": 90.0}}}
    greedy = [{"ranks": ranks, "equal": ranks == 1, "tokens": 512, "distinct_tokens": 90, "gaps_where_parted": [2e-6] * (ranks - 1), "smallest_gap": 1e-6} for ranks in (1, 2)]
    return {"environment": {"device": device, "date": "2026-01-01", "versions": {"torch": "2.11"}}, "shape": shape, "throughput": throughput,
            "all_reduce": [reduce], "in_a_step": [step], "greedy": greedy,
            "prefill": [{"ranks": 2, "tokens": 8192, "overlap_chunk_size": chunk, "ms": 12.3, "all_ms": []} for chunk in (None, 1024)], "life": [{"create": 9.0, "error": "x", "killed_to_error": 0.1}], "wire": {"bytes": 1}}


def test_raw_files_are_condensed_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(two_gpus, "FILE", tmp_path / "two.json")
    assert list(two_gpus.lines(two_gpus.saved())) == [two_gpus.MISSING] and two_gpus.step_times({}) == {}
    found = two_gpus.condense([raw(), raw("qwen3-8b")])
    two_gpus.FILE.write_text(json.dumps(found))
    assert two_gpus.saved() == found and list(found["shapes"]) == ["qwen3-0.6b", "qwen3-8b"]
    text = "\n".join(two_gpus.lines(found))
    assert "NVIDIA H200, torch 2.11" in text and "2.00 times one GPU" in text and "12.3 us, 57 a step" in text
    assert "the same as one GPU's: False; where they part the two best logits are 2e-06 apart at most" in text
    assert "in a real step of   64: 58 kernels of NCCL, 0.90 ms together" in text and "a step of 8,192 tokens of prompts:   12.3 ms on 2 GPUs" in text
    times = two_gpus.step_times(found)
    assert times[("H200", "qwen3-0.6b", 64, 1)] == 64 and times[("H200", "qwen3-8b", 64, 2)] == 32 and len(times) == 4
    drawn = scaling.figure(times)
    assert "64.0" in " ".join(text.get_text() for text in drawn.axes[1].texts) and "measured" not in " ".join(text.get_text() for text in drawn.axes[0].texts)


def test_measuring_here_asks_the_benchmark_for_one_gpu_and_for_two(monkeypatch):
    from minivllm.bench import parallel, report

    asked, whole = [], raw()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(report, "environment", lambda device: whole["environment"])
    monkeypatch.setattr(parallel, "greedy", lambda directory, sizes, device: asked.append((sizes, device)) or whole["greedy"])

    def throughput(directory, size, batches, device, eager, rounds):
        asked.append((size, batches, device, eager, rounds))
        return {"throughput": [row for row in whole["throughput"] if row["ranks"] == size and not row["eager"]],
                "all_reduce": whole["all_reduce"] * (size - 1), "in_a_step": whole["in_a_step"] * (size - 1)}

    monkeypatch.setattr(parallel, "throughput", throughput)
    found = two_gpus.measure()
    assert asked == [([1, 2], "cuda"), (1, [1, 64], "cuda", False, 1), (2, [1, 64], "cuda", False, 1)]
    assert two_gpus.step_times(found) == {("H200", "qwen3-0.6b", 64, 1): 64, ("H200", "qwen3-0.6b", 64, 2): 32}
    assert "2.00 times one GPU" in "\n".join(two_gpus.lines(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="two GPUs are needed, and torch sees 1"):
        two_gpus.measure()


def test_what_was_saved_can_be_shown():
    found = two_gpus.saved()
    assert len(list(two_gpus.lines(found))) > 20 and ("H200", "qwen3-8b", 1, 2) in two_gpus.step_times(found)


def test_files_of_different_devices_are_refused():
    with pytest.raises(ValueError, match="of different devices: NVIDIA H200 and Tesla T4"):
        two_gpus.condense([raw(), raw(device="Tesla T4")])
    with pytest.raises(ValueError, match="at least one file"):
        two_gpus.condense([])


# --- a notebook that is interrupted -----------------------------------------------------------------------------------------------

MAKE = """
from minivllm import LLM, SamplingParams
llm = LLM({directory!r}, device="cpu", num_kv_blocks=64, max_model_len=250, tensor_parallel_size=2)
"""
RUN = """
while True:
    llm.generate([[5, 6, 7]] * 4, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), use_tqdm=False)
"""


def ended(client, message_id):
    """The reply to one cell."""
    while True:
        reply = client.get_shell_msg(timeout=120)
        if reply["parent_header"].get("msg_id") == message_id:
            return reply["content"]


@pytest.mark.slow
def test_an_interrupted_cell_leaves_the_ranks_usable_and_a_killed_kernel_leaves_none(tmp_path):
    tiny_models.save("qwen3", tmp_path)
    manager_module = pytest.importorskip("jupyter_client.manager")
    manager, client = manager_module.start_new_kernel(kernel_name="python3", startup_timeout=120)
    try:
        assert ended(client, client.execute(MAKE.format(directory=str(tmp_path))))["status"] == "ok"
        [rank] = [child for child in psutil.Process(manager.provisioner.pid).children(recursive=True) if "minivllm.worker.rank" in child.cmdline()]
        running = client.execute(RUN)
        time.sleep(1.0)
        manager.interrupt_kernel()
        assert ended(client, running)["ename"] == "KeyboardInterrupt" and rank.is_running()
        again = ended(client, client.execute("out = llm.generate([[5]], use_tqdm=False); assert llm.engine.blocks.num_used_blocks == 0"))
        assert again["status"] == "ok"
        client.execute(RUN)
        time.sleep(1.0)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    gone, alive = psutil.wait_procs([rank], timeout=10)
    assert not alive
