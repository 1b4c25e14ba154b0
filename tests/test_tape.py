"""The tape of notebook 09: it repeats what a run does on the same memory, and refuses what a CUDA capture refuses."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from minivllm import LLM, SamplingParams
from minivllm.teach import GraphView
from minivllm.teach.plug_graphs import pad_batch
from minivllm.teach.tape import CaptureError, StaleBufferError, Tape
from minivllm.teach.tape_graphs import recorded

PROMPTS = [[5, 17, 40, 8], [33, 62], [11, 9, 4, 7, 2, 60, 3], [21], [14, 15, 16]]
PARAMS = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 4, 6, 12, 5)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def tiny(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save(request.param, directory)
    with pytest.warns(UserWarning, match="max_model_len"):
        llm = LLM(directory, num_kv_blocks=24, block_size=4, max_num_seqs=4, device="cpu", enable_prefix_caching=False)
    yield llm
    llm.close()


def tokens(llm):
    return [out["token_ids"] for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_a_replay_reads_and_writes_the_recorded_memory() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    with Tape() as tape:
        y = torch.relu(x @ weight)[1:].contiguous()
    address = y.data_ptr()
    for _ in range(3):
        x.copy_(torch.randn(3, 4))
        tape.replay()
        assert torch.equal(y, torch.relu(x @ weight)[1:]) and y.data_ptr() == address


def test_a_replay_repeats_changes_in_place() -> None:
    cache, slots, value = torch.zeros(6), torch.tensor([2]), torch.tensor([1.0])
    with Tape() as tape:
        cache.index_copy_(0, slots, value)
    slots.fill_(5)
    value.fill_(7.0)
    tape.replay()
    assert cache.tolist() == [0, 0, 1, 0, 0, 7]


def test_what_only_looks_at_memory_is_no_launch() -> None:
    x = torch.randn(4, 6)
    with Tape() as tape:
        x.view(2, 12).t()[1:]
    assert (tape.launches, tape.allocations) == (0, 0) and tape.views == 3
    with Tape() as tape:
        torch.empty(3)
        x + 1
    assert (tape.launches, tape.allocations) == (1, 2)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("asks", [
    lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: int(x[0]), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.tolist(),
    lambda x: x.numpy(), lambda x: x.unique(), lambda x: torch.masked_select(x, x > 0), lambda x: x + torch.tensor([1.0]),
    lambda x: 1 / 0 if x[0] > 1 else 0,
    lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long)), lambda x: torch.equal(x, x)])
def test_what_asks_the_data_is_refused(mode, asks) -> None:
    x = torch.ones(4)
    with mode(), pytest.raises(CaptureError, match="cannot be recorded"), Tape():
        asks(x)
    assert x.sum().item() == 4, "after the recording everything is allowed again"


def test_fixed_shapes_are_not_refused() -> None:
    x = torch.ones(4)
    with Tape() as tape:
        y = torch.where(x > 1, x, 0.0) + x[torch.arange(4)] + x.clone()
    x.fill_(3.0)
    tape.replay()
    assert y.tolist() == [9.0] * 4


def test_a_tensor_that_nobody_reads_is_stale() -> None:
    x = torch.ones(2)
    with Tape() as tape:
        x * 2
    tape.replay(x=x, view=x[1:])
    with pytest.raises(StaleBufferError, match="x lies in memory that the recording does not read"):
        tape.replay(x=x.clone())


def test_an_engine_that_replays_gives_the_same_tokens(tiny) -> None:
    want, backend, pool = tokens(tiny), tiny.runner.backend, tiny.runner.pool
    with recorded(tiny, [1, 2, 4]) as graphs:
        assert tokens(tiny) == want and graphs.num_replays > 5 and graphs.num_padded_rows > 0
    assert tiny.runner.backend is backend and tiny.runner.pool is pool and tiny.runner.graphs is None
    assert tokens(tiny) == want


def test_padding_never_reaches_the_pool(tiny) -> None:
    with recorded(tiny, [4]) as graphs:
        pool = tiny.runner.pool.cache
        pool.fill_(0.5)
        tiny.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert graphs.num_padded_rows == 3 * graphs.num_replays > 0
        changed = (pool != 0.5).flatten(4).any(dim=-1).any(dim=0).any(dim=0).flatten()  # [slots]
        assert int(changed[:-1].sum()) == 6 and bool(changed[-1])


def test_recorded_wants_a_cpu_without_a_prefix_cache(tmp_path) -> None:
    tiny_models.save("llama", tmp_path)
    with pytest.warns(UserWarning, match="max_model_len"), LLM(tmp_path, num_kv_blocks=8, block_size=4, device="cpu") as llm:
        with pytest.raises(ValueError, match="enable_prefix_caching=False"), recorded(llm):
            pass


def test_the_view_tells_replay_from_eager_and_counts_padding(tiny) -> None:
    tiny.stop_trace()
    tiny.start_trace()
    with recorded(tiny, [1, 2, 4]) as graphs:
        view = GraphView(tiny, graphs.sizes)
        tokens(tiny)
        first, last = view.steps
        sizes = [view.size_of(step) for step in range(first, last + 1)]
        assert sum(map(bool, sizes)) == graphs.num_replays
        rows = sum(sizes)
        assert view.padded_share() == pytest.approx(graphs.num_padded_rows / rows)
        eager = next(step for step in range(first, last + 1) if sum(view.history.batch.get(step, (0, 0))) and not view.size_of(step))
        assert "Eager" in view.svg(eager) and "Replay of the graph" in view.svg(last)
    view.close()


def test_a_learners_padding_in_the_real_engine(tiny, capsys) -> None:
    from minivllm.teach.exercises import graphs

    want = tokens(tiny)
    pad_batch(graphs.pad_batch, tiny, PROMPTS, PARAMS, want)
    assert "the same tokens: True" in capsys.readouterr().out
    pad_batch(graphs._unfilled, tiny, PROMPTS, PARAMS, want)
    assert "run the check above first" in capsys.readouterr().out

    def stub(buffer, columns, sizes):
        raise NotImplementedError

    pad_batch(stub, tiny, PROMPTS, PARAMS, want)
    assert capsys.readouterr().out == "not attempted yet\n"
