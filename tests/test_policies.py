"""Policies: who is served first, and that nobody starves."""

import inspect

import pytest
from engine_fakes import make_engine, tiny_config

from minivllm import SamplingParams
from minivllm.engine import policies
from minivllm.engine.policies import POLICIES

LONG = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def order_of_first_tokens(engine, sequences):
    order = []
    while engine.has_unfinished_requests():
        engine.step()
        order += [i for i, seq in enumerate(sequences) if seq.num_generated_tokens and i not in order]
    return order


def engine_with(policy, **options):
    return make_engine(tiny_config(**{"max_num_seqs": 1, "num_blocks": 20, "budget": 32, **options}), policy=policy)


def test_fcfs_keeps_the_order():
    engine = engine_with("fcfs")
    assert order_of_first_tokens(engine, [engine.add([1] * n, LONG) for n in (5, 1, 3)]) == [0, 1, 2]


def test_shortest_first():
    engine = engine_with("shortest_first")
    assert order_of_first_tokens(engine, [engine.add([1] * n, LONG) for n in (9, 1, 4)]) == [1, 2, 0]


def test_priority_first_and_ties_in_order():
    engine = engine_with("priority")
    assert order_of_first_tokens(engine, [engine.add([1, i % 4 + 1], LONG, priority=p) for i, p in enumerate((5, 0, 5, -3))]) == [3, 1, 0, 2]


def test_longest_hit_first():
    engine = engine_with("longest_hit_first")
    engine.add([1, 2, 3, 4, 1, 2], LONG)
    while engine.has_unfinished_requests():
        engine.step()
    sequences = [engine.add(prompt, LONG) for prompt in ([4, 4, 4, 4, 4, 4], [1, 2, 4, 4], [1, 2, 3, 4, 1, 2])]
    assert order_of_first_tokens(engine, sequences) == [2, 1, 0]
    assert [seq.num_cached_tokens for seq in sequences] == [0, 2, 5]


@pytest.mark.parametrize("policy", ["shortest_first", "priority", "longest_hit_first"])
def test_what_waits_long_enough_is_served_though_favoured_ones_keep_coming(policy):
    engine = engine_with(policy)
    engine.add([1, 2, 3], LONG, priority=0)
    victim, favoured = engine.add([4] * 16, LONG, priority=3), []
    for _ in range(2000):
        if len(engine.scheduler.waiting) < 3:
            favoured.append(engine.add([1, 2, 3], LONG, priority=0))
        engine.step()
        if victim.finished:
            break
    assert victim.finish_reason == "length"  # it had its turn,
    assert any(seq.finished for seq in favoured)  # though not before later ones had theirs


def test_without_ageing_it_would_starve():
    engine = engine_with(policies.Aged(lambda seq: len(seq.token_ids), ageing=0))
    victim = engine.add([4] * 16, LONG)
    for _ in range(500):
        if len(engine.scheduler.waiting) < 3:
            engine.add([1, 2, 3], LONG)
        engine.step()
    assert not victim.num_generated_tokens


def test_each_policy_is_shorter_than_30_lines():
    for make in [*POLICIES.values(), policies.first_come_first_served, policies.Aged]:
        assert len(inspect.getsource(make).splitlines()) < 30


def test_running_ones_keep_their_token_under_every_policy():
    for policy in POLICIES:
        engine = engine_with(policy, max_num_seqs=3, budget=4, num_blocks=40)
        first = engine.add([1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        engine.step()
        for _ in range(3):
            engine.add([2] * 20, LONG, priority=-1)
        for _ in range(6):
            before = first.num_generated_tokens
            engine.step()
            assert first.num_generated_tokens == before + 1, policy
