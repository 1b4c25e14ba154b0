"""Options of a request through the whole engine: penalties, forced and forbidden tokens, log probabilities, against transformers."""

import pickle
from collections import Counter

import pytest
import tiny_models
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from minivllm import LLM, SamplingParams
from minivllm.engine.invariants import check_scheduler
from minivllm.engine.step import StepPlan
from minivllm.outputs import Logprob
from minivllm.worker import logprobs as logprobs_module

PROMPTS = [[5, 9, 5, 11, 40, 5], [3], list(range(20, 41)), [7, 7, 7, 7]]
#: name -> how the engine runs: alone in the pool, cut into chunks, and with so few blocks that sequences are preempted.
ENGINES = {"roomy": dict(num_kv_blocks=64), "chunked": dict(num_kv_blocks=64, max_num_batched_tokens=5, max_num_seqs=5),
           "cramped": dict(num_kv_blocks=20, max_model_len=64), "uncached": dict(num_kv_blocks=20, max_model_len=64, enable_prefix_caching=False)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.save("llama", path)
    return path


@pytest.fixture(scope="module")
def reference(directory):
    return tiny_models.make("llama")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, directory):
    with LLM(directory, device="cpu", block_size=4, **{"max_model_len": 96, **ENGINES[request.param]}) as llm:
        yield llm
        if request.param in ("cramped", "uncached"):
            assert llm.stats.num_preemptions > 0


@pytest.fixture(scope="module")
def roomy(directory):
    with LLM(directory, device="cpu", block_size=4, num_kv_blocks=64, max_model_len=96) as llm:
        yield llm


def generate(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_scheduler(llm.engine.scheduler)
    assert llm.engine.blocks.num_used_blocks == 0
    return outputs


@torch.inference_mode()
def greedy(reference, prompt, processor, count):
    """Transformers' logits, `processor(all ids [1, T], logits [1, V])`, the largest; without a cache."""
    ids = list(prompt)
    for _ in range(count):
        logits = reference(torch.tensor([ids])).logits[:, -1]
        ids.append(int(processor(torch.tensor([ids]), logits).argmax()))
    return ids[len(prompt):]


def presence_and_frequency(num_prompt, presence, frequency):
    def process(ids, logits):
        logits = logits.clone()
        for token, count in Counter(ids[0, num_prompt:].tolist()).items():
            logits[0, token] -= presence + frequency * count
        return logits
    return process


@pytest.fixture(scope="module")
def penalised_greedy(reference):
    """(prompts, params, transformers' answers)."""
    params, wanted = [], []
    for prompt in PROMPTS:
        for options, processor in [
            (dict(repetition_penalty=1.8), RepetitionPenaltyLogitsProcessor(1.8)),
            (dict(presence_penalty=2.0, frequency_penalty=1.5), presence_and_frequency(len(prompt), 2.0, 1.5)),
            (dict(logit_bias={8: 5.0, 30: -9.0}), SequenceBiasLogitsProcessor([[[8], 5.0], [[30], -9.0]])),
            (dict(repetition_penalty=1.3, min_tokens=14, logit_bias={2: 6.0}), LogitsProcessorList([
                RepetitionPenaltyLogitsProcessor(1.3), SequenceBiasLogitsProcessor([[[2], 6.0]]),
                MinNewTokensLengthLogitsProcessor(len(prompt), 14, eos_token_id=2)])),
        ]:
            params.append(SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, **options))
            wanted.append(greedy(reference, prompt, processor, 16))
    return [prompt for prompt in PROMPTS for _ in range(4)], params, wanted


def test_greedy_answers_under_penalties_are_transformers(engine, penalised_greedy):
    prompts, params, wanted = penalised_greedy
    outputs = generate(engine, prompts, params)
    assert [out["token_ids"] for out in outputs] == wanted
    plain = generate(engine, PROMPTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert all(out["token_ids"] not in wanted for out in plain)  # every option did something


SEEDED = [SamplingParams(seed=11, max_tokens=18, ignore_eos=True, repetition_penalty=1.4, frequency_penalty=0.5, top_p=0.9),
          SamplingParams(seed=12, max_tokens=18, ignore_eos=True, presence_penalty=1.5, min_p=0.02, logprobs=2),
          SamplingParams(seed=13, max_tokens=18, temperature=1.5, allowed_token_ids=list(range(2, 60)), min_tokens=9, prompt_logprobs=1),
          SamplingParams(seed=14, max_tokens=18, ignore_eos=True, temperature=0.7)]


@pytest.fixture(scope="module")
def seeded_alone(roomy):
    return [generate(roomy, [prompt], params)[0] for prompt, params in zip(PROMPTS, SEEDED)]


def test_seeded_answers_are_the_same_alone_in_a_batch_chunked_and_preempted(engine, seeded_alone):
    others = [SamplingParams(seed=50 + i, max_tokens=20, ignore_eos=True, frequency_penalty=i % 2) for i in range(4)]
    before = engine.stats.num_preemptions
    outputs = generate(engine, [*PROMPTS, *PROMPTS], [*others, *SEEDED])[4:]
    assert (engine.stats.num_preemptions > before) == (engine.config.num_kv_blocks == 20)
    assert [out["token_ids"] for out in outputs] == [out["token_ids"] for out in seeded_alone]
    for got, want in zip(outputs, seeded_alone):
        for ours, theirs in ((got["logprobs"], want["logprobs"]), (got.prompt_logprobs, want.prompt_logprobs)):
            assert (ours is None) == (theirs is None)
            for one, other in zip(ours or [], theirs or [], strict=True):
                assert (one and list(one)) == (other and list(other))
                assert all(abs(one[token].logprob - other[token].logprob) < 1e-5 for token in one or ())


def test_allowed_tokens_are_the_only_ones(roomy):
    [out] = generate(roomy, [PROMPTS[0]], SamplingParams(allowed_token_ids=[4, 8, 15], max_tokens=30, seed=1))
    assert set(out["token_ids"]) == {4, 8, 15}


def test_no_end_token_comes_before_min_tokens(roomy):
    ends = dict(logit_bias={2: 100, 33: 60}, stop_token_ids=[33])
    for temperature in (0, 1.0):
        for minimum in (0, 1, 7):
            [out] = generate(roomy, [PROMPTS[0]], SamplingParams(temperature=temperature, min_tokens=minimum, max_tokens=20, **ends))
            assert len(out["token_ids"]) == minimum + 1 and out["token_ids"][-1] == 2 and out["finish_reason"] == "stop"
            assert not {2, 33} & set(out["token_ids"][:-1])
    [out] = generate(roomy, [PROMPTS[0]], SamplingParams(min_tokens=20, max_tokens=20, **ends))
    assert out["finish_reason"] == "length" and len(out["token_ids"]) == 20


@torch.inference_mode()
def true_logprobs(reference, tokens):
    """[T, V]: row p is what the model says of the token behind position p."""
    return reference(torch.tensor([tokens])).logits[0].log_softmax(-1)


def assert_logprobs(known, row, token, k):
    """One token's dict against the true log probabilities [V]: itself first, then the k best."""
    best = row.topk(k).indices.tolist()
    assert list(known) == [token, *[other for other in best if other != token]]
    for other, got in known.items():
        assert isinstance(got, Logprob) and abs(got.logprob - row[other].item()) < 1e-4
        assert got.rank == 1 + int((row > row[other]).sum()) and got.decoded_token is None  # no tokenizer here


@pytest.mark.parametrize("at_once", [None, 3])
def test_logprobs_are_those_of_transformers_raw_logits(engine, reference, monkeypatch, at_once):
    if at_once:
        monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", 4 * 97 * at_once)
    params = [SamplingParams(seed=i, max_tokens=9 + i, ignore_eos=True, temperature=1.3, logprobs=k, prompt_logprobs=j, repetition_penalty=1.5)
              for i, (k, j) in enumerate([(0, 3), (5, None), (2, 0), (None, 4)])]
    for _ in range(2):  # the second time the prefix cache knows the prompts
        for prompt, own, out in zip(PROMPTS, params, generate(engine, PROMPTS, params)):
            answer = out.outputs[0]
            rows = true_logprobs(reference, prompt + answer.token_ids)
            if own.logprobs is None:
                assert answer.logprobs is None and answer.cumulative_logprob is None
            else:
                assert len(answer.logprobs) == len(answer.token_ids)
                for place, (token, known) in enumerate(zip(answer.token_ids, answer.logprobs), start=len(prompt) - 1):
                    assert_logprobs(known, rows[place], token, own.logprobs)
                total = sum(rows[len(prompt) - 1 + i, token] for i, token in enumerate(answer.token_ids))
                assert abs(answer.cumulative_logprob - total) < 1e-3 and out["cumulative_logprob"] == answer.cumulative_logprob
            if own.prompt_logprobs is None:
                assert out.prompt_logprobs is None
            else:
                assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(prompt)
                for place, (token, known) in enumerate(zip(prompt[1:], out.prompt_logprobs[1:])):
                    assert_logprobs(known, rows[place], token, own.prompt_logprobs)


def test_prompt_logprobs_compute_the_whole_prompt_and_others_hit_it(roomy):
    prompt = list(range(50, 75))
    generate(roomy, [prompt], SamplingParams(max_tokens=1))
    queries = roomy.stats.prefix_cache_queries
    [out] = generate(roomy, [prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert out.num_cached_tokens == 0 and roomy.stats.prefix_cache_queries == queries
    assert generate(roomy, [prompt], SamplingParams(max_tokens=1, logprobs=3))[0].num_cached_tokens == 24


def test_prompt_logprobs_never_hold_more_than_the_stated_logits(roomy, monkeypatch):
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", 4 * 97 * 6)
    sizes, compute = [], roomy.runner.model.compute_logits
    monkeypatch.setattr(roomy.runner.model, "compute_logits", lambda hidden: sizes.append(len(hidden)) or compute(hidden))
    [out] = generate(roomy, [[1 + i % 90 for i in range(80)]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert len(out.prompt_logprobs) == 80 and max(sizes) == 6 and sum(sizes) >= 79


def test_log_probabilities_have_their_tokens_texts(embedded):
    [out] = generate(embedded, "The capital of France is", SamplingParams(temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=1))
    first = out.outputs[0].logprobs[0]
    assert next(iter(first.values())).decoded_token == " Paris" and next(iter(first.values())).rank == 1 and len(first) == 2
    assert [known[token].decoded_token for token, known in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:])] == [" capital", " of", " France", " is"]
    assert out.as_dict()["outputs"][0]["logprobs"][0][out["token_ids"][0]]["decoded_token"] == " Paris"
    assert out["logprobs"] is out.outputs[0].logprobs


def test_a_stop_string_waits_for_min_tokens(embedded):
    ask = lambda **options: generate(embedded, "The capital of France is", SamplingParams(temperature=0, max_tokens=8, stop=[".", "answer"], **options))[0]
    assert ask()["text"] == " Paris" and ask(min_tokens=1)["text"] == " Paris"
    late = ask(min_tokens=2)  # the period is the second token
    assert late["text"] == " Paris.\n\nThe " and late["stop_reason"] == "answer"


@pytest.mark.parametrize("options, match", [
    (dict(logit_bias={97: 1.0}), r"SamplingParams.logit_bias names token id 97, which is outside the vocabulary of 97 \(0 to 96\)"),
    (dict(allowed_token_ids=[1, 500]), "SamplingParams.allowed_token_ids names token id 500, .*0 to 96"),
    (dict(logprobs=98), "SamplingParams.logprobs must be at most the vocabulary's size, 97, got 98"),
    (dict(prompt_logprobs=1000), "SamplingParams.prompt_logprobs must be at most .*97, got 1000"),
    (dict(min_tokens=3, allowed_token_ids=[2, 5], stop_token_ids=[5]), "min_tokens 3 forbids every token that may be chosen.*allowed_token_ids"),
])
def test_what_the_vocabulary_forbids_is_refused_before_anything_is_queued(roomy, options, match):
    with pytest.raises(ValueError, match=match):
        roomy.generate([[1], [2]], [SamplingParams(), SamplingParams(**options)], use_tqdm=False)
    with pytest.raises(ValueError, match=match):
        roomy.engine.add([1], SamplingParams(**options))
    assert not roomy.engine.has_unfinished_requests()


def test_all_log_probabilities_may_be_asked_for(roomy):
    [out] = generate(roomy, [[1, 2]], SamplingParams(max_tokens=2, logprobs=97, prompt_logprobs=97))
    for known in (*out["logprobs"], out.prompt_logprobs[1]):
        assert abs(sum(torch.tensor(entry.logprob).exp() for entry in known.values()) - 1) < 1e-5 and len(known) == 97


def test_an_interrupt_under_options_leaves_the_engine_usable(roomy, seeded_alone, monkeypatch):
    execute, calls = roomy.runner.execute, []

    def interrupted(plan):
        calls.append(plan)
        if len(calls) == 5:
            execute(plan)
            raise KeyboardInterrupt
        return execute(plan)

    with monkeypatch.context() as patch:
        patch.setattr(roomy.runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(roomy, PROMPTS, SEEDED)
    assert not roomy.engine.has_unfinished_requests() and roomy.engine.blocks.num_used_blocks == 0
    assert [out["token_ids"] for out in generate(roomy, PROMPTS, SEEDED)] == [out["token_ids"] for out in seeded_alone]


def test_a_plan_travels_and_stays_small(roomy, monkeypatch):
    """Another process gets the same plan: equal after pickling, and a decode row no longer than its request is complicated."""
    plans, execute = [], roomy.runner.execute
    monkeypatch.setattr(roomy.runner, "execute", lambda plan: plans.append(pickle.dumps(plan)) or execute(pickle.loads(plans[-1])))
    before = generate(roomy, PROMPTS[:3], SEEDED[:3])
    assert isinstance(pickle.loads(plans[0]), StepPlan) and pickle.dumps(pickle.loads(plans[0])) == plans[0]
    [long] = generate(roomy, [list(range(3, 83))], SamplingParams(max_tokens=9, ignore_eos=True, presence_penalty=1.0))
    assert len(plans[-2]) < 1000 and len(long["token_ids"]) == 9 and before


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
def test_a_gpu_gives_the_same_with_and_without_graphs(directory, roomy, eager):
    """Every option at once, over batches larger than what the sampler edits at a time; decodes come out of graphs unless eager."""
    params = [SEEDED[i % 4] for i in range(40)] + [SamplingParams(n=3, seed=9, max_tokens=18, ignore_eos=True, repetition_penalty=1.3, logprobs=1),
                                                   SamplingParams(temperature=0, logit_bias={9: 4.0}, frequency_penalty=1.0, max_tokens=18)]
    prompts = [PROMPTS[i % 4] for i in range(42)]
    with LLM(directory, device="cuda", dtype="float32", num_kv_blocks=200, block_size=16, max_model_len=96, enforce_eager=eager) as llm:
        got = generate(llm, prompts, params)
        assert (llm.runner.graphs is None) == eager and (eager or llm.runner.graphs.num_replays > 10)
    for ours, theirs in zip(got, generate(roomy, prompts, params)):
        assert [answer.token_ids for answer in ours.outputs] == [answer.token_ids for answer in theirs.outputs]
        for one, other in zip(ours["logprobs"] or [], theirs["logprobs"] or []):
            assert list(one) == list(other) and all(abs(one[token].logprob - other[token].logprob) < 1e-4 for token in one)
