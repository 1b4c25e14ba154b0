"""Step API, admission limit, memory account, faults at every call, several engines, and nothing left behind."""

import gc
import threading
import warnings
import weakref

import psutil
import pytest
import tiny_models

import minivllm
from minivllm import LLM, QueueFullError, SamplingParams
from minivllm.engine.invariants import check_scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [list(range(3, 20)), [5, 6, 7], list(range(3, 15)) + [60]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.save("llama", path)
    return path


@pytest.fixture
def llm(directory):
    with LLM(directory, device="cpu", num_kv_blocks=16, block_size=4, max_model_len=60) as llm:
        yield llm
        check_scheduler(llm.engine.scheduler)
        assert llm.engine.blocks.num_used_blocks == 0


def tokens(llm, prompts=PROMPTS, params=GREEDY):
    return [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]


def test_the_step_api_gives_what_generate_gives(llm):
    expected = tokens(llm)
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            outputs[output.request_id] = output["token_ids"]
    assert [outputs[i] for i in ids] == expected and llm.step() == []


def test_requests_of_the_step_api_survive_a_generate_between_their_steps(llm):
    expected = tokens(llm)
    first = llm.add_request(PROMPTS[0], GREEDY)
    llm.step()
    assert tokens(llm) == expected  # its steps finish the added one too
    [output] = llm.step()
    assert output.request_id == first and output["token_ids"] == expected[0]


def test_an_aborted_request_is_returned_with_what_it_has(llm):
    request_id = llm.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(3):
        llm.step()
    llm.abort(request_id)
    [output] = llm.step()
    assert output["finish_reason"] == "abort" and len(output["token_ids"]) == 3 and not llm.has_unfinished_requests()
    with pytest.raises(KeyError, match=f"no request {request_id}"):
        llm.abort(request_id)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_error_at_any_call_of_the_runner_leaves_the_pool_whole_and_the_next_answer_right(directory, raised):
    with LLM(directory, device="cpu", num_kv_blocks=9, block_size=4, max_num_batched_tokens=8, max_num_seqs=3) as llm:
        execute, calls = llm.runner.execute, [0]
        expected = tokens(llm)
        llm.runner.execute = lambda plan: calls.__setitem__(0, calls[0] + 1) or execute(plan)
        assert tokens(llm) == expected
        for number in range(calls[0]):
            left = [number]

            def failing(plan):
                left[0] -= 1
                if left[0] < 0:
                    raise raised("injected")
                return execute(plan)

            llm.runner.execute = failing
            with pytest.raises(raised):
                tokens(llm)
            llm.runner.execute = execute
            check_scheduler(llm.engine.scheduler)
            assert llm.engine.blocks.num_used_blocks == 0 and not llm.engine.has_unfinished_requests()
            assert tokens(llm) == expected


def test_an_error_inside_the_runner_after_the_cache_was_written_is_no_different(llm, monkeypatch):
    expected = tokens(llm)
    with monkeypatch.context() as patch:
        patch.setattr("minivllm.worker.model_runner.sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokens(llm)
    assert tokens(llm) == expected


def test_a_full_queue_refuses_clearly_and_loses_nothing(directory):
    with LLM(directory, device="cpu", num_kv_blocks=16, block_size=4, max_num_queued_requests=2) as llm:
        with pytest.raises(QueueFullError, match="0 requests wait and max_num_queued_requests is 2: 3 more are not taken"):
            tokens(llm)
        assert not llm.engine.has_unfinished_requests()
        for _ in range(2):
            llm.add_request([1, 2], GREEDY)
        with pytest.raises(QueueFullError, match="2 requests wait"):
            llm.add_request([1, 2], GREEDY)
        llm.step()  # both are admitted, so there is room again
        llm.add_request([1, 2], GREEDY)
        finished = 0
        while llm.has_unfinished_requests():
            finished += len(llm.step())
        assert finished == 3


def test_a_policy_by_name_or_as_a_function(directory):
    def newest_first(running, waiting, budget):
        return [(seq, budget) for seq in (*running, *reversed(waiting))]

    for policy in ("shortest_first", newest_first):
        with LLM(directory, device="cpu", num_kv_blocks=16, block_size=4, policy=policy, max_num_seqs=1) as llm:
            assert len(tokens(llm)) == 3
    with pytest.raises(ValueError, match="policy must be one of fcfs.*'lottery'"):
        LLM(directory, policy="lottery")


def test_the_memory_account_adds_up(llm):
    memory = llm.memory
    assert memory.weights == llm.runner.weight_bytes > 0
    assert memory.kv_cache == memory.num_blocks * memory.block_size * memory.bytes_per_token == 16 * 4 * 2 * 3 * 2 * 8 * 4
    assert memory.requests_that_fit(4) == 16 and memory.requests_that_fit(5) == 8 and memory.requests_that_fit(65) == 0
    assert memory.predicted and memory.activation_peak > 0 and memory.total > memory.free > 0
    for word in ("weights", "activations", "KV cache", "bytes a token", "free", "fits"):
        assert word in str(memory)
    with pytest.raises(ValueError, match="at least 1"):
        memory.requests_that_fit(0)


def test_a_pool_that_is_too_small_prints_the_account_and_the_setting_to_change(directory):
    with pytest.raises(ValueError) as error:
        LLM(directory, device="cpu", num_kv_blocks=4, max_model_len=100)
    for part in ("max_model_len 100 does not fit: the KV cache holds 64 tokens (4 blocks of 16)", "raise num_kv_blocks", "weights", "bytes a token"):
        assert part in str(error.value)


@pytest.mark.gpu
def test_the_memory_account_of_a_gpu_is_measured(directory):
    with LLM(directory, device="cuda", gpu_memory_utilization=0.05) as llm:
        tokens(llm)
        assert not llm.memory.predicted and 0 < llm.memory.activation_peak < 1 << 30


def test_a_second_llm_is_announced_and_close_all_frees_both(directory, monkeypatch):
    monkeypatch.setattr("minivllm.llm._LIVE", weakref.WeakSet())  # other tests share an LLM of theirs
    first = LLM(directory, device="cpu", num_kv_blocks=16)
    with pytest.warns(UserWarning, match="1 LLM of this process is still open and holds .* GiB; close"):
        second = LLM(directory, device="cpu", num_kv_blocks=16)
    assert tokens(first) == tokens(second)  # two live in one process
    minivllm.close_all()
    for llm in (first, second):
        with pytest.raises(RuntimeError, match="closed"):
            tokens(llm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(directory, device="cpu", num_kv_blocks=16, max_model_len=64).close()


def test_ten_cycles_leave_memory_threads_and_files_where_they_were(directory):
    def cycle():
        with LLM(directory, device="cpu", num_kv_blocks=4000, max_model_len=64) as llm:  # a pool of 25 MB
            tokens(llm)

    process = psutil.Process()
    for _ in range(3):
        cycle()
    gc.collect()
    before = process.memory_info().rss, threading.active_count(), process.num_threads(), process.num_fds()
    for _ in range(10):
        cycle()
    gc.collect()
    after = process.memory_info().rss, threading.active_count(), process.num_threads(), process.num_fds()
    assert after[0] - before[0] < 30 << 20 and after[1:] == before[1:]
