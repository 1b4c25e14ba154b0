"""The exercise checkers: every listed mistake gets its own hint, every right way passes, and nothing a learner writes breaks them."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from lessons import in_one_line as text_of

from minivllm.teach import check, diagnose
from minivllm.teach.compare import show
from minivllm.teach.exercise import run
from minivllm.teach.exercises import EXERCISES, attention, graphs, kv_cache, paged, sharding

MISTAKES = [(name, index) for name, exercise in EXERCISES.items() for index in range(len(exercise.mistakes))]
NAMES = list(EXERCISES)


def stub(*args):
    raise NotImplementedError


# --- the list of mistakes ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, index", MISTAKES, ids=[f"{name}-{index}" for name, index in MISTAKES])
def test_every_mistake_gets_its_own_hint(name, index):
    mistake = EXERCISES[name].mistakes[index]
    text = text_of(name, mistake.function)
    assert mistake.hint in text and text.startswith("check ")
    assert text.index(" input ") < text.index(" got ") < text.index(" want ") < text.index(" likely cause: ")


@pytest.mark.parametrize("name", NAMES)
def test_exercises_are_well_made(name):
    exercise = EXERCISES[name]
    hints = [mistake.hint for mistake in exercise.mistakes]
    assert len(set(hints)) == len(hints) >= 4 and len(exercise.cases) >= 6
    assert len({tuple(case.args) for case in exercise.cases}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_passes(name):
    exercise = EXERCISES[name]
    assert text_of(name, exercise.reference) == f"{len(exercise.cases)} checks passed"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", [stub, lambda *args: None, lambda *args: ..., ..., None],
                         ids=["raises", "None", "dots", "is dots", "is None"])
def test_a_stub_is_not_attempted(name, function):
    assert text_of(name, function) == "not attempted yet"


@pytest.mark.parametrize("name", NAMES)
def test_a_checker_prints_and_returns_nothing(name, capsys):
    assert getattr(check, name)(EXERCISES[name].mistakes[0].function) is None
    first = capsys.readouterr().out
    getattr(check, name)(EXERCISES[name].mistakes[0].function)
    assert capsys.readouterr().out == first == str(check.result(name, EXERCISES[name].mistakes[0].function)) + "\n"
    assert getattr(check, name).__name__ == name and name in check.__all__


# --- references against something independent -------------------------------------------------------------------------------------

def loop_mask(num_queries, num_keys):
    return [[key <= num_keys - num_queries + query for key in range(num_keys)] for query in range(num_queries)]


def loop_attention(q, k, v):
    """One number at a time, in Python floats."""
    q, k, v, dtype = q.tolist(), k.tolist(), v.tolist(), q.dtype
    heads, groups, out = len(q[0]), len(q[0]) // len(k[0]), []
    for i, row in enumerate(q):
        readable = len(k) - len(q) + i + 1
        out.append([])
        for h in range(heads):
            scores = [sum(a * b for a, b in zip(row[h], k[j][h // groups])) / math.sqrt(len(row[h])) for j in range(readable)]
            weights = [math.exp(score - max(scores)) for score in scores]
            out[-1].append([sum(w * v[j][h // groups][d] for j, w in enumerate(weights)) / sum(weights) for d in range(len(row[h]))])
    return torch.tensor(out).to(dtype)


def decode_by_loops(q, k_cache, v_cache, block_table, context_len):
    """The pages' tokens in a list, then attention one number at a time."""
    size = k_cache.shape[1]
    keys, values = ([cache[block_table[p // size], p % size] for p in range(context_len)] for cache in (k_cache, v_cache))
    return loop_attention(q[None], torch.stack(keys), torch.stack(values))[0]


def pad_by_loops(buffer, columns, sizes):
    fitting = [size for size in sizes if size >= columns.shape[1]]
    if not fitting:
        raise ValueError
    for place in range(min(fitting)):
        for row in range(4):
            buffer[row, place] = columns[row, place] if place < columns.shape[1] else (0, 0, -1, 0)[row]
    return min(fitting)


def fused_by_loops(reads, writes, sizes, kept):
    total = 0
    for tensor, size in enumerate(sizes.tolist()):
        made = any(row[tensor] for row in writes.tolist())
        total += size * (kept[tensor].item() if made else any(row[tensor] for row in reads.tolist()))
    return total


def append_in_one_index(cache, length, k, v):
    if length + len(k) > cache.size(1):
        raise ValueError
    cache[:, length:length + len(k)].copy_(torch.stack((k, v)))
    return np.int64(length + len(k))


RIGHT = {
    "blocks_needed": [lambda n, s: math.ceil(n / s), lambda n, s: (n + s - 1) // s, lambda n, s: n // s + bool(n % s),
                      lambda n, s: np.int64(-(-n // s)),
                      lambda n, s: len(range(0, n, s))],
    "kv_bytes_per_token": [lambda n, k, d, b: math.prod((2, n, k, d, b)), lambda *shape: 2 * int(np.prod(shape))],
    "causal_mask": [loop_mask, lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(k - q), lambda q, k: np.tri(q, k, k - q, dtype=bool),
                    lambda q, k: tuple(map(tuple, loop_mask(q, k))), lambda q, k: ~torch.ones(q, k).triu(k - q + 1).bool(),
                    lambda q, k: torch.arange(k)[None] <= torch.arange(k - q, k)[:, None]],
    "grouped_query_attention": [loop_attention, attention._attend, lambda q, k, v: loop_attention(q, k, v).requires_grad_()],
    "append": [append_in_one_index],
    "wasted_share": [lambda n, m: sum(m - x for x in n) / (m * len(n)), lambda n, m: 1 - np.mean(n) / m,
                     lambda n, m: torch.tensor(1 - sum(n) / len(n) / m, dtype=torch.float64)],
    "idle_share": [lambda a, b: sum(max(a[i:i + b]) - x for i in range(0, len(a), b) for x in (a[i:i + b] + [0] * b)[:b])
                   / (b * sum(max(a[i:i + b]) for i in range(0, len(a), b)))],
    "slot_mapping": [paged.slot_mapping, lambda t, a, n, s: np.array([t[p // s] * s + p % s for p in range(a, a + n)]),
                     lambda t, a, n, s: torch.tensor(t)[torch.arange(a, a + n) // s] * s + torch.arange(a, a + n) % s,
                     lambda t, a, n, s: [b * s + i for b in t for i in range(s)][a:a + n]],
    "pad_batch": [graphs.pad_batch, pad_by_loops],
    "fused_bytes": [graphs.fused_bytes, fused_by_loops, lambda reads, writes, sizes, kept: int(
        (torch.where(writes.any(0), kept, reads.any(0)) * sizes).sum())],
    "paged_decode": [paged.paged_decode, decode_by_loops],
    "shard_qkv": [sharding.shard_qkv, lambda weight, h, k, rank, size: [
        row.tolist() for head, rows in enumerate(weight.view(h + 2 * k, -1, weight.shape[1])) for row in rows
        if (head * size // h == rank if head < h else (head - h) % k in {mine * k // h for mine in range(h) if mine * size // h == rank})]],
}


@pytest.mark.parametrize("name, index", [(name, index) for name in RIGHT for index in range(len(RIGHT[name]))])
def test_every_right_way_passes(name, index):
    assert text_of(name, RIGHT[name][index]).endswith("checks passed")


# --- what must not slip through ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_learning_all_but_the_last_answer_by_heart_is_not_enough(name):
    exercise = EXERCISES[name]
    known = exercise.cases[:-1]

    def by_heart(*args):
        for case in known:
            if show(list(args)) == show(list(case.args.values())):
                return exercise.reference(*args)
        return exercise.reference(*known[0].args.values()) if not exercise.changes else args[1]

    assert check.result(name, by_heart).check == len(exercise.cases)


@pytest.mark.parametrize("operation", [lambda q, k, v: q.mul_(2), lambda q, k, v: k.zero_(), lambda q, k, v: v[0].add_(1)], ids="qkv")
def test_inputs_changed_in_place_are_found(operation):
    def function(q, k, v):
        out = attention.grouped_query_attention(q, k, v)
        operation(q, k, v)
        return out

    assert "changes its input" in text_of("grouped_query_attention", function)


def test_a_sorted_or_emptied_list_is_found():
    def function(lengths, max_model_len):
        share = kv_cache.wasted_share(lengths, max_model_len)
        lengths.clear()
        return share

    assert "changes its input lengths in place" in text_of("wasted_share", function)


def test_append_may_change_its_cache_but_not_what_it_appends():
    def function(cache, length, k, v):
        length = kv_cache.append(cache, length, k, v)
        k.zero_()
        return length

    assert "changes its input k in place" in text_of("append", function)


@pytest.mark.parametrize("change, words", [
    (lambda out: out.double(), "the dtype is float64, wanted is float32; the values are right"),
    (lambda out: out * float("nan"), "NaNs"),
    (lambda out: out[None], "4 dimensions instead of 3"),
    (lambda out: out.transpose(1, 2), "H and D look transposed"),
    (lambda out: out + 0.01, "the values are wrong"),
    (lambda out: "text", "returns a str where a tensor [Tq, H, D] is wanted"),
    (lambda out: 3, "returns an int where a tensor [Tq, H, D] is wanted"),
    (lambda out: [[1], [2, 3]], "returns a list where a tensor"),
])
def test_what_is_wrong_with_a_tensor_is_said(change, words):
    assert words in text_of("grouped_query_attention", lambda q, k, v: change(attention.grouped_query_attention(q, k, v)))


def test_a_square_result_that_is_transposed_is_told_by_its_values():
    crosswise = lambda q, k: loop_mask(q, k) if q != k else list(zip(*loop_mask(q, k)))
    assert "dimensions 0 and 1 look transposed" in text_of("causal_mask", crosswise)


@pytest.mark.parametrize("turn", [lambda slots: [float(slot) for slot in slots], lambda slots: tuple(slot / 1 for slot in slots),
                                  lambda slots: [torch.tensor(float(slot)) for slot in slots], lambda slots: [*slots[:-1], float(slots[-1])]],
                         ids=["list", "tuple", "tensors", "one of them"])
def test_floats_in_a_list_are_no_slots(turn):
    text = text_of("slot_mapping", lambda *args: turn(list(paged.slot_mapping(*args))))
    assert "the list holds floats where whole numbers are wanted" in text


@pytest.mark.parametrize("value, words", [
    (True, "returns a bool"), ("2", "returns a str"), (float("nan"), "float"), ([2], "returns a list"), (1.0, "float"),
])
def test_what_is_wrong_with_a_number_is_said(value, words):
    assert words in text_of("blocks_needed", lambda n, s: value)


def test_a_wrong_answer_that_agrees_with_a_mistake_by_chance_gets_no_hint_of_it():
    assert "the number is wrong" in text_of("blocks_needed", lambda n, s: 1)  # as n // s gives in the first case


def test_a_mistake_is_known_though_another_case_differs():
    hint = EXERCISES["causal_mask"].mistakes[0].hint
    assert hint in text_of("causal_mask", lambda q, k: torch.ones(q, k).tril().bool() if k < 64 else 1 / 0)


def test_a_mistake_is_known_beside_a_second_one():
    function = lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v  # no scale either
    assert "multiplies heads with heads" in text_of("grouped_query_attention", function)


def test_a_forgotten_return_is_told():
    assert "is a `return` missing?" in text_of("append", lambda cache, length, k, v: kv_cache.append(cache, length, k, v) and None)


def comes_to_its_end(buffer, columns, sizes):
    for size in sizes:
        if columns.shape[1] <= size:
            return graphs.pad_batch(buffer, columns, sizes)


@pytest.mark.parametrize("name, function, words", [
    ("pad_batch", comes_to_its_end, "it comes to its end, or to an empty `return`, and gives None"),
    ("append", lambda cache, length, k, v: kv_cache.append(cache, length, k, v) if length + len(k) <= cache.shape[1] else ValueError("full"),
     "hands the ValueError back instead of raising it: write `raise`, not `return`"),
    ("append", lambda cache, length, k, v: kv_cache.append(cache, length, k, v) if length + len(k) <= cache.shape[1] else 77,
     "it must raise ValueError here: it does not"),
], ids=["None", "returned", "value"])
def test_where_an_error_is_wanted_no_return_is_missing(name, function, words):
    text = text_of(name, function)
    assert words in text and "want raise ValueError" in text and "is a `return` missing?" not in text


def test_one_case_left_as_a_stub_is_a_failure_of_that_case():
    def function(num_queries, num_keys):
        if num_queries != num_keys:
            raise NotImplementedError
        return attention.causal_mask(num_queries, num_keys)

    found = check.result("causal_mask", function)
    assert found.check == 2 and "this case still reaches the stub" in found.text


def test_an_exception_is_told_with_its_line():
    def function(num_tokens, block_size):
        sizes = [block_size]
        return sizes[num_tokens]

    text = text_of("blocks_needed", function)
    assert "raised IndexError: list index out of range (your line 3: return sizes[num_tokens])" in text
    assert "an index runs past the end" in text


def test_what_is_kept_of_the_right_answer_keeps_nothing_of_who_asked(monkeypatch):
    monkeypatch.setattr(diagnose, "_kept", {})

    def ask():
        mine = torch.zeros(3)
        assert check.result("append", kv_cache.append).status == "passed"  # the right answer raises in some cases, and so do the mistakes
        assert check.result("append", lambda *args: 0).status == "failed"
        return weakref.ref(mine)

    mine = ask()
    gc.collect()
    assert mine() is None and any(outcome.raised for outcomes in diagnose._kept.values() for outcome in outcomes)


THREE = torch.zeros(3, 4)


@pytest.mark.parametrize("operation, words", [
    (lambda: THREE[torch.arange(3) / 2], "must hold whole numbers or booleans: a / b gives floats, a // b whole numbers"),
    (lambda: THREE[1.5], "an index must be a whole number"),
    (lambda: np.zeros(3)[1.5], "an index must be a whole number"),
    (lambda: THREE[torch.ones(2, 4).bool()], "must have the shape of what it indexes"),
    (lambda: np.zeros(3)[np.ones(2, dtype=bool)], "must have the shape of what it indexes"),
    (lambda: THREE[torch.arange(2), torch.arange(3)], "must have shapes that broadcast"),
    (lambda: np.zeros((3, 4))[np.arange(2), np.arange(3)], "must have shapes that broadcast"),
    (lambda: THREE[0, 0, 0], "more indices than dimensions"),
    (lambda: torch.tensor(3)[0], "more indices than dimensions"),
    (lambda: THREE.sum(5), "there is no dimension of this number"),
    (lambda: [].pop(), "the list is empty"),
    (lambda: THREE[7], "an index runs past the end"),
    (lambda: [1][7], "an index runs past the end"),
])
def test_each_kind_of_index_error_gets_its_own_advice(operation, words):
    with pytest.raises(IndexError):
        operation()
    assert words in text_of("causal_mask", lambda q, k: operation())


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), RuntimeError("The size of tensor a (3) must match\nmore"),
                                   KeyError("x"), OSError(), ValueError("long " * 100), AttributeError("no attribute"),
                                   RecursionError(), MemoryError()])
def test_every_exception_becomes_a_few_lines(error):
    def function(*args):
        raise error

    text = text_of("causal_mask", function)
    assert f"raised {type(error).__name__}" in text and "likely cause" in text


class Strange:
    def __eq__(self, other):
        raise RuntimeError("no comparison")

    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [Strange(), Strange, iter([1]), {"a": torch.ones(2)}, 1j, float("inf"), 10**400, [10**30], [],
                                   torch.tensor([]), [None], [stub], torch.ones(2, 2).to_sparse(), torch.ones(3, 3, dtype=torch.complex64),
                                   np.array(["x"]), np.zeros((0, 3)), "x" * 1000, object()],
                         ids=lambda value: type(value).__name__)
def test_no_answer_is_too_strange(name, value):
    assert text_of(name, lambda *args: value).startswith("check 1 of ")


def test_a_result_that_carries_gradients_passes():
    def function(q, k, v):
        return attention.grouped_query_attention(q.clone().requires_grad_(), k, v) * 1

    assert text_of("grouped_query_attention", function) == "7 checks passed"


def test_a_wrong_signature_is_told():
    assert "in this order: blocks_needed(num_tokens, block_size)" in text_of("blocks_needed", lambda num_tokens: 1)


def test_the_result_instead_of_the_function_is_told():
    assert "give the function itself" in text_of("blocks_needed", 3)
    assert "give the function itself" in text_of("causal_mask", torch.ones(2, 2))


def test_a_refused_append_must_leave_the_cache_alone_and_raise_the_right_error():
    def asserts(cache, length, k, v):
        assert length + len(k) <= cache.shape[1], "full"
        return kv_cache.append(cache, length, k, v)

    text = text_of("append", asserts)
    assert "raised AssertionError: full" in text and "want raise ValueError" in text


def refuses(error):
    def function(cache, length, k, v):
        if length + len(k) > cache.shape[1]:
            raise error("full")
        return kv_cache.append(cache, length, k, v)
    return function


@pytest.mark.parametrize("error", [Exception, RuntimeError, IndexError, AssertionError])
def test_the_wrong_kind_of_exception_is_named(error):
    assert f"the exception must be ValueError, yours is {error.__name__}" in text_of("append", refuses(error))


def test_a_refusal_that_is_no_listed_mistake_is_told():
    def function(cache, length, k, v):
        if len(k) > 1 or length > 7:
            raise ValueError("full")
        return kv_cache.append(cache, length, k, v)

    assert "you refuse although it fits: the capacity is cache.shape[1]" in text_of("append", function)


def test_a_refusal_elsewhere_is_the_learners_too():
    def function(num_queries, num_keys):
        assert num_queries == num_keys, "not square"
        return attention.causal_mask(num_queries, num_keys)

    assert "your own `raise` or `assert` stops this call" in text_of("causal_mask", function)


def test_an_error_of_torchs_own_is_not_taken_for_the_learners():
    function = lambda q, k: torch.zeros(2, 3) + torch.zeros(3, 2)
    assert "your own `raise`" not in text_of("causal_mask", function)


def test_a_missing_check_is_the_cause_of_an_odd_error():
    def function(cache, length, k, v):
        for half, new in enumerate((k, v)):
            for token in range(len(new)):
                cache[half, length + token] = new[token]
        return length + len(k)

    text = text_of("append", function)
    assert "check 4 of 7" in text and "must be refused with ValueError before anything is written" in text


def test_an_append_that_fails_for_another_reason_is_not_taken_for_torch_cat():
    def function(cache, length, k, v):
        cache[:, length:length + len(k)] = torch.zeros(7, 7)
        return length + len(k)

    assert "torch.cat" not in text_of("append", function)


def test_append_returns_an_int_and_not_a_tensor():
    function = lambda cache, length, k, v: torch.tensor(kv_cache.append(cache, length, k, v))
    assert "returns a tensor where a plain int is wanted" in text_of("append", function)


def test_one_dimension_is_singular():
    assert "1 dimension instead of 2" in text_of("causal_mask", lambda q, k: torch.ones(k).bool())


def test_names_that_do_not_exist_are_told():
    with pytest.raises(AttributeError, match="no checker called 'casual_mask'; there are"):
        check.casual_mask
    with pytest.raises(KeyError, match="no exercise"):
        check.result("casual_mask", stub)


def test_a_case_survives_what_a_function_does_to_its_arguments():
    case = EXERCISES["append"].cases[0]
    before = case.args["cache"].clone()
    run(lambda cache, *args: cache.fill_(9), case)
    assert torch.equal(case.args["cache"], before)
