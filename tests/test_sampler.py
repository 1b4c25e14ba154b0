"""The sampler: Philox against its published vectors, filters against transformers' processors, draws against exact probabilities."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minivllm import SamplingParams
from minivllm.engine.step import PlanRow
from minivllm.kernels.philox import philox_4x32, uniform
from minivllm.worker.sampler import SamplingBatch, processed, sample

CPU = torch.device("cpu")

# Counter, key -> words: the published test vectors of Philox4x32-10.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def batch_of(*params, position=7, seeds=None):
    seeds = seeds or [p.seed or 0 for p in params]
    rows = [PlanRow(i, position - 1, [0], [0], 0, True, p, seed) for i, (p, seed) in enumerate(zip(params, seeds))]
    return SamplingBatch.of(rows, CPU)


def logits_of(rows, size=50, seed=0, spread=2.0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("counter, key, words", VECTORS)
def test_philox_gives_the_published_words(counter, key, words):
    got = philox_4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in got) == words


def test_uniforms_lie_inside_0_and_1_and_look_uniform():
    u = uniform(torch.tensor([3, -1]), torch.tensor([5, 5]), 100_001)
    assert u.shape == (2, 100_001) and u.min() > 0 and u.max() < 1
    counts = torch.histc(u[0], bins=20, min=0, max=1)
    assert ((counts - 5000.05) ** 2 / 5000.05).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(torch.corrcoef(u)[0, 1]) < 0.02


def test_uniforms_depend_on_seed_and_position_alone():
    one = uniform(torch.tensor([9]), torch.tensor([4]), 13)
    assert torch.equal(uniform(torch.tensor([1, 9]), torch.tensor([4, 4]), 13)[1:], one)
    assert torch.equal(uniform(torch.tensor([9]), torch.tensor([4]), 30)[:, :13], one)
    assert not torch.equal(uniform(torch.tensor([9]), torch.tensor([5]), 13), one)
    assert not torch.equal(uniform(torch.tensor([9 + 2**32]), torch.tensor([4]), 13), one)


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.3), SamplingParams(temperature=5.0), SamplingParams(top_k=1), SamplingParams(top_k=7), SamplingParams(top_k=1000),
    SamplingParams(top_p=0.01), SamplingParams(top_p=0.5), SamplingParams(top_p=0.99), SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
])
def test_what_is_kept_equals_transformers(params):
    logits = logits_of(rows=16)
    expected = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        expected = TopKLogitsWarper(params.top_k)(None, expected)
    if params.top_p < 1:
        expected = TopPLogitsWarper(params.top_p)(None, expected)
    got = processed(logits, batch_of(*[params] * 16))
    assert torch.equal(got.isinf(), expected.isinf())
    torch.testing.assert_close(got.softmax(-1), expected.softmax(-1))


def test_top_p_keeps_the_token_that_crosses_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = [processed(logits, batch_of(SamplingParams(top_p=p))).isfinite().sum().item() for p in (0.1, 0.49, 0.6, 0.9, 0.99)]
    assert kept == [1, 1, 2, 3, 4]


def test_each_row_has_its_own_parameters():
    logits = logits_of(rows=4)
    params = [SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams(top_p=0.4), SamplingParams(temperature=2.0)]
    together = processed(logits, batch_of(*params))
    for row in (1, 2, 3):
        alone = processed(logits[row:row + 1], batch_of(params[row]))
        torch.testing.assert_close(together[row:row + 1], alone)
    assert sample(logits, batch_of(*params))[0] == logits[0].argmax()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8), SamplingParams(top_k=5), SamplingParams(top_p=0.7),
                                    SamplingParams(temperature=1.5, top_k=12, top_p=0.9)])
def test_draws_follow_the_exact_probabilities(params):
    draws = 20_000
    logits = logits_of(rows=1, size=20, spread=1.5)
    exact = processed(logits, batch_of(params)).softmax(-1)[0].double()
    tokens = sample(logits.expand(draws, -1), batch_of(*[params] * draws, seeds=list(range(draws))))
    counts = torch.bincount(tokens, minlength=20).double()
    assert counts[exact == 0].sum() == 0
    likely = exact * draws >= 5
    statistic = ((counts - exact * draws) ** 2 / (exact * draws))[likely].sum()
    freedom = int(likely.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # far beyond the 99.9% point


def test_positions_draw_independently():
    params = SamplingParams(seed=5)
    logits = torch.zeros(1, 4)
    tokens = [sample(logits, batch_of(params, position=p)).item() for p in range(1, 400)]
    pairs = torch.tensor([4 * a + b for a, b in zip(tokens, tokens[1:])])
    counts = torch.bincount(pairs, minlength=16).double()
    assert ((counts - 398 / 16) ** 2 / (398 / 16)).sum() < 45  # 15 degrees of freedom


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy_and_never_nan(temperature):
    logits = logits_of(rows=8)
    assert torch.equal(sample(logits, batch_of(*[SamplingParams(temperature=temperature)] * 8)), logits.argmax(-1))


def test_a_huge_temperature_is_uniform_over_what_is_kept():
    logits = logits_of(rows=1, size=8).expand(4000, -1)
    tokens = sample(logits, batch_of(*[SamplingParams(temperature=1e6, top_k=4)] * 4000, seeds=list(range(4000))))
    counts = torch.bincount(tokens, minlength=8)
    assert (counts > 0).sum() == 4 and counts[counts > 0].min() > 850


def test_the_only_kept_token_is_taken_whatever_its_noise():
    logits = logits_of(rows=1, size=50).expand(3000, -1)
    tokens = sample(logits, batch_of(*[SamplingParams(top_k=1)] * 3000, seeds=list(range(3000))))
    assert (tokens == logits[0].argmax()).all()


def test_seeds_use_all_64_bits():
    logits = torch.zeros(1, 1000)
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1]
    tokens = [sample(logits, batch_of(SamplingParams(), seeds=[seed])).item() for seed in seeds]
    assert len(set(tokens)) == len(seeds)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_logits_are_drawn_from_in_float32(dtype):
    logits = logits_of(rows=4).to(dtype)
    assert processed(logits, batch_of(*[SamplingParams(temperature=0.5)] * 4)).dtype == torch.float32


@pytest.mark.gpu
def test_the_gpu_draws_the_same_tokens():
    logits = logits_of(rows=64, size=5000)
    params = [SamplingParams(temperature=0.9, top_k=k, top_p=p, seed=k) for k in (0, 1, 5, 50) for p in (0.3, 0.9, 0.99, 1.0)] * 4
    rows = [PlanRow(i, 6, [0], [0], 0, True, p, 1000 + i) for i, p in enumerate(params)]
    host = sample(logits, SamplingBatch.of(rows, CPU))
    device = sample(logits.cuda(), SamplingBatch.of(rows, torch.device("cuda")))
    assert (host == device.cpu()).float().mean() > 0.98  # log1p may differ in the last bit where two candidates all but tie
