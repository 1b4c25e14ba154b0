"""A GPU's memory: what is measured before the pool is sized, the hard stop, and what is said when it runs out."""

import gc

import pytest
import tiny_models
import torch

from minivllm import LLM, SamplingParams
from minivllm.worker.profile_run import largest_steps

pytestmark = pytest.mark.gpu(alone=True)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = 64 << 10  # bytes


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    tiny_models.save("qwen3", path)
    with LLM(path, device="cuda", num_kv_blocks=40, max_num_seqs=4) as llm:  # cuBLAS keeps workspaces once a stream was used
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    return path


def held():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("backend", ["auto", "torch_sdpa"])
def test_the_largest_step_was_measured_and_fits(directory, backend, eager):
    before = held()
    with LLM(directory, device="cuda", gpu_memory_utilization=0.1, attention_backend=backend, enforce_eager=eager, max_num_seqs=64) as llm:
        runner, config = llm.runner, llm.config
        total = torch.cuda.get_device_properties(0).total_memory
        assert runner.profile.activations > 0 and (runner.profile.graphs > 0) == (runner.graphs is not None) == (not eager and backend == "auto")
        rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for plan in largest_steps(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, config.block_size):
            runner.execute(plan)
        assert torch.cuda.max_memory_allocated() - rest <= runner.profile.activations * 1.05 + 2**20
        assert 0.08 * total < torch.cuda.max_memory_allocated() <= 0.1 * total
        assert ("CUDA graphs" in str(llm.memory)) == (not eager and backend == "auto")
    assert held() <= before + SMALL


def test_torch_stops_this_process_at_the_limit_and_no_longer_after_close(directory):
    with LLM(directory, device="cuda", gpu_memory_utilization=0.05, limit_gpu_memory=True) as llm:
        assert len(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0]["token_ids"]) == 6
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(torch.cuda.get_device_properties(0).total_memory // 10, dtype=torch.uint8, device="cuda")
    assert torch.empty(torch.cuda.get_device_properties(0).total_memory // 10, dtype=torch.uint8, device="cuda").is_cuda


def test_a_constructor_that_fails_lifts_its_limit(directory):
    with pytest.raises(ValueError):
        LLM(directory, device="cuda", gpu_memory_utilization=0.05, limit_gpu_memory=True, max_model_len=200, num_kv_blocks=1, block_size=16)
    assert torch.empty(torch.cuda.get_device_properties(0).total_memory // 10, dtype=torch.uint8, device="cuda").is_cuda


def test_the_account_of_one_llm_is_not_that_of_two(directory):
    with LLM(directory, device="cuda", gpu_memory_utilization=0.05) as first:
        before = first.memory.activation_peak
        with pytest.warns(UserWarning, match="still open"):
            second = LLM(directory, device="cuda", gpu_memory_utilization=0.2)
        with second:
            second.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
            assert first.memory.activation_peak == before and not first.memory.predicted
    with LLM(directory, device="cuda", num_kv_blocks=40) as llm:
        assert llm.memory.predicted and llm.memory.activation_peak > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_the_second_gpu_is_used_while_the_first_is_torchs_current(directory):
    with LLM(directory, device="cuda:0", dtype="float32", num_kv_blocks=40) as llm:
        want = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0]["token_ids"]
    with torch.cuda.device(0), LLM(directory, device="cuda:1", dtype="float32", num_kv_blocks=40) as llm:
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0]["token_ids"] == want


def test_a_pool_that_cannot_be_had_says_what_to_lower(directory):
    before = held()
    with pytest.raises(torch.OutOfMemoryError, match="out of GPU memory while making the KV cache: .*lower gpu_memory_utilization or num_kv_blocks"):
        LLM(directory, device="cuda", num_kv_blocks=10**9, max_model_len=200)
    assert held() <= before + SMALL


def test_a_step_that_runs_out_says_what_to_lower_and_the_engine_goes_on(directory, monkeypatch):
    with LLM(directory, device="cuda", num_kv_blocks=40, enforce_eager=True) as llm:
        want = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0]["token_ids"]
        forward = type(llm.runner.model).forward

        def hungry(self, *args):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

        monkeypatch.setattr(type(llm.runner.model), "forward", hungry)
        with pytest.raises(torch.OutOfMemoryError, match="out of GPU memory while computing a step: .*lower max_num_batched_tokens"):
            llm.generate([[5, 6, 7], [8, 9]], GREEDY, use_tqdm=False)
        monkeypatch.setattr(type(llm.runner.model), "forward", forward)
        assert llm.engine.blocks.num_used_blocks == 0
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0]["token_ids"] == want


def test_compiled_parts_give_the_same_tokens(directory):
    tokens = []
    for compiled in (False, True):
        with LLM(directory, device="cuda", dtype="float32", num_kv_blocks=40, max_num_seqs=4, torch_compile=compiled) as llm:
            tokens.append([out["token_ids"] for out in llm.generate([[5, 6, 7], list(range(3, 30))], GREEDY, use_tqdm=False)])
            assert llm.runner.graphs is not None
    assert tokens[0] == tokens[1]
