"""Decode batches that are kept from step to step, and the CUDA graphs over them."""

import dataclasses
import random
import warnings
import weakref

import pytest
import tiny_models
import torch
from engine_fakes import make_engine, run_to_end, tiny_config

from minivllm import LLM, SamplingParams, attention
from minivllm.engine.step import StepPlan
from minivllm.worker.batch import build_batch
from minivllm.worker.cuda_graphs import DecodeGraphs, graph_sizes
from minivllm.worker.decode_batch import DecodeBatch, is_decode


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 100, 256, 300, 1000])
def test_sizes_end_with_the_most_and_grow(most):
    sizes = graph_sizes(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes)) and sizes[0] == 1


def decode_plans(seed, block_size=4):
    """The pure decode plans of a random run with hits and preemptions."""
    rng = random.Random(seed)
    engine = make_engine(tiny_config(block_size=block_size, num_blocks=24, max_num_seqs=6, budget=40), vocab=50)
    plans = []
    engine.runner.on_plan = lambda plan: plans.append(StepPlan([dataclasses.replace(row) for row in plan.rows]))
    for _ in range(14):
        prompt = [1, 2, 3, 4, 1, 2, 3, 4][:rng.choice([4, 8])] + [rng.randrange(1, 50) for _ in range(rng.randrange(3))]
        options = rng.choice([{}, {}, {"n": 2, "temperature": 1.0}, {"presence_penalty": 1.0}, {"min_tokens": 1, "logprobs": 2}, {"min_p": 0.1}])
        engine.add(prompt, SamplingParams(**{"max_tokens": rng.randrange(1, 20), "temperature": rng.choice([0.0, 0.8]), **options}))
        if rng.random() < 0.5:
            engine.step()
    run_to_end(engine)
    return [plan for plan in plans if is_decode(plan)]


@pytest.mark.parametrize("seed", range(6))
def test_a_kept_batch_holds_what_a_new_one_would(seed):
    backend, _ = attention.select("torch_sdpa", torch.device("cpu"))
    kept = DecodeBatch(8, 24, 4, torch.device("cpu"))
    plans = decode_plans(seed)
    assert len(plans) > 10
    for plan in plans:
        count = len(plan.rows)
        kept.load(plan, count + 2)
        new, metadata = build_batch(plan, 4, backend, torch.device("cpu")), kept.attention(count)
        assert torch.equal(kept.columns[0, :count], new.input_ids) and torch.equal(kept.columns[1, :count], new.positions)
        assert torch.equal(metadata.slot_mapping, new.attention.slot_mapping)
        assert torch.equal(metadata.context_lens, new.attention.context_lens)
        width = new.attention.block_tables.shape[1]
        for row, ours, theirs in zip(plan.rows, metadata.block_tables[:, :width], new.attention.block_tables):
            assert torch.equal(ours[:len(row.block_table)], theirs[:len(row.block_table)])
        assert torch.equal(metadata.cu_seqlens_q, new.attention.cu_seqlens_q)
        assert (kept.sampling.penalised, kept.sampling.logprob_rows) == (new.sampling.penalised, new.sampling.logprob_rows)
        for name in ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "siblings", "special"):
            ours, theirs = getattr(kept.sampling, name), getattr(new.sampling, name)
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), name
        assert kept.columns[2, count:count + 2].tolist() == [-1, -1] and kept.contexts[count:count + 2].tolist() == [0, 0]


def test_a_chunk_and_a_prefill_are_no_decode():
    plan = decode_plans(0)[0]
    row = plan.rows[0]
    assert is_decode(plan)
    assert not is_decode(StepPlan([dataclasses.replace(row, samples=False)]))
    assert not is_decode(StepPlan([row, dataclasses.replace(row, token_ids=[1, 2])]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    tiny_models.save("qwen3", path)
    return path


def generate(llm, temperature=0.0, count=5):
    prompts = [{"prompt_token_ids": [(7 * i + j) % 90 + 3 for j in range(1 + 5 * i)]} for i in range(count)]
    params = [SamplingParams(temperature=temperature, max_tokens=count + 1 + i, ignore_eos=True, seed=i) for i in range(count)]
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_the_triton_backend_gives_the_same_tokens_through_the_interpreter(directory):
    with LLM(directory, device="cpu", num_kv_blocks=20, block_size=16, attention_backend="torch_sdpa") as llm:
        want = generate(llm, count=3)
    for name in ("triton", "triton_t4"):
        with LLM(directory, device="cpu", num_kv_blocks=20, block_size=16, attention_backend=name) as llm:
            assert generate(llm, count=3) == want and llm.runner.backend.name == name and llm.runner.graphs is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_graph_equals_eager_bit_for_bit(directory, dtype):
    with LLM(directory, device="cuda", dtype=dtype, num_kv_blocks=40, block_size=16, max_num_seqs=12) as llm:
        generate(llm)
        graphs = llm.runner.graphs
        assert list(graphs.graphs) == [12, 8, 4, 2, 1] and graphs.num_replays > 5 and graphs.num_padded_rows > 0
        with torch.inference_mode():
            for size, (graph, hidden) in graphs.graphs.items():
                graph.replay()
                replayed = hidden.clone()
                assert torch.equal(graphs.forward(size), replayed) and replayed.isfinite().all()
                for count in {1, size // 2 + 1, size}:  # the output layer is outside, over the rows that are no padding
                    assert torch.equal(graphs.replay(size, count), llm.runner.model.compute_logits(replayed[:count]))


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_the_same_with_and_without_graphs(directory, temperature):
    answers = []
    for eager in (True, False):
        with LLM(directory, device="cuda", dtype="float32", num_kv_blocks=40, block_size=16, max_num_seqs=4, enforce_eager=eager) as llm:
            answers.append(generate(llm, temperature))
            assert (llm.runner.graphs is None) == eager
    assert answers[0] == answers[1]


@pytest.mark.gpu
def test_padding_writes_nothing(directory):
    with LLM(directory, device="cuda", num_kv_blocks=40, block_size=16, max_num_seqs=8) as llm:
        llm.runner.pool.cache.fill_(3.0)
        before = llm.runner.pool.cache.clone()
        for graph, _ in llm.runner.graphs.graphs.values():  # nothing was loaded: every row is padding
            graph.replay()
        assert torch.equal(llm.runner.pool.cache, before)


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("pool", [{"num_kv_blocks": 40}, {"gpu_memory_utilization": 0.3}])
def test_a_failed_capture_is_said_once_and_leaves_everything_usable(directory, monkeypatch, pool):
    calls = []
    forward = DecodeGraphs.forward

    def failing(self, size):
        calls.append(size)
        if len(calls) == 4:
            raise RuntimeError("planted")
        return forward(self, size)

    monkeypatch.setattr(DecodeGraphs, "forward", failing)
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    with pytest.warns(UserWarning, match="no CUDA graphs: .*planted") as said:
        llm = LLM(directory, device="cuda", dtype="float32", block_size=16, max_num_seqs=8, **pool)
    assert len([one for one in said if "no CUDA graphs" in str(one.message)]) == 1
    assert torch.equal(torch.cuda.get_rng_state(), state)
    with llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llm.runner.graphs is None and len(generate(llm)) == 5


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_error_of_a_failed_capture_keeps_no_graph(monkeypatch, num_ranks):
    """A group of several ranks takes ten seconds to close while graphs with its kernels live."""
    class Graph:
        pass

    def capture_one(self, size, pool):
        self.graphs[size] = made = Graph(), None
        graphs.append(weakref.ref(made[0]))
        if size == 2:
            raise ValueError("planted")

    graphs = []
    monkeypatch.setattr(DecodeGraphs, "_capture_one", capture_one)
    for name in ("get_rng_state", "set_rng_state", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    batch = DecodeBatch(4, 2, 4, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="one of several ranks") if num_ranks > 1 else pytest.warns(UserWarning, match="planted") as kept:
        assert DecodeGraphs.capture(None, None, batch, [1, 2, 4], num_ranks) is None
    assert len(graphs) == 2 and kept is not None and graphs[0]() is None


@pytest.mark.gpu
def test_at_most_ten_launches_a_layer(directory):
    """Of an eager decode step: kernels on the GPU as the profiler counts them, less those that do not grow with the layers."""
    with LLM(directory, device="cuda", num_kv_blocks=40, block_size=16, max_num_seqs=4, enforce_eager=True) as llm:
        llm.add_request({"prompt_token_ids": list(range(3, 40))}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        for _ in range(3):
            llm.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            llm.step()
        kernels = sum(event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA
                      and not event.key.startswith(("Memcpy", "Memset")))
        assert kernels <= 10 * llm.model_config.num_layers + 12, kernels
