"""Notebook 03's tools: Triton on paper, the kernel exercises as a learner meets them, the view of slots, the measurement."""

import itertools
import json
import random

import pytest
import tiny_models
import torch
from engine_fakes import make_engine, tiny_config

from minivllm import LLM, SamplingParams
from minivllm.kernels.jit import INTERPRETED, triton
from minivllm.kernels.jit import tl as real_tl
from minivllm.kernels.store_kvcache import store_kvcache_torch
from minivllm.teach import SlotView, check, paper_triton, plug_store, store_bench
from minivllm.teach.paper_triton import NotOnPaper, OutOfBounds, launch, told
from minivllm.teach.views.slots import slot_mapping
from minivllm.worker import batch

tl = real_tl if real_tl is not None else paper_triton.tl
jit = triton.jit if triton is not None else paper_triton.triton.jit


@jit
def right_rows(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        columns = tl.arange(0, WIDTH)
        tl.store(k_cache + slot * WIDTH + columns, tl.load(k + token * k_stride + columns))
        tl.store(v_cache + slot * WIDTH + columns, tl.load(v + token * v_stride + columns))


@jit
def far_out(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    tl.store(k_cache + 10**12 + columns, tl.load(k + columns))


@jit
def one_below(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, WIDTH)
    tl.store(k_cache + slot * WIDTH + columns, tl.load(k + token * k_stride + columns))
    tl.store(v_cache + slot * WIDTH + columns, tl.load(v + token * v_stride + columns))


@jit
def halves(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    tl.store(k_cache + columns / 2, tl.load(k + columns))


@jit
def three_wide(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
    columns = tl.arange(0, 3)
    tl.store(k_cache + columns, tl.load(k + columns))


@jit
def stub(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
    raise NotImplementedError


@jit
def too_few(k, v, k_cache):
    tl.store(k_cache, tl.load(k))


@jit
def right_heads(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, K: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, TILE)
    mask = (columns < D) & (slot >= 0)
    to = (slot * K + head) * D + columns
    tl.store(k_cache + to, tl.load(k + token * k_stride + head * D + columns, mask=mask), mask=mask)
    tl.store(v_cache + to, tl.load(v + token * v_stride + head * D + columns, mask=mask, other=0.0), mask=mask)


@jit
def without_tile_mask(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, K: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, TILE)
    to = (slot * K + head) * D + columns
    tl.store(k_cache + to, tl.load(k + token * k_stride + head * D + columns), mask=slot >= 0)
    tl.store(v_cache + to, tl.load(v + token * v_stride + head * D + columns), mask=slot >= 0)


def text_of(name, kernel):
    return " ".join(check.result(name, kernel).text.split())


# --- the exercises, as a learner meets them ---------------------------------------------------------------------------------------

def test_right_kernels_pass():
    assert text_of("store_kernel", right_rows) == "6 checks passed"
    assert text_of("store_heads_kernel", right_heads) == "7 checks passed"


def test_a_stub_is_not_attempted():
    assert text_of("store_kernel", stub) == "not attempted yet"


@pytest.mark.parametrize("name, kernel, words", [
    ("store_kernel", far_out, "program 0 writes to k_cache at offset 1000000000000; it has 16 numbers"),
    ("store_kernel", one_below, "slot -1 is not left out"),
    ("store_kernel", halves, "an offset is a whole number, divide with //"),
    ("store_kernel", three_wide, "the size of a tile must be a power of two"),
    ("store_kernel", too_few, "the kernel must take k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH"),
    ("store_kernel", paper_triton.function_of(right_rows), "put @triton.jit on the line above"),
    ("store_heads_kernel", without_tile_mask, "nothing masks the end of the tile"),
    ("store_heads_kernel", right_rows, "the kernel must take k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, K, D, TILE"),
])
def test_a_wrong_kernel_is_a_message(name, kernel, words):
    assert words in text_of(name, kernel)


def test_the_learners_line_is_named():
    assert "(your line 4: tl.store(k_cache + 10**12 + columns" in text_of("store_kernel", far_out)


@pytest.mark.skipif(not INTERPRETED or triton is None, reason="needs triton and TRITON_INTERPRET=1")
def test_what_passes_on_paper_runs_in_triton_too(monkeypatch):
    """A kernel that Triton's own interpreter refuses must not pass."""
    monkeypatch.setattr(paper_triton.Language, "extra", lambda self: None, raising=False)

    @jit
    def known_on_paper_only(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
        tl.extra()
        token = tl.program_id(0)
        slot = tl.load(slot_mapping + token)
        columns = tl.arange(0, WIDTH)
        tl.store(k_cache + slot * WIDTH + columns, tl.load(k + token * k_stride + columns), mask=slot >= 0)
        tl.store(v_cache + slot * WIDTH + columns, tl.load(v + token * v_stride + columns), mask=slot >= 0)

    assert check.result("store_kernel", known_on_paper_only).status == "failed"


# --- on paper ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not INTERPRETED or triton is None, reason="needs triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("seed", range(4))
def test_paper_agrees_with_triton_and_torch(seed):
    generator = torch.Generator().manual_seed(seed)
    T, K, D, tile = 1 + seed, 3, (5, 8, 80, 2)[seed], (8, 8, 128, 2)[seed]
    qkv = torch.randn(T, 3 * K, D, generator=generator)
    k, v, slots = qkv[:, K:2 * K], qkv[:, 2 * K:], torch.randperm(9, generator=generator)[:T]
    slots[seed // 2] = -1
    caches = [torch.zeros(2, 9, K, D) for _ in range(3)]
    launch(right_heads, (T, K), k, v, *caches[0], slots, k.stride(0), v.stride(0), K=K, D=D, TILE=tile, num_warps=4)
    right_heads[(T, K)](k, v, *caches[1], slots, k.stride(0), v.stride(0), K=K, D=D, TILE=tile)
    store_kvcache_torch(k, v, *caches[2], slots)
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[2])


def test_what_programs_did_is_told():
    k = torch.arange(4.0).view(2, 1, 2)
    notes = launch(right_rows, (2,), k, -k, *torch.zeros(2, 4, 1, 2), torch.tensor([3, -1]), 2, 2, 2)
    assert list(told(notes)) == ["program 0: load slot_mapping[0], load k[0..1], store k_cache[6..7], load v[0..1], store v_cache[6..7]",
                                 "program 1: load slot_mapping[1]"]


def test_addresses_are_checked_against_the_whole_memory_and_masked_ones_are_not():
    language, memory = paper_triton.Language(), torch.arange(10.0)
    view = paper_triton.Pointer("x", memory[4:6])
    assert language.load(view - 4).item() == 0 and language.load(view + 5).item() == 9
    for offset in (-5, 6):
        with pytest.raises(OutOfBounds, match=f"reads from x at offset {offset}; it has 2 numbers"):
            language.load(view + offset)
    assert language.load(view + 100, mask=False, other=7.0).item() == 7
    language.store(view + torch.tensor([0, 100]), torch.tensor([50.0, 60.0]), mask=torch.tensor([True, False]))
    assert memory[4] == 50 and memory.sum() == 45 - 4 + 50


@pytest.mark.parametrize("use, words", [
    (lambda t: t.dot, "tl.dot is not known here"), (lambda t: t.arange(0, 6), "must be a power of two"), (lambda t: t.load(3), "needs an address"),
    (lambda t: paper_triton.Pointer("a", torch.ones(2))[0], r"tl.load\(a \+ offsets\) reads"),
    (lambda t: paper_triton.Pointer("a", torch.ones(2)).__setitem__(0, 1), r"tl.store\(a \+ offsets, values\) writes"),
    (lambda t: paper_triton.Pointer("a", torch.ones(2)).stride, "it has no stride; what a kernel must know of it is a parameter"),
    (lambda t: paper_triton.Pointer("a", torch.ones(2)) + paper_triton.Pointer("b", torch.ones(2)), "adds two addresses"),
])
def test_what_paper_refuses(use, words):
    with pytest.raises(NotOnPaper, match=words):
        use(paper_triton.Language())


def test_offsets_of_32_bits_overflow_as_on_a_gpu():
    language = paper_triton.Language((1,))
    language.program = (2**20,)
    assert (language.program_id(0) * 4096).item() == 0


def test_the_stand_in_runs_a_kernel_without_triton():
    def copy(source, target, N: int):
        columns = paper_triton.tl.arange(0, N)
        paper_triton.tl.store(target + columns, paper_triton.tl.load(source + columns))

    globals_before = dict(copy.__globals__)
    source, target = torch.arange(4.0), torch.zeros(4)
    names = {"tl": paper_triton.tl}
    exec("def copy(source, target, N):\n    at = tl.arange(0, N)\n    tl.store(target + at, tl.load(source + at))", names)
    paper_triton.triton.jit(names["copy"])[(1,)](source, target, N=4)
    assert torch.equal(source, target) and names["tl"] is paper_triton.tl and copy.__globals__ == globals_before


# --- the view ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(8))
def test_the_view_shows_the_slots_that_the_worker_writes(seed):
    """Against the worker's own mapping of each plan, over preemptions, prefix hits, chunks and full hits."""
    rng = random.Random(seed)
    engine = make_engine(tiny_config(block_size=2, num_blocks=7, max_num_seqs=3, budget=5), eos=())
    view, wanted, execute = SlotView(engine), {}, engine.runner.execute

    def noting(plan):
        wanted[engine.scheduler.trace.step] = {row.seq_id: batch.slot_mapping(row, 2) for row in plan.rows}
        return execute(plan)

    engine.runner.execute = noting
    for _ in range(6):
        prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 7))]
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=rng.randrange(1, 6)))
        for _ in range(rng.randrange(4)):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    assert len(wanted) > 5
    for step, mapping in wanted.items():
        assert slot_mapping(view.history.frame(step)) == mapping, step
        view.draw(view.history.frame(step))


def test_the_view_of_a_large_pool_says_what_to_do():
    with pytest.raises(ValueError, match="at most 24 blocks of 16 slots, and this pool has 40 of 2: take a BlockView"):
        SlotView(make_engine(tiny_config(2, 40)))
    engine = make_engine(tiny_config(2, 40))
    with pytest.raises(ValueError):
        SlotView(engine)
    assert not engine.observers


def test_the_view_tells_its_slots_to_who_does_not_see_it():
    engine = make_engine(tiny_config(4, 6), eos=())
    view = SlotView(engine)
    engine.add([1, 2, 3, 4, 1], SamplingParams(temperature=0, max_tokens=3))
    engine.step()
    assert "Slots written: A to 0, 1, 2, 3, 4." in view.scene().alt and repr(view) == "SlotView: 6 blocks of 4 slots"
    assert "<svg" in view.svg() and "slots 0, 1, 2, 3, 4" in view.svg()


# --- plugged into the model -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save("llama", directory)
    with pytest.warns(UserWarning, match="max_model_len"):
        llm = LLM(directory, num_kv_blocks=8, block_size=4, max_num_batched_tokens=5, max_num_seqs=2, device="cpu")
    yield llm
    llm.close()


def test_a_plugged_kernel_writes_the_models_cache(tiny, capsys, monkeypatch):
    prompt, ran = [5, 17, 40, 8, 33, 62, 11], []
    real = paper_triton.launch
    monkeypatch.setattr(plug_store.paper_triton, "launch", lambda *args: ran.append(args[1]) or real(*args))
    plug_store.store_heads_kernel(right_heads, tiny, prompt, max_tokens=4)
    assert "same tokens (4)" in capsys.readouterr().out
    layers, heads = tiny.model_config.num_layers, tiny.model_config.num_kv_heads
    assert ran[-layers:] == [(1, heads)] * layers


def test_a_kernel_that_does_not_pass_is_not_run_in_the_model(tiny, capsys):
    plug_store.store_heads_kernel(without_tile_mask, tiny, [5, 17], max_tokens=2)
    plug_store.store_heads_kernel(stub, tiny, [5, 17], max_tokens=2)
    assert capsys.readouterr().out.splitlines() == ["run the check above first: check.store_heads_kernel does not pass yet", "not attempted yet"]


# --- the measurement --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_candidates_write_the_same(device):
    K, D, place = 2, 8, torch.device(device)
    qkv = torch.randn(6, 4 * K, D, device=place)
    k, v, slots = qkv[:, K:2 * K], qkv[:, 3 * K:], torch.randperm(19, device=place)[:6]
    caches = []
    for store in store_bench.candidates(place).values():
        caches.append(torch.zeros(2, 20, K, D, device=place))
        store(k, v, *caches[-1], slots)
    assert len(caches) == (6 if device == "cuda" else 4)
    assert all(torch.equal(one, caches[0]) for one in caches) and torch.equal(caches[0][0, slots], k)


def test_padding_goes_to_the_spare_slot():
    k, caches = torch.ones(2, 1, 4), torch.zeros(2, 5, 1, 4)
    store_bench.spare_slot(k, k, *caches, torch.tensor([1, -1]))
    assert caches.sum(dim=(0, 2, 3)).tolist() == [0, 8, 0, 0, 8]


def test_what_measure_gives_is_what_is_saved_and_shown(monkeypatch):
    monkeypatch.setattr(store_bench, "SLOTS", 64)
    monkeypatch.setattr(store_bench, "copy_bandwidth", lambda device: 1e9)
    found = store_bench.measure("cpu", tokens=(1, 4), layers=2)
    saved = store_bench.saved()
    assert set(found) == set(saved) == set(json.loads(json.dumps(found)))
    assert set(found["eager"]) < set(saved["eager"]) and found["graph"] == {}
    assert all(len(row) == len(saved["tokens"]) for rows in (saved["eager"], saved["graph"]) for row in rows.values() if row)
    for figures in (found, saved):
        lines = list(store_bench.table(figures))
        assert len({len(line) for line in lines[1:] if not line.startswith(("launch", "in a"))}) == 1
    limit = [float(x) for x in list(store_bench.table(found))[-1].split()[-2:]]
    assert limit == pytest.approx([8.2, 32.8])  # 8,192 bytes a token at 1 GB/s
    assert list(store_bench.table(None)) == ["no saved figures: run this notebook on a GPU to measure them"]
    assert store_bench.figure(None) is None and store_bench.figure(saved).axes


def test_the_calls_of_a_measurement_write_every_layer_and_leave_the_last_slot(monkeypatch):
    monkeypatch.setattr(store_bench, "SLOTS", 8)
    pool = torch.zeros(3, 2, 8, store_bench.K, store_bench.D)
    for call in store_bench._calls(store_bench.indexed, pool, 7):
        call()
    filled = pool.flatten(3).any(dim=3)
    assert filled[:, :, :7].all() and not filled[:, :, 7].any()
    assert len(list(itertools.chain(*filled))) == 6
