"""Traces: replayed they are the pool, saved and loaded they are the same, and `explain` tells a request's life from them."""

import random
from dataclasses import replace

import pytest
import tiny_models
from engine_fakes import make_engine, tiny_config

from minivllm import LLM, SamplingParams
from minivllm.engine.events import KINDS, PoolState, Trace
from minivllm.engine.explain import explain


def pool_of(engine):
    return PoolState.of(engine.blocks, list(engine.scheduler.sequences.values()))


def random_run(seed, steps=60):
    """Adds, aborts and steps at random over a tiny pool; the trace, and the pool as it was after each step."""
    rng = random.Random(seed)
    config = tiny_config(block_size=rng.choice([1, 2, 3]), num_blocks=rng.choice([6, 9, 14]), max_num_seqs=4, budget=rng.choice([4, 7, 16]),
                         caching=rng.random() < 0.8)
    engine = make_engine(config)
    for _ in range(rng.choice([0, 5])):  # a trace may start in the middle of things
        engine.add([rng.randrange(1, 5) for _ in range(3)], SamplingParams(temperature=0, max_tokens=3))
        engine.step()
    trace = engine.scheduler.start_trace()
    first, states = engine.stats.num_steps, {}
    for _ in range(steps):
        while rng.random() < 0.5 and len(engine.scheduler.waiting) < 6:
            prefix = [1, 2, 3, 4][:rng.randrange(5)]
            prompt = prefix + [rng.randrange(1, 5) for _ in range(rng.randrange(1, 4))]
            engine.add(prompt[:engine.max_model_len - 1], SamplingParams(temperature=0, max_tokens=rng.randrange(1, 9), ignore_eos=True))
        if rng.random() < 0.1 and engine.scheduler.sequences:
            engine.abort([rng.choice(list(engine.scheduler.sequences.values()))])
        if rng.random() < 0.03:
            engine.scheduler.abort_all()
        if engine.has_unfinished_requests():
            number = engine.stats.num_steps - first  # a trace counts from its own first step
            engine.step()
            states[number] = pool_of(engine)
    return engine, trace, first, states


@pytest.mark.parametrize("seed", range(25))
def test_a_replayed_trace_is_the_pool_after_every_step(seed):
    engine, trace, first, states = random_run(seed)
    assert len(states) > 20
    replayed = dict(trace.replay())
    for number, state in states.items():
        assert replayed[number] == state, f"after step {number}"
    assert trace.at(min(states)) == states[min(states)]


def test_random_runs_have_events_of_every_kind():
    seen = {event.kind for seed in range(25) for event in random_run(seed)[1].events}
    assert seen == set(KINDS)


def test_a_forgotten_event_would_be_seen():
    _, trace, _, states = random_run(3)
    for kind in ("allocate", "free", "publish", "evict", "share"):
        part = Trace(trace.initial, trace.block_size)
        part.events = [event for event in trace.events if event.kind != kind]
        with pytest.raises((AssertionError, ValueError)):
            replayed = dict(part.replay())
            assert all(replayed[number] == state for number, state in states.items() if number in replayed)


def test_a_saved_trace_loads_as_it_was(tmp_path):
    _, trace, _, states = random_run(1)
    trace.save(tmp_path / "trace.jsonl")
    loaded = Trace.load(tmp_path / "trace.jsonl")
    assert loaded.events == trace.events and loaded.initial == trace.initial and loaded.block_size == trace.block_size
    assert dict(loaded.replay()) == dict(trace.replay())


@pytest.mark.parametrize("text", ["", "{}", "[1]", "no json", '{"minivllm_trace": 99}'])
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ValueError, match="not a trace.*line 1"):
        Trace.load(tmp_path / "t")


def test_a_broken_line_is_named(tmp_path):
    _, trace, _, _ = random_run(1)
    trace.save(tmp_path / "t")
    lines = (tmp_path / "t").read_text().splitlines()
    (tmp_path / "t").write_text("\n".join([*lines[:5], lines[5][:9]]))
    with pytest.raises(ValueError, match="line 6"):
        Trace.load(tmp_path / "t")


def test_a_step_beyond_the_trace_is_refused():
    _, trace, _, _ = random_run(1)
    with pytest.raises(ValueError, match="step 9999 is not in this trace"):
        trace.at(9999)


def test_without_a_trace_nothing_is_recorded():
    engine = make_engine(tiny_config())
    trace = engine.scheduler.start_trace()
    engine.scheduler.stop_trace()
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    assert trace.events == [] and engine.scheduler.trace is None and engine.blocks.trace is None


def test_a_requests_life_is_told_in_sentences():
    engine = make_engine(tiny_config(block_size=2, num_blocks=5, budget=4))
    trace = engine.scheduler.start_trace()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def run(*prompts):
        sequences = [engine.add(prompt, replace(params, max_tokens=min(6, 10 - len(prompt)))) for prompt in prompts]
        while engine.has_unfinished_requests():
            engine.step()
        return [explain(trace, seq.seq_id) for seq in sequences]

    _, told = run([1, 2, 3, 4], [2, 2])
    for part in ("queued with a prompt of 2 tokens", "admitted; nothing was in the prefix cache", "preempted: no block was free and request 0, older, needed a block",
                 "admitted again", "finished with 'length' after 6 tokens"):
        assert part in told, told
    assert "a chunk of what it lacked" in run([4, 4, 4, 4, 4, 4])[0]
    assert "4 of its 7 tokens were in the prefix cache" in run([4, 4, 4, 4, 1, 1, 1])[0]


def test_llm_explains_and_says_when_it_cannot(tmp_path):
    tiny_models.save("llama", tmp_path)
    with LLM(tmp_path, device="cpu", num_kv_blocks=16, max_model_len=64) as llm:
        with pytest.raises(ValueError, match="start_trace"):
            llm.explain(0)
        trace = llm.start_trace()
        [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert "finished with 'length' after 4 tokens" in llm.explain(output.request_id)
        with pytest.raises(ValueError, match="no request 77"):
            llm.explain(77)
        llm.stop_trace()
        assert trace.events
