"""Tensor parallelism on two GPUs: the tokens of one, with graphs and eager; a rank killed while it computes; nothing left behind."""

import threading
import time

import pytest
import rank_probes
import tiny_models
import torch
from rank_processes import children

from minivllm import LLM, SamplingParams
from minivllm.worker.crew import RankError
from minivllm.worker.cuda_graphs import DecodeGraphs

pytestmark = [pytest.mark.gpu(alone=True), pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SHAPE = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, intermediate_size=512, head_dim=32)
SETTINGS = dict(device="cuda", dtype="float32", num_kv_blocks=64, block_size=16, max_model_len=250, max_num_seqs=8)
PROMPTS = [list(range(3, 40)), [5, 6, 7], list(range(3, 30)) + [80], list(range(50, 95))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    tiny_models.save("qwen3", path, **SHAPE)
    return path


def tokens(llm, count=40):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("backend", ["auto", "torch_sdpa"])
def test_two_gpus_give_the_tokens_of_one(directory, backend, eager):
    settings = dict(attention_backend=backend, enforce_eager=eager, **SETTINGS)
    with LLM(directory, **settings) as llm:
        want = tokens(llm)
    with LLM(directory, tensor_parallel_size=2, **settings) as llm:
        assert tokens(llm) == want
        assert tokens(llm) == want  # from the prefix cache
        in_graphs = llm.runner.everywhere(rank_probes.num_replays)
        assert all(in_graphs) if llm.runner.wants_graphs(llm.config) else not any(in_graphs)
    assert not children()


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_sums_beside_the_computation_give_the_tokens_of_one(directory, chunk):
    """Chunks so small that every step has several; some end in the graphs."""
    with LLM(directory, **SETTINGS) as llm:
        want = tokens(llm)
    with LLM(directory, tensor_parallel_size=2, overlap_chunk_size=chunk, **SETTINGS) as llm:
        assert tokens(llm) == want and tokens(llm) == want


def test_the_pool_is_sized_by_the_rank_with_the_least_room(directory):
    with LLM(directory, device="cuda", dtype="bfloat16", tensor_parallel_size=2, gpu_memory_utilization=0.05) as llm:
        shapes = llm.runner.everywhere(rank_probes.pool_shape)
        assert shapes[0] == shapes[1] and len(llm.memory.other_ranks) == 1 and llm.memory.other_ranks[0].activation_peak > 0


@pytest.mark.parametrize("eager", [False, True])
def test_a_rank_killed_in_a_run_is_said_and_a_new_llm_works(directory, eager):
    with LLM(directory, tensor_parallel_size=2, enforce_eager=eager, **SETTINGS) as llm:
        want = tokens(llm)
        [child] = children()
        threading.Timer(0.3, child.kill).start()
        begin = time.monotonic()
        with pytest.raises(RankError, match="rank 1 ended while it was needed: killed by SIGKILL"):
            while True:
                tokens(llm, 200)
        llm.close()
        assert time.monotonic() - begin < 10.3 and not children()
    with LLM(directory, tensor_parallel_size=2, enforce_eager=eager, **SETTINGS) as llm:
        assert tokens(llm) == want


def test_an_error_in_a_rank_is_reported_with_its_traceback(directory):
    with LLM(directory, tensor_parallel_size=2, enforce_eager=True, **SETTINGS) as llm:
        tokens(llm, 2)
        llm.runner.everywhere(rank_probes.fail_in_the_next_step, 1)
        begin = time.monotonic()
        with pytest.raises(RankError, match="rank 1 failed:[^$]*ZeroDivisionError"):
            tokens(llm)
        assert time.monotonic() - begin < 10


def test_a_capture_that_fails_on_one_rank_ends_all_and_says_why(directory, monkeypatch):
    """Rank 0 fails in the middle of its third capture, where rank 1 waits for it."""
    forward, calls = DecodeGraphs.forward, []

    def failing(self, size):
        calls.append(size)
        if len(calls) == 5:
            raise RuntimeError("planted")
        return forward(self, size)

    monkeypatch.setattr(DecodeGraphs, "forward", failing)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="capturing CUDA graphs failed on one of several ranks: .*enforce_eager=True"):
        LLM(directory, tensor_parallel_size=2, **SETTINGS)
    assert time.monotonic() - begin < 60 and not children()
    monkeypatch.undo()
    with LLM(directory, tensor_parallel_size=2, **SETTINGS) as llm:
        assert len(tokens(llm, 2)) == len(PROMPTS)


def test_more_ranks_than_gpus_are_refused(directory):
    with pytest.raises(ValueError, match=f"needs 8 GPUs from cuda:{torch.cuda.device_count() - 1} on, and torch sees {torch.cuda.device_count()}"):
        LLM(directory, tensor_parallel_size=8, **{**SETTINGS, "device": f"cuda:{torch.cuda.device_count() - 1}"})


def test_five_cycles_leave_no_memory_behind(directory):
    def held():
        torch.cuda.synchronize(0)
        return torch.cuda.mem_get_info(0)[0]

    free = []
    for _ in range(5):
        with LLM(directory, tensor_parallel_size=2, **SETTINGS) as llm:
            tokens(llm, 4)
        free.append(held())
    assert free[1] - free[-1] < 64 << 20
