"""The largest steps that a GPU's memory is measured with, run on a CPU: they write nothing and use every token and row allowed."""

import weakref

import pytest
import tiny_models
import torch

from minivllm import LLM, SamplingParams
from minivllm.attention.torch_sdpa import MOST_GATHERED_TOKENS
from minivllm.worker.gpu_memory import ADVICE, MemoryLimit, advice_when_full
from minivllm.worker.profile_run import largest_steps


@pytest.mark.parametrize("num_tokens, num_rows, positions, block_size", [(64, 8, 200, 16), (7, 7, 40, 1), (300, 3, 60, 16), (50, 4, 33, 256), (300, 256, 40_960, 16)])
def test_the_largest_steps_are_the_largest(num_tokens, num_rows, positions, block_size):
    prompts, chunk, decodes = largest_steps(num_tokens, num_rows, positions, block_size)
    assert len(prompts.rows) == len(decodes.rows) == num_rows and len(chunk.rows) == 1
    assert all(plan.num_tokens <= num_tokens for plan in (prompts, chunk, decodes))
    assert chunk.num_tokens == min(num_tokens, positions) and chunk.rows[0].context_len == positions
    assert all(len(row.token_ids) == 1 for row in decodes.rows) and decodes.rows[0].context_len == positions
    gathered = sum(row.context_len for row in decodes.rows)
    assert gathered >= min(num_rows * positions, MOST_GATHERED_TOKENS), "a backend that gathers could gather more"
    for plan in (prompts, chunk, decodes):
        assert all(row.block_table == [0] * -(-row.context_len // block_size) and row.write_start > positions for row in plan.rows)


def test_they_run_over_a_pool_of_one_block_and_write_nothing(tmp_path):
    tiny_models.save("llama", tmp_path)
    with LLM(tmp_path, device="cpu", num_kv_blocks=8, block_size=16, max_model_len=60) as llm:
        llm.runner.allocate(1, 16)
        llm.runner.pool.cache.fill_(0.5)
        for plan in largest_steps(40, 5, 60, 16):
            llm.runner.execute(plan)
        assert llm.runner.pool.cache.eq(0.5).all()
        llm.runner.release_pool()
        assert llm.runner.pool is None
        llm.runner.allocate(8, 16)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        assert len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"]) == 3


def test_out_of_memory_on_a_cpu_is_left_as_it_is():
    with pytest.raises(torch.OutOfMemoryError, match="^planted$"), advice_when_full("computing a step", torch.device("cpu")):
        raise torch.OutOfMemoryError("planted")


@pytest.mark.parametrize("doing", ADVICE)
def test_out_of_memory_on_a_gpu_says_what_to_do(doing, monkeypatch):
    monkeypatch.setattr("minivllm.worker.gpu_memory.gpu_memory", lambda device: (1 << 30, 15 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 13 << 30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(torch.OutOfMemoryError) as caught, advice_when_full(doing, torch.device("cuda", 0)):
        raise torch.OutOfMemoryError("planted")
    text = str(caught.value)
    assert f"while {doing}: of 15.0 GiB 1.00 were free, and this process's tensors held 13.00 GiB" in text and ADVICE[doing] in text and "planted" in text


def test_the_failed_steps_tensors_are_let_go_before_the_error_is_kept(monkeypatch):
    monkeypatch.setattr("minivllm.worker.gpu_memory.gpu_memory", lambda device: (1 << 30, 15 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    seen = []

    def step():
        held = torch.zeros(3)
        seen.append(weakref.ref(held))
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(seen[0]()))
    with pytest.raises(torch.OutOfMemoryError), advice_when_full("computing a step", torch.device("cuda", 0)):
        step()
    assert seen[1] is None, "what the step held was still there when the cache was emptied"


@pytest.mark.parametrize("first_closed", [0, 1])
def test_limits_may_end_in_any_order(monkeypatch, first_closed):
    now = [0.9]
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: now.__setitem__(0, share))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: now[0], raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"total_memory": 100}))
    monkeypatch.setattr("minivllm.worker.gpu_memory.gpu_memory", lambda device: (100, 100))
    limits = [MemoryLimit(torch.device("cuda", 0), share) for share in (0.5, 0.8)]
    assert now == [0.8]
    limits.pop(first_closed).restore()
    assert now == [0.8 if first_closed == 0 else 0.5]
    limits.pop().restore()
    assert now == [0.9]
