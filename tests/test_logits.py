"""Edits of the logits, min_p, and the tokens they need: against transformers' processors, written-out formulas and exact probabilities."""

import math
import random
from collections import Counter

import pytest
import torch
from engine_fakes import make_engine, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor, TemperatureLogitsWarper,
                          TopKLogitsWarper, TopPLogitsWarper)

from minivllm import SamplingParams
from minivllm.engine.options import RowOptions
from minivllm.engine.step import PlanRow
from minivllm.kernels.philox import philox_4x32, uniform
from minivllm.worker.logits import Edits, History
from minivllm.worker.sampler import SamplingBatch, processed, sample

CPU = torch.device("cpu")
PROMPT, ANSWER = [3, 5, 5, 9, 0], [7, 3, 7, 7, 11]


def row_of(params, prompt=PROMPT, answer=ANSWER, seq_id=0, seed=0, ends=(), sibling=0, known=False):
    """A decode row: its last token is computed now, the others are its history unless `known`."""
    tokens = prompt + answer
    options = RowOptions(len(prompt), sibling, tuple(ends), None if known or not params.needs_history else tokens[:-1])
    return PlanRow(seq_id, len(tokens) - 1, tokens[-1:], [0], 0, True, params, seed, options)


def edited(logits, rows):
    """What `rows` make of their logits before the temperature, through the parts that a step has."""
    batch, history = SamplingBatch.of(rows, CPU), History(CPU)
    if batch.penalised:
        history.update([rows[index] for index in batch.penalised])
    if batch.edits is None:
        return logits
    got = logits.clone()
    for number, part in enumerate(batch.special.split(32)):
        got[part] = batch.edits.apply(logits[part].float(), number, batch.positions[part], history)
    return got


def draw(logits, rows):
    batch, history = SamplingBatch.of(rows, CPU), History(CPU)
    if batch.penalised:
        history.update([rows[index] for index in batch.penalised])
    return sample(logits, batch, history)


def logits_of(rows, size=20, seed=0, spread=1.5):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def written_out(logits, params, prompt=PROMPT, answer=ANSWER, ends=()):
    """The definition, one token at a time, in Python floats."""
    counts, seen = Counter(answer), set(prompt) | set(answer)
    values = []
    for token, value in enumerate(logits.double().tolist()):
        if token in seen:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
        value += dict(params.logit_bias).get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = -math.inf
        if len(answer) < params.min_tokens and token in ends:
            value = -math.inf
        values.append(value)
    return values


def exact_probabilities(logits, params, **history):
    """All options in their order, by sorting and adding up."""
    values = written_out(logits, params, **history)
    weights = [math.exp((value - max(values)) / params.temperature) for value in values]
    kept = sorted(range(len(weights)), key=lambda token: -weights[token])
    if params.top_k:
        kept = kept[:params.top_k]
    total, reached, few = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if reached < params.top_p * total or not few:
            few.append(token)
        reached += weights[token]
    kept = [token for token in few if weights[token] >= params.min_p * weights[few[0]]]
    total = sum(weights[token] for token in kept)
    return torch.tensor([weights[token] / total if token in kept else 0.0 for token in range(len(weights))], dtype=torch.float64)


def assert_follows(tokens, exact):
    """Chi-square against the exact probabilities."""
    draws, counts = len(tokens), torch.bincount(tokens, minlength=len(exact)).double()
    assert counts[exact == 0].sum() == 0
    likely = exact * draws >= 5
    freedom = int(likely.sum()) - 1
    statistic = ((counts - exact * draws) ** 2 / (exact * draws))[likely].sum()
    assert statistic < freedom + 4 * max(1, 2 * freedom) ** 0.5, f"{statistic:.1f} at {freedom} degrees of freedom"


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_the_repetition_penalty_is_transformers(penalty):
    logits = logits_of(6)
    rows = [row_of(SamplingParams(repetition_penalty=penalty), seq_id=index, answer=ANSWER[:index + 1]) for index in range(5)]
    for index, row in enumerate(rows):
        want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + ANSWER[:index + 1]]), logits[index:index + 1].clone())
        torch.testing.assert_close(edited(logits[:5], rows)[index:index + 1], want)


def test_the_bias_is_transformers():
    biases = {1: 2.5, 7: -3.0, 19: 100.0, 5: -100.0}
    logits = logits_of(1)
    want = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])(torch.tensor([PROMPT]), logits.clone())
    torch.testing.assert_close(edited(logits, [row_of(SamplingParams(logit_bias=biases))]), want)


@pytest.mark.parametrize("params", [
    SamplingParams(min_p=0.01), SamplingParams(min_p=0.2), SamplingParams(min_p=1.0), SamplingParams(temperature=0.5, min_p=0.3),
    SamplingParams(temperature=2.0, min_p=0.4, top_p=0.8), SamplingParams(temperature=0.7, top_k=12, top_p=0.9, min_p=0.1),
])
def test_the_filters_are_transformers_and_in_its_order(params):
    logits = logits_of(16, size=50)
    want = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        want = TopKLogitsWarper(params.top_k)(None, want)
    if params.top_p < 1:
        want = TopPLogitsWarper(params.top_p)(None, want)
    want = MinPLogitsWarper(params.min_p)(None, want)
    got = processed(logits, SamplingBatch.of([row_of(params)] * 16, CPU))
    assert torch.equal(got.isinf(), want.isinf()) and want.isinf().any()
    torch.testing.assert_close(got.softmax(-1), want.softmax(-1))


OPTIONS = {
    "presence": dict(presence_penalty=1.3), "frequency": dict(frequency_penalty=0.9), "negative": dict(presence_penalty=-2.0, frequency_penalty=-0.4),
    "repetition": dict(repetition_penalty=1.7), "bias": dict(logit_bias={7: 2.0, 2: -1.5}), "allowed": dict(allowed_token_ids=[1, 7, 8, 11, 13]),
    "min_tokens": dict(min_tokens=6), "min_tokens reached": dict(min_tokens=5), "min_p": dict(min_p=0.15),
    "all": dict(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.3, logit_bias={7: 1.0, 1: 3.0}, min_tokens=9,
                allowed_token_ids=list(range(0, 20, 2)) + [7, 1], temperature=1.4, top_k=9, top_p=0.95, min_p=0.05),
    "penalties and filters": dict(frequency_penalty=0.6, repetition_penalty=1.5, temperature=0.8, top_p=0.8, min_p=0.02),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_draws_follow_the_exact_probabilities(options):
    params, ends, draws = SamplingParams(**options), (1, 13), 2500
    logits = logits_of(1, seed=3)
    rows = [row_of(params, seq_id=index, seed=index, ends=ends) for index in range(draws)]
    exact = exact_probabilities(logits[0], params, ends=ends)
    assert_follows(draw(logits.expand(draws, -1), rows), exact)
    if params.edits_logits and options != OPTIONS["min_tokens reached"]:  # the test would notice if the option did nothing
        with pytest.raises(AssertionError):
            assert_follows(draw(logits.expand(draws, -1), [row_of(SamplingParams(), seq_id=i, seed=i) for i in range(draws)]), exact)


some_params = st.builds(
    SamplingParams, temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]), top_k=st.sampled_from([0, 3, 10]), top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]), presence_penalty=st.sampled_from([0.0, 1.5, -0.5]), frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.4]), logit_bias=st.dictionaries(st.integers(0, 19), st.sampled_from([-4.0, 3.0]), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 19), min_size=1, unique=True), min_tokens=st.integers(0, 12), max_tokens=st.just(64))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(some_params, st.lists(st.integers(0, 19), min_size=1, max_size=6), st.lists(st.integers(0, 19), max_size=6)),
                min_size=1, max_size=70), st.integers(0, 99))
def test_every_row_is_edited_by_its_own_options_and_draws_as_it_does_alone(requests, seed):
    logits = logits_of(len(requests), seed=seed)
    rows = [row_of(params, prompt, answer, seq_id=index, seed=1000 + index, ends=(2, 4)) for index, (params, prompt, answer) in enumerate(requests)]
    want = torch.tensor([written_out(logits[index], params, prompt, answer, ends=(2, 4)) for index, (params, prompt, answer) in enumerate(requests)])
    torch.testing.assert_close(edited(logits, rows), want.float())
    together = draw(logits, rows)
    alone = torch.cat([draw(logits[index:index + 1], [row]) for index, row in enumerate(rows)])
    assert torch.equal(together, alone)
    for index, row in enumerate(rows):
        if row.sampling.greedy and want[index].max() > -math.inf:
            assert want[index, together[index]] >= want[index].max() - 1e-5


def test_raw_logits_that_are_not_finite_are_found_whatever_is_allowed():
    logits = logits_of(3)
    logits[0, 4], logits[1, 4] = torch.nan, torch.inf
    rows = [row_of(SamplingParams(allowed_token_ids=[1, 2], temperature=t), seq_id=i) for i, t in enumerate((1.0, 0.0, 0.0))]
    assert (draw(logits, rows) < 0).tolist() == [True, True, False]


def test_a_batch_without_options_builds_nothing_for_them():
    rows = [PlanRow(i, 5, [1], [0], 0, True, SamplingParams(temperature=t), 0) for i, t in enumerate((0.0, 1.0))]
    batch = SamplingBatch.of(rows, CPU)
    assert batch.edits is batch.special is batch.siblings is batch.top_ks is batch.top_ps is batch.min_ps is None
    assert batch.penalised == batch.logprob_rows == []
    mixed = SamplingBatch.of([*rows, row_of(SamplingParams(min_tokens=9), ends=[1], seq_id=9)], CPU)
    assert mixed.special.tolist() == [2]  # the others go on with one pass


def test_siblings_draw_apart_and_the_first_as_a_request_alone():
    logits = torch.zeros(1, 1000)
    one, *others = [draw(logits, [row_of(SamplingParams(), seed=5, sibling=number)]).item() for number in range(6)]
    assert one == draw(logits, [PlanRow(0, len(PROMPT + ANSWER) - 1, [0], [0], 0, True, SamplingParams(), 5)]).item()
    assert len({one, *others}) == 6


def test_a_siblings_number_is_the_third_word_of_philoxs_counter():
    row = row_of(SamplingParams(), seed=2**63 + 17, sibling=6)
    batch = SamplingBatch.of([row], CPU)
    groups = torch.arange(3)
    words = philox_4x32((groups, torch.tensor(len(PROMPT + ANSWER)), torch.tensor(6), torch.tensor(0)), (torch.tensor(17), torch.tensor(2**31)))
    want = (torch.stack(words, dim=-1).flatten()[:10].float() + 0.5) * 2.0**-32
    assert torch.equal(uniform(batch.seeds, batch.positions, 10)[0], want)


def test_a_row_that_brings_no_history_must_have_been_there_before():
    history = History(CPU)
    with pytest.raises(ValueError, match=r"sequences \[4\] need their history"):
        history.update([row_of(SamplingParams(presence_penalty=1.0), seq_id=4, known=True)])


def run_with_history(seed, num_blocks, budget):
    """A random run whose rows feed a History; each row's tokens there must be the sequence's own. Returns how the run went."""
    rng = random.Random(seed)
    engine = make_engine(tiny_config(num_blocks=num_blocks, max_num_seqs=4, budget=budget), eos=())
    history, brought = History(CPU), []

    def look(plan):
        rows = [row for row in plan.rows if row.samples and row.sampling.needs_history]
        brought.extend(row.seq_id for row in rows if row.options.history is not None)
        assert all(row.options is None or row.options.history is None for row in plan.rows if row not in rows)
        if rows:
            history.update(rows)
        for held, row in zip(history.tokens.tolist(), rows):
            tokens = engine.scheduler.sequences[row.seq_id].token_ids
            assert held == tokens + [-1] * (len(held) - len(tokens)) and row.options.num_prompt_tokens + 30 > len(tokens)

    engine.runner.on_plan = look
    waiting = [rng.randrange(1, 7) for _ in range(10)]
    for step in range(600):
        if waiting and rng.random() < 0.4:
            engine.add([rng.randrange(1, 5) for _ in range(waiting.pop())],
                       SamplingParams(max_tokens=rng.randrange(1, 9), presence_penalty=rng.choice([0.0, 1.0]), n=rng.choice([1, 1, 2])))
        engine.step()
        if rng.random() < 0.05 and engine.scheduler.running:
            engine.abort(engine.scheduler.running[-1:])
    assert not engine.has_unfinished_requests() and not waiting
    return engine.stats.num_preemptions, Counter(brought)


def test_the_worker_knows_the_tokens_of_every_penalised_row():
    runs = [run_with_history(seed, num_blocks=8, budget=5) for seed in range(8)]
    assert sum(preemptions for preemptions, _ in runs) > 8
    assert sum(max(brought.values()) > 1 for _, brought in runs) >= 4  # again after a gap


def test_without_preemption_a_history_is_brought_once():
    without, brought = run_with_history(0, num_blocks=400, budget=50)
    assert not without and set(brought.values()) == {1}


def test_history_is_sent_once_and_not_for_others():
    engine = make_engine(tiny_config(num_blocks=32), eos=())
    engine.add([1, 2, 3], SamplingParams(max_tokens=5, repetition_penalty=1.2))
    engine.add([1, 2, 3], SamplingParams(max_tokens=5))
    plans = []
    engine.runner.on_plan = lambda plan: plans.append([(row.options, row.start) for row in plan.rows])
    while engine.has_unfinished_requests():
        engine.step()
    assert [rows[0][0].history for rows in plans] == [[], None, None, None, None]
    assert all(options is None for rows in plans for options, _ in rows[1:])


def test_edits_hold_only_what_is_asked_for():
    edits = Edits([row_of(SamplingParams(logit_bias={1: 1.0}))], 32, CPU)
    assert edits.allowed is edits.banned is None and not edits.penalised
