"""Several answers to one prompt: they share its blocks, draw apart, and live and end by themselves."""

import random

import pytest
import tiny_models
from engine_fakes import answer_alone, make_engine, run_to_end, tiny_config

from minivllm import LLM, SamplingParams
from minivllm.engine.invariants import check_scheduler
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.siblings import answered, members

PROMPT = list(range(20, 31))  # two full blocks of four, and three tokens more


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.save("llama", path)
    return path


@pytest.fixture
def tiny(directory):
    with LLM(directory, device="cpu", block_size=4, num_kv_blocks=64, max_model_len=64, max_num_seqs=4) as llm:
        yield llm
        check_scheduler(llm.engine.scheduler)
        assert llm.engine.blocks.num_used_blocks == 0 and not llm.engine.has_unfinished_requests()


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def test_answers_are_n_and_differ_and_the_first_is_that_of_one(tiny):
    ask = lambda n: generate(tiny, [PROMPT], SamplingParams(n=n, seed=5, max_tokens=12, ignore_eos=True))[0]
    four = ask(4)
    answers = [answer.token_ids for answer in four.outputs]
    assert [answer.index for answer in four.outputs] == [0, 1, 2, 3] and len({tuple(answer) for answer in answers}) == 4
    assert ask(1)["token_ids"] == answers[0]
    assert [answer.token_ids for answer in ask(7).outputs][:4] == answers  # more than max_num_seqs; each depends on its number alone
    assert four["token_ids"] == answers[0] and four.metrics.total > 0


def test_siblings_share_the_prompts_blocks_and_start_once_they_are_published(tiny):
    trace = tiny.start_trace()
    first = tiny.add_request(PROMPT, SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True))
    tiny.step()
    assert len(tiny.engine.scheduler.running) == 1 and len(tiny.engine.scheduler.waiting) == 2
    tiny.step()
    tables = [list(seq.block_table) for seq in tiny.engine.scheduler.running]
    assert len(tables) == 3 and tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({block for table in tables for block in table}) == 2 + 3 * (len(tables[0]) - 2)
    while tiny.has_unfinished_requests():
        done = tiny.step()
    [out] = done
    published = max(event.step for event in trace.events if event.kind == "publish" and event.seq_id == first and event.block in tables[0][:2])
    for sibling in (first + 1, first + 2):
        events = trace.of_sequence(sibling)
        assert [event.block for event in events if event.kind == "share"] == tables[0][:2]
        assert min(event.step for event in events if event.kind == "admit") == published + 1
        [admit] = [event for event in events if event.kind == "admit"]
        assert admit.data["cached_tokens"] == 8
        assert sum(event.data["tokens"] for event in events if event.kind == "compute") == len(PROMPT) - 8 + 5
    assert len(out.outputs) == 3 and out.num_cached_tokens == 0 and tiny.stats.num_requests_finished == 3


def test_another_request_may_overtake_siblings_that_wait(tiny):
    order = []
    admit = tiny.engine.scheduler._admit
    tiny.engine.scheduler._admit = lambda seq: admit(seq) and (order.append(seq.seq_id) or True)
    requests = [tiny.add_request(PROMPT, SamplingParams(n=3, max_tokens=4, ignore_eos=True)), tiny.add_request([1, 2], SamplingParams(max_tokens=4))]
    while tiny.has_unfinished_requests():
        tiny.step()
    assert requests == [0, 3] and order == [0, 3, 1, 2]


def test_aborting_the_request_aborts_every_answer(tiny):
    for steps in (0, 1, 3):
        request = tiny.add_request(PROMPT, SamplingParams(n=4, seed=2, max_tokens=20, ignore_eos=True))
        other = tiny.add_request([3, 4], SamplingParams(max_tokens=8, seed=3, ignore_eos=True))
        for _ in range(steps):
            assert not tiny.step()
        tiny.abort(request)
        assert [seq.seq_id for seq in tiny.engine.scheduler.sequences.values()] == [other]
        [out] = [out for out in tiny.step() if out.request_id == request]
        assert [answer.finish_reason for answer in out.outputs] == ["abort"] * 4
        while tiny.has_unfinished_requests():
            tiny.step()


def test_a_leader_that_ends_at_once_leaves_its_blocks_to_be_found(tiny):
    [out] = generate(tiny, [PROMPT], SamplingParams(n=3, max_tokens=1, logprobs=1, prompt_logprobs=2))
    assert [len(answer.token_ids) for answer in out.outputs] == [1, 1, 1] and tiny.stats.prefix_cache_hits == 16
    assert len(out.prompt_logprobs) == len(PROMPT) and all(len(answer.logprobs) == 1 for answer in out.outputs)


def test_answers_that_stop_early_do_not_end_the_others(tiny):
    [out] = generate(tiny, [PROMPT], SamplingParams(n=6, seed=3, max_tokens=30, stop_token_ids=list(range(40, 55))))
    lengths = {len(answer.token_ids) for answer in out.outputs}
    assert len(lengths) > 2 and {answer.finish_reason for answer in out.outputs} <= {"stop", "length"}


def test_penalties_count_each_answers_own_tokens(tiny):
    params = SamplingParams(n=3, seed=4, max_tokens=40, ignore_eos=True, allowed_token_ids=list(range(10, 50)),
                            presence_penalty=2.0, frequency_penalty=2.0, temperature=0.1)
    [out] = generate(tiny, [PROMPT], params)
    assert all(len(set(answer.token_ids)) > 20 for answer in out.outputs)
    assert [answer.token_ids for answer in generate(tiny, [PROMPT, [9]], [params, params])[0].outputs] == [answer.token_ids for answer in out.outputs]


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids):
        return "".join(chr(97 + token % 26) for token in ids)


def test_a_stream_tells_which_answer_a_piece_belongs_to(tiny):
    tiny.tokenizer = Letters()
    tiny.engine.decode = tiny.tokenizer.decode
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    texts = ["", "", ""]
    pieces = list(tiny.stream(PROMPT, params))
    for piece in pieces:
        assert isinstance(piece, str) and piece
        texts[piece.index] += piece
    assert texts == [tiny.tokenizer.decode(answer.token_ids) for answer in generate(tiny, [PROMPT], params)[0].outputs]
    assert [piece.index for piece in pieces] != sorted(piece.index for piece in pieces)  # they come side by side
    stream = tiny.stream(PROMPT, params)
    next(stream)
    stream.close()
    assert not tiny.engine.has_unfinished_requests()


def test_no_answer_ends_before_min_tokens(tiny):
    [out] = generate(tiny, [PROMPT], SamplingParams(n=3, seed=1, min_tokens=5, max_tokens=9, logit_bias={2: 100}))
    assert [answer.token_ids[5:] for answer in out.outputs] == [[2]] * 3 and all(2 not in answer.token_ids[:5] for answer in out.outputs)


def test_n_and_the_queues_limit(directory):
    from minivllm.engine.engine import QueueFullError

    with LLM(directory, device="cpu", block_size=4, num_kv_blocks=16, max_model_len=64, max_num_queued_requests=5) as llm:
        with pytest.raises(QueueFullError, match="0 requests wait .* 6 more"):
            llm.generate([PROMPT, PROMPT], SamplingParams(n=3, max_tokens=2), use_tqdm=False)
        assert len(llm.generate([PROMPT], SamplingParams(n=5, max_tokens=2), use_tqdm=False)[0].outputs) == 5


def test_an_interrupt_between_two_siblings_leaves_none_behind(tiny, monkeypatch):
    add, calls = Scheduler.add, []

    def interrupted(self, seq):
        calls.append(seq)
        if len(calls) == 3:
            raise KeyboardInterrupt
        add(self, seq)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(tiny, [PROMPT], SamplingParams(n=4))
    assert not tiny.engine.has_unfinished_requests()
    assert len(generate(tiny, [PROMPT], SamplingParams(n=4, max_tokens=3))[0].outputs) == 4


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_first", "longest_hit_first"])
@pytest.mark.parametrize("caching", [True, False])
def test_random_runs_read_the_right_blocks_and_always_finish(policy, caching):
    """A pool under pressure: preemptions, chunks, aborts; the fake runner knows what every slot must hold."""
    preemptions = 0
    for seed in range(12):
        rng = random.Random(seed)
        config = tiny_config(block_size=2, num_blocks=rng.choice([8, 9]), max_num_seqs=rng.choice([2, 4]), budget=rng.choice([4, 9]), caching=caching)
        engine = make_engine(config, policy=policy)
        execute = engine.runner.execute

        def with_prompt_logprobs(plan):
            result = execute(plan)
            result.prompt_logprobs = {row.seq_id: [([token], [0.0], 1) for token in row.options.prompt_targets]
                                      for row in plan.rows if row.options is not None and row.options.prompt_targets}
            return result

        engine.runner.execute = with_prompt_logprobs
        requests, left = [], 12
        while left or engine.has_unfinished_requests():
            if left and rng.random() < 0.5:
                left -= 1
                prompt = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 9))]
                n = rng.randrange(1, 4)
                requests.append((prompt, engine.add(prompt, SamplingParams(n=n, max_tokens=rng.randrange(1, 9), prompt_logprobs=rng.choice([None, 0])),
                                                    priority=rng.randrange(3))))
            engine.step()
            check_scheduler(engine.scheduler)
            engine.runner.check_cached_blocks()
            if rng.random() < 0.03:
                engine.abort([rng.choice(requests)[1]] if requests else [])
                check_scheduler(engine.scheduler)
        run_to_end(engine)
        preemptions += engine.stats.num_preemptions
        for prompt, leader in requests:
            assert answered(leader) and len(members(leader)) == leader.sampling.n
            for seq in members(leader):
                want, reason = answer_alone(tuple(prompt), SamplingParams(max_tokens=leader.sampling.max_tokens), b"", config.max_model_len)
                got = tuple(seq.generated_token_ids)
                assert (got, seq.finish_reason) == (want, reason) or (seq.finish_reason == "abort" and got == want[:len(got)])
            if leader.sampling.prompt_logprobs is not None and leader.finish_reason != "abort":
                assert leader.options.prompt_logprobs == [None, *(([token], [0.0], 1) for token in prompt[1:])]
    assert preemptions > 5


def test_prompt_logprobs_of_a_prompt_preempted_in_its_middle_are_complete_and_in_place():
    engine = make_engine(tiny_config(block_size=2, num_blocks=8, max_num_seqs=2, budget=3), eos=())
    execute, asked = engine.runner.execute, []

    def with_prompt_logprobs(plan):
        result = execute(plan)
        for row in plan.rows:
            if row.options is not None and row.options.prompt_targets:
                asked.append(len(row.options.prompt_targets))
                result.prompt_logprobs[row.seq_id] = [([token], [-1.0 * (row.start + at)], 1) for at, token in enumerate(row.options.prompt_targets)]
        return result

    engine.runner.execute = with_prompt_logprobs
    engine.add([1, 2, 1], SamplingParams(max_tokens=13))
    engine.step()
    prompt = [1, 2, 3, 4, 4, 3, 2, 1, 1]
    seq = engine.add(prompt, SamplingParams(max_tokens=2, prompt_logprobs=0))
    run_to_end(engine)
    assert seq.num_preemptions == 1 and sum(asked) > len(prompt) - 1  # some were computed twice
    assert seq.options.prompt_logprobs == [None, *(([token], [-1.0 * at], 1) for at, token in enumerate(prompt[1:]))]
