"""Scheduler: who computes what in a step, who is admitted, who gives way; and what it counts."""

import itertools

import pytest
from engine_fakes import make_engine, run_to_end, tiny_config

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.policies import first_come_first_served
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence, SequenceStatus
from minivllm.engine.step import StepResult
from minivllm.sampling_params import SamplingParams


def add(engine, *tokens, max_tokens=None):
    return engine.add(list(tokens), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def step(engine):
    """Run one step: (sequence, start, number of tokens, samples) of each row."""
    engine.step()
    return [(row.seq_id, row.start, len(row.token_ids), row.samples) for row in engine.runner.plans[-1].rows]


def ids(sequences):
    return [seq.seq_id for seq in sequences]


# The batch.

def test_a_prompt_is_computed_at_once_and_then_decoded_token_by_token():
    engine = make_engine(tiny_config())
    seq = add(engine, 1, 2, 3, max_tokens=3)
    assert [step(engine), step(engine), step(engine)] == [[(0, 0, 3, True)], [(0, 3, 1, True)], [(0, 4, 1, True)]]
    assert seq.finish_reason == "length" and seq.num_generated_tokens == 3


def test_a_long_prompt_is_cut_to_the_budget_and_samples_at_its_end_only():
    engine = make_engine(tiny_config(budget=4))
    add(engine, *[1] * 10)
    assert [step(engine) for _ in range(4)] == [[(0, 0, 4, False)], [(0, 4, 4, False)], [(0, 8, 2, True)], [(0, 10, 1, True)]]


def test_chunks_and_decodes_share_a_batch():
    engine = make_engine(tiny_config(budget=4, num_blocks=16))
    add(engine, 1)
    step(engine)
    add(engine, *[2] * 6)
    assert step(engine) == [(0, 1, 1, True), (1, 0, 3, False)]
    assert step(engine) == [(0, 2, 1, True), (1, 3, 3, True)]


def test_the_last_chunk_leaves_room_for_the_next_prompt():
    engine = make_engine(tiny_config(budget=4, num_blocks=16))
    add(engine, *[1] * 6)
    add(engine, *[2] * 6)
    assert step(engine) == [(0, 0, 4, False)]
    assert step(engine) == [(0, 4, 2, True), (1, 0, 2, False)]


def waiting(seq_id, tokens, computed=0):
    return Sequence(seq_id, [1] * tokens, SamplingParams(), num_computed_tokens=computed)


def test_each_running_sequence_is_sure_of_a_token_beside_a_long_prefill():
    long, decode = waiting(0, 100), waiting(1, 5, computed=4)
    assert list(first_come_first_served((long, decode, decode), (), 4)) == [(long, 2), (decode, 1), (decode, 1)]
    assert list(first_come_first_served((long, long, decode), (), 7)) == [(long, 5), (long, 1), (decode, 1)]
    assert list(first_come_first_served((decode, decode, long), (), 7)) == [(decode, 1), (decode, 1), (long, 5)]


def test_a_decode_gets_its_token_in_every_step_of_a_long_prefill():
    engine = make_engine(tiny_config(budget=2, max_num_seqs=2, num_blocks=20))
    seq = add(engine, 1)
    step(engine)
    add(engine, *[2] * 12)
    for generated in range(2, 12):
        assert len(step(engine)) == 2 and seq.num_generated_tokens == generated


def test_a_smaller_budget_than_max_num_seqs_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        Scheduler(BlockManager(4, 2), max_num_seqs=4, max_num_batched_tokens=3, stop_check=lambda seq: None)


def test_a_row_carries_what_the_worker_needs():
    engine = make_engine(tiny_config())
    params = SamplingParams(seed=7)
    seq = engine.add([1, 2, 3], params)
    row = engine.scheduler.schedule().rows[0]
    assert (row.token_ids, row.block_table, row.write_start, row.context_len) == ([1, 2, 3], [0, 1], 0, 3)
    assert row.sampling is params and row.seed == 7 and row.block_table is not seq.block_table


def test_an_idle_scheduler_plans_nothing():
    engine = make_engine(tiny_config())
    assert engine.scheduler.schedule().rows == [] and engine.step() == []
    assert engine.stats.num_steps == 0


# Admission.

def test_max_num_seqs_caps_the_running_set_not_the_step():
    engine = make_engine(tiny_config(max_num_seqs=2, num_blocks=16))
    for _ in range(3):
        add(engine, 1, max_tokens=3)
    step(engine)
    assert (ids(engine.scheduler.running), ids(engine.scheduler.waiting)) == ([0, 1], [2])
    assert step(engine) == [(0, 1, 1, True), (1, 1, 1, True)]  # there is budget for the third, and no place
    step(engine)
    assert [row[0] for row in step(engine)] == [2]


def test_a_place_is_filled_in_the_step_after_it_became_free():
    engine = make_engine(tiny_config(max_num_seqs=1))
    add(engine, 1, max_tokens=1)
    add(engine, 2, max_tokens=1)
    assert [step(engine), step(engine)] == [[(0, 0, 1, True)], [(1, 0, 1, True)]]


@pytest.mark.parametrize("num_blocks, admitted", [(5, 1), (6, 2)])
def test_admission_needs_blocks_for_the_whole_prompt_and_one_for_each_that_runs(num_blocks, admitted):
    engine = make_engine(tiny_config(block_size=2, num_blocks=num_blocks, budget=4))
    add(engine, 1, 1, 1)     # two blocks
    add(engine, *[2] * 6)    # three, and one in reserve; this step computes only one of its tokens
    assert len(step(engine)) == admitted


def test_the_first_in_the_queue_is_not_overtaken_by_one_that_fits():
    engine = make_engine(tiny_config(num_blocks=6))
    add(engine, 1, 1, 1)
    add(engine, *[2] * 8)
    add(engine, 3)
    assert [row[0] for row in step(engine)] == [0]
    assert ids(engine.scheduler.waiting) == [1, 2]


def test_a_prompt_that_needs_the_whole_pool_is_admitted_when_it_is_alone():
    engine = make_engine(tiny_config(num_blocks=4))
    seq = add(engine, *[1] * 7)
    run_to_end(engine)
    assert (seq.finish_reason, len(seq)) == ("length", 8)


# Prefix hits.

def test_a_hit_skips_the_computed_blocks():
    engine = make_engine(tiny_config())
    add(engine, 1, 2, 3, 4, 1, max_tokens=1)
    step(engine)
    seq = add(engine, 1, 2, 3, 4, 2)
    assert step(engine) == [(1, 4, 1, True)]
    assert (seq.num_cached_tokens, seq.write_start) == (4, 4)


def test_after_a_full_hit_the_last_token_is_computed_and_writes_nothing():
    engine = make_engine(tiny_config())
    add(engine, 1, 2, 3, 4, max_tokens=1)
    step(engine)
    seq = add(engine, 1, 2, 3, 4)
    assert step(engine) == [(1, 3, 1, True)]
    assert engine.runner.plans[-1].rows[0].write_start == 4
    assert seq.num_cached_tokens == 3
    assert step(engine) == [(1, 4, 1, True)] and engine.runner.plans[-1].rows[0].write_start == 4


def test_equal_prompts_in_one_step_are_both_computed():
    engine = make_engine(tiny_config())
    add(engine, 1, 2, 3)
    add(engine, 1, 2, 3)
    assert step(engine) == [(0, 0, 3, True), (1, 0, 3, True)]


def test_a_block_is_shared_while_its_owner_still_runs():
    engine = make_engine(tiny_config(budget=4, num_blocks=16))
    first = add(engine, 1, 2, 3, 4, 1, 2)
    step(engine)  # four of the six tokens
    second = add(engine, 1, 2, 3, 4, 3)
    assert step(engine) == [(0, 4, 2, True), (1, 4, 1, True)]
    assert second.block_table[:2] == first.block_table[:2]


def test_without_prefix_caching_everything_is_computed():
    engine = make_engine(tiny_config(caching=False))
    add(engine, 1, 2, 3, 4, max_tokens=1)
    step(engine)
    seq = add(engine, 1, 2, 3, 4)
    assert step(engine) == [(1, 0, 4, True)] and seq.num_cached_tokens == 0


# Preemption. Three sequences of one token grow in a pool of seven blocks of one token.

def three_in_seven_blocks(caching=True):
    engine = make_engine(tiny_config(block_size=1, num_blocks=7, caching=caching))
    sequences = [add(engine, token) for token in (1, 2, 3)]
    step(engine)
    step(engine)
    assert [len(seq.block_table) for seq in sequences] == [2, 2, 2]
    return engine, sequences


def test_the_newest_gives_way_and_is_the_first_in_the_queue():
    engine, sequences = three_in_seven_blocks()
    add(engine, 4)
    assert [row[0] for row in step(engine)] == [0, 1]
    assert ids(engine.scheduler.running) == [0, 1] and ids(engine.scheduler.waiting) == [2, 3]
    victim = sequences[2]
    assert (victim.status, victim.block_table, victim.num_computed_tokens, victim.num_preemptions) == (SequenceStatus.WAITING, [], 0, 1)
    assert len(victim) == 3  # what it generated is kept


def test_several_that_give_way_keep_their_order():
    engine = make_engine(tiny_config(block_size=1, num_blocks=8))
    for token in (1, 2, 3, 4):
        add(engine, token)
    step(engine)
    step(engine)  # two blocks each: all eight
    assert [row[0] for row in step(engine)] == [0, 1]
    assert ids(engine.scheduler.waiting) == [2, 3]


def test_nobody_is_admitted_in_a_step_that_preempts():
    engine, _ = three_in_seven_blocks()
    add(engine, 4)
    step(engine)
    assert engine.stats.num_preemptions == 1 and 3 not in ids(engine.scheduler.running)


def test_a_sequence_that_cannot_grow_itself_waits():
    engine = make_engine(tiny_config(block_size=1, num_blocks=5))
    add(engine, 1)
    add(engine, 2)
    step(engine)
    step(engine)
    assert [row[0] for row in step(engine)] == [0] and ids(engine.scheduler.waiting) == [1]


def test_a_preempted_sequence_finds_its_blocks_again():
    engine, sequences = three_in_seven_blocks()
    step(engine)
    engine.abort(sequences[:2])
    assert step(engine) == [(2, 1, 2, True)]  # of its two blocks one was reused
    assert engine.stats.prompt_tokens == 3 + 2  # to compute several at once is prefill, whoever chose the tokens
    assert engine.stats.recomputed_tokens == 1
    assert sequences[2].num_cached_tokens == 0  # that is about its prompt at its first admission


def test_what_is_computed_again_is_counted():
    engine, sequences = three_in_seven_blocks(caching=False)
    step(engine)
    assert engine.stats.recomputed_tokens == 0
    engine.abort(sequences[:2])
    assert step(engine) == [(2, 0, 3, True)]
    assert (engine.stats.num_preemptions, engine.stats.recomputed_tokens) == (1, 2)  # the third was never computed before


def test_a_preempted_sequence_generates_what_it_would_have_alone():
    engine, sequences = three_in_seven_blocks()
    run_to_end(engine)
    for seq in sequences:
        alone = make_engine(tiny_config(block_size=1, num_blocks=7))
        again = add(alone, *seq.token_ids[:1])
        run_to_end(alone)
        assert seq.token_ids == again.token_ids and len(seq) == 7


# Other policies.

def shortest_first(running, waiting, budget):
    yield from ((seq, budget) for seq in running)
    yield from ((seq, budget) for seq in sorted(waiting, key=len))


def test_a_policy_may_take_from_the_middle_of_the_queue():
    engine = make_engine(tiny_config(max_num_seqs=2, num_blocks=16), policy=shortest_first)
    for length in (3, 1, 4, 2):
        add(engine, *[1] * length)
    assert [row[0] for row in step(engine)] == [1, 3]
    assert ids(engine.scheduler.running) == [1, 3] and ids(engine.scheduler.waiting) == [0, 2]
    run_to_end(engine)
    assert engine.blocks.num_used_blocks == 0


def newest_first(running, waiting, budget):
    yield from ((seq, budget) for seq in reversed(running))
    yield from ((seq, budget) for seq in waiting)


def preempted_after_it_was_served():
    """A step that served 2, then 1, and then had no block left for 0."""
    engine = make_engine(tiny_config(block_size=1, num_blocks=8), policy=newest_first)
    for token in (1, 2, 3):
        add(engine, token)
    step(engine)
    step(engine)
    return engine, step(engine)


def test_what_is_preempted_after_it_was_served_leaves_the_plan():
    engine, rows = preempted_after_it_was_served()
    assert [row[0] for row in rows] == [1, 0] and ids(engine.scheduler.waiting) == [2]


def test_who_is_served_after_a_victim_still_gets_its_token():
    oldest_then_newest = lambda running, waiting, budget: [(seq, 9) for seq in (*running[:1], *running[:0:-1], *waiting)]
    engine = make_engine(tiny_config(block_size=1, num_blocks=6), policy=oldest_then_newest)
    for token in (1, 2, 3):
        add(engine, token)
    step(engine)
    step(engine)
    assert [row[0] for row in step(engine)] == [0, 1]  # in the order 0, 2, 1


def test_what_left_the_plan_is_not_in_the_batch_size():
    engine, _ = preempted_after_it_was_served()
    assert engine.stats.batch_size == 2


def test_a_policy_may_limit_what_a_sequence_gets():
    engine = make_engine(tiny_config(), policy=lambda running, waiting, budget: [(seq, 2) for seq in (*running, *waiting)])
    add(engine, 1, 2, 3, 4, 1)
    assert [step(engine), step(engine), step(engine)] == [[(0, 0, 2, False)], [(0, 2, 2, False)], [(0, 4, 1, True)]]


def test_a_policy_may_leave_a_running_sequence_out():
    turns = itertools.cycle([0, 1])

    def in_turns(running, waiting, budget):
        chosen = next(turns) if len(running) == 2 else None
        return [(seq, budget) for seq in (*running, *waiting) if chosen in (None, seq.seq_id)]

    engine = make_engine(tiny_config(), policy=in_turns)
    add(engine, 1)
    add(engine, 2)
    assert [[row[0] for row in step(engine)] for _ in range(3)] == [[0, 1], [0], [1]]


@pytest.mark.parametrize("policy", [lambda running, waiting, budget: [], lambda running, waiting, budget: [(seq, 0) for seq in (*running, *waiting)]])
def test_a_policy_that_serves_nothing_is_an_error(policy):
    engine = make_engine(tiny_config(), policy=policy)
    seq = add(engine, 1)
    with pytest.raises(RuntimeError, match="the scheduling policy chose nothing although requests wait"):
        engine.step()
    assert seq.finish_reason == "abort" and engine.blocks.num_used_blocks == 0


# Stats.

def test_gauges_hold_for_the_last_step():
    engine = make_engine(tiny_config(block_size=2, num_blocks=8, max_num_seqs=2, budget=4))
    for _ in range(3):
        add(engine, 1, 2, 3)
    step(engine)
    stats = engine.stats
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.batch_size, stats.kv_cache_usage_perc) == (2, 1, 4, 0.5)
    step(engine)
    assert (stats.batch_size, stats.num_steps) == (3, 2)


def test_the_batch_size_counts_what_finished_in_the_step():
    engine = make_engine(tiny_config())
    add(engine, 1, 2, 3, max_tokens=1)
    add(engine, 2, 2)
    step(engine)
    assert engine.stats.batch_size == engine.runner.plans[-1].num_tokens == 5


def test_counters_add_up():
    engine = make_engine(tiny_config())
    add(engine, 1, 2, 3, 4, 1, max_tokens=2)
    run_to_end(engine)
    add(engine, 1, 2, 3, 4, 2, max_tokens=3)
    run_to_end(engine)
    stats = engine.stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_requests_finished, stats.num_steps) == (5 + 1, 2 + 3, 2, 5)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.prefix_cache_hit_rate) == (10, 4, 0.4)
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage_perc) == (0, 0, 0.0)


def test_all_counts_begin_at_zero():
    stats = make_engine(tiny_config()).stats
    assert set(stats.as_dict().values()) == {0} and stats.prefix_cache_hit_rate == 0.0


def test_without_prefix_caching_nothing_is_looked_up():
    engine = make_engine(tiny_config(caching=False))
    add(engine, 1, 2, 3)
    step(engine)
    assert engine.stats.prefix_cache_queries == 0


def test_stats_are_plain_numbers_under_vllms_names():
    stats = make_engine(tiny_config()).stats.as_dict()
    assert {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
            "num_preemptions"} <= set(stats)
    assert all(isinstance(value, (int, float)) for value in stats.values())


def test_times_are_the_clocks():
    ticks = itertools.count()
    engine = make_engine(tiny_config(), clock=lambda: next(ticks))
    seq = add(engine, 1, max_tokens=2)
    assert (seq.arrival_time, seq.admitted_time, seq.first_token_time) == (0, None, None)
    run_to_end(engine)
    assert seq.arrival_time < seq.admitted_time < seq.first_token_time < seq.finished_time


def test_first_admission_is_timed_not_the_one_after_a_preemption():
    engine, sequences = three_in_seven_blocks()
    admitted = sequences[2].admitted_time
    run_to_end(engine)
    assert sequences[2].num_preemptions and sequences[2].admitted_time == admitted


def test_gauges_and_counters_know_of_aborts():
    engine = make_engine(tiny_config(max_num_seqs=2))
    sequences = [add(engine, 1, 2) for _ in range(4)]
    step(engine)
    engine.abort([sequences[0], sequences[2]])
    stats = engine.stats
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.num_requests_finished, stats.kv_cache_usage_perc) == (1, 1, 2, 0.125)
    engine.scheduler.abort_all()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.num_requests_finished, stats.kv_cache_usage_perc) == (0, 0, 4, 0.0)


# Update and finish.

def test_blocks_are_published_by_the_update_not_by_the_schedule():
    engine = make_engine(tiny_config())
    seq = add(engine, 1, 2)
    plan = engine.scheduler.schedule()
    assert engine.blocks.cached_blocks == {} and seq.num_computed_tokens == 0
    engine.scheduler.update(plan, StepResult({0: 3}))
    assert len(engine.blocks.cached_blocks) == 1 and seq.num_computed_tokens == 2


def test_update_returns_what_it_finished():
    engine = make_engine(tiny_config())
    short, long = add(engine, 1, max_tokens=1), add(engine, 2, max_tokens=2)
    assert engine.step() == [short] and engine.step() == [long]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_sequence_is_aborted_wherever_it_is(steps):
    engine = make_engine(tiny_config())
    seq, other = add(engine, 1), add(engine, 2)
    for _ in range(steps):
        step(engine)
    engine.scheduler.finish(seq, "abort")
    assert (seq.status, seq.finish_reason, seq.block_table) == (SequenceStatus.FINISHED, "abort", [])
    assert list(engine.scheduler.sequences) == [other.seq_id]
    assert [row[0] for row in step(engine)] == [other.seq_id]
