"""Scheduler and BlockManager under random adds, steps, aborts, hits, evictions, preemptions and interrupts.

Each check is shown to be able to fail: for every fault in FAULTS, modelled on a real bug, a small scenario passes without it and
raises the right named error with it, and random operations find it too.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import engine_fakes
import pytest
from engine_fakes import Harness, Violation, answer_alone, tiny_config
from hypothesis import Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from minivllm.engine import invariants
from minivllm.engine.block_manager import BlockManager, block_hash, root_hash
from minivllm.engine.invariants import InvariantError
from minivllm.engine.policies import first_come_first_served
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import SequenceStatus
from minivllm.sampling_params import SamplingParams

CI = settings(deadline=None, derandomize=True, database=None, print_blob=False)
PREFIXES = ((1, 2, 3, 4, 1, 2, 3, 4), (1, 2, 2, 2, 2, 2, 2, 2), (3,) * 8)

prompts = st.builds(lambda prefix, length, tail: [*prefix[:length], *tail], st.sampled_from(PREFIXES),
                    st.integers(1, 8), st.lists(st.integers(1, 2), max_size=2))
samplings = st.fixed_dictionaries({"max_tokens": st.sampled_from((1, 3, 9, None)), "ignore_eos": st.sampled_from((True, True, False)),
                                   "stop_token_ids": st.sampled_from(((), (), (4,)))})


@st.composite
def configs(draw):
    max_num_seqs = draw(st.sampled_from((1, 2, 3, 4, 4)))
    return tiny_config(block_size=draw(st.integers(1, 4)), num_blocks=draw(st.integers(2, 8)), max_num_seqs=max_num_seqs,
                       budget=max_num_seqs + draw(st.integers(0, 8)), caching=draw(st.sampled_from((True, True, False))))


class EngineMachine(RuleBasedStateMachine):
    """Random operations on a tiny engine; Harness checks everything after each."""

    classes: dict[str, type] = {}  # planted faults

    @initialize(config=configs())
    def start(self, config):
        self.harness = Harness(config, **self.classes)
        self.longest = config.max_model_len - 1

    def pick(self, index, among):
        return among[index % len(among)]

    @rule(prompt=prompts, sampling=samplings, extra=st.sampled_from((b"", b"", b"adapter")))
    def add(self, prompt, sampling, extra):
        self.harness.add(prompt[:self.longest], extra, **sampling)

    @precondition(lambda self: self.harness.prompts)
    @rule(index=st.integers(0, 9), length=st.integers(1, 12), sampling=samplings)
    def add_a_follow_up(self, index, length, sampling):
        before = self.pick(index, list(self.harness.prompts))
        self.harness.add(before.token_ids[:min(length, self.longest)], before.cache_extra, **sampling)

    @rule(times=st.sampled_from((1, 1, 2, 5)))
    def step(self, times):
        self.harness.step(times)

    @precondition(lambda self: self.harness.scheduler.sequences)
    @rule(index=st.integers(0, 9), what=st.sampled_from((*["abort"] * 6, *["not finite"] * 4, "abort all", "before", "after", 5, 20, 35, 50, 75, 100)))
    def disturb(self, index, what):
        """Most often one sequence is hit; else everything is aborted, or a step is interrupted in the runner or at some line."""
        seq = self.pick(index, list(self.harness.scheduler.sequences.values()))
        if what == "abort":
            self.harness.abort(seq)
        elif what == "not finite":
            self.harness.step_not_finite(seq)
        elif what == "abort all":
            self.harness.abort_all()
        else:
            self.harness.interrupted_step(what)

    def teardown(self):
        if self.harness.intact:
            self.harness.finish()


class TestEngine(EngineMachine.TestCase):
    settings = settings(CI, max_examples=250, stateful_step_count=40)


requests = st.lists(st.tuples(st.integers(0, 3), prompts, samplings), min_size=1, max_size=8)  # steps before it arrives, ...


@given(requests=requests)
@settings(CI, max_examples=60)
def test_tokens_do_not_depend_on_how_the_work_is_batched(requests):
    limit = 12
    want = [answer_alone(tuple(prompt), SamplingParams(**sampling), b"", limit) for _, prompt, sampling in requests]
    for block_size, num_blocks, max_num_seqs, budget in ((1, 12, 4, 4), (2, 6, 3, 5), (3, 4, 2, 16), (4, 3, 4, 7), (4, 20, 8, 100), (16, 2, 1, 1)):
        for caching in (True, False):
            harness = Harness(tiny_config(block_size, num_blocks, max_num_seqs, budget, limit, caching))
            sequences = []
            for steps, prompt, sampling in requests:
                harness.step(steps)
                sequences.append(harness.add(prompt, **sampling))
            harness.finish()
            assert [(tuple(seq.generated_token_ids), seq.finish_reason) for seq in sequences] == want


# Planted faults. Each class is the real one with one bug in it.

class KeepsStaleEntry(BlockManager):
    """A block is reused, and both it and the prefix cache still know its old hash."""

    def _take_least_recently_used(self):
        block_id = next(iter(self.free_blocks))
        digest = self.blocks[block_id].hash
        super()._take_least_recently_used()
        if digest is not None:
            self.blocks[block_id].hash, self.cached_blocks[digest] = digest, block_id
        return block_id


class KeepsStaleCacheEntry(BlockManager):
    """A block is reused and forgets its hash, the prefix cache does not."""

    def _take_least_recently_used(self):
        block_id = next(iter(self.free_blocks))
        digest = self.blocks[block_id].hash
        super()._take_least_recently_used()
        if digest is not None:
            self.cached_blocks[digest] = block_id
        return block_id


class DuplicateTakesOverEntry(BlockManager):
    """Of two equal blocks the later takes the entry, and the earlier keeps its hash."""

    def publish(self, seq, start):
        super().publish(seq, start)
        for block_id, digest in zip(seq.block_table[:seq.num_computed_tokens // self.block_size], seq.block_hashes):
            self.blocks[block_id].hash, self.cached_blocks[digest] = digest, block_id


class DropsEntryOfAnother(BlockManager):
    """A reused block drops the entry for its hash, although a later block had taken the entry over."""

    def publish(self, seq, start):
        super().publish(seq, start)
        for block_id, digest in zip(seq.block_table[:seq.num_computed_tokens // self.block_size], seq.block_hashes):
            self.blocks[block_id].hash = digest  # a second holder of the same hash

    def _take_least_recently_used(self):
        self.cached_blocks.pop(self.blocks[next(iter(self.free_blocks))].hash, None)
        return super()._take_least_recently_used()


class FreesSharedBlock(BlockManager):
    """The first owner to end puts a shared block into the free list."""

    def free(self, seq):
        table = list(seq.block_table)
        super().free(seq)
        self.free_blocks.update(dict.fromkeys(table))


class LosesFreedBlock(BlockManager):
    """Nobody owns the last block of a sequence that ended, and the free list lacks it."""

    def free(self, seq):
        last = seq.block_table[-1:]
        super().free(seq)
        for block_id in last:
            self.free_blocks.pop(block_id, None)


class ForgetsReference(BlockManager):
    """A hit on an owned block does not count as a reference."""

    def _share(self, block_id):
        shared = self.blocks[block_id].ref_count > 0
        super()._share(block_id)
        self.blocks[block_id].ref_count -= shared


class LeavesHitInFreeList(BlockManager):
    """A hit on a free block does not take it from the free list."""

    def _share(self, block_id):
        super()._share(block_id)
        self.free_blocks.setdefault(block_id)


class PeeksAtFreeList(BlockManager):
    """A new block is read from the free list and not removed from it."""

    def _take_least_recently_used(self):
        block_id = super()._take_least_recently_used()
        self.free_blocks[block_id] = None
        self.free_blocks.move_to_end(block_id, last=False)
        self.blocks[block_id].ref_count = 0
        return block_id


class PublishesOnAllocation(BlockManager):
    """Blocks are findable before the step that computes them."""

    def allocate(self, seq, hits):
        super().allocate(seq, hits)
        computed, seq.num_computed_tokens = seq.num_computed_tokens, len(seq)
        self.publish(seq, 0)
        seq.num_computed_tokens = computed


class HashesWithoutParent(BlockManager):
    """Equal tokens are taken for equal K/V, whatever came before them."""

    def _hash_full_blocks(self, seq):
        size = self.block_size
        seq.block_hashes = [block_hash(root_hash(seq.cache_extra), seq.token_ids[end - size:end]) for end in range(size, len(seq) + 1, size)]


class IgnoresCacheExtra(BlockManager):
    """Equal prefixes are shared between adapters."""

    def _hash_full_blocks(self, seq):
        extra, seq.cache_extra = seq.cache_extra, b""
        super()._hash_full_blocks(seq)
        seq.cache_extra = extra


class GrowsTooLate(BlockManager):
    """A new block is taken one token after the boundary."""

    def grow(self, seq):
        return len(seq) % self.block_size == 1 or super().grow(seq)


class TakesHitsForFree(BlockManager):
    """Hits that nobody owns are still counted as free blocks."""

    def can_allocate(self, seq, hits, reserve=0):
        return self.num_blocks_for(len(seq)) - len(hits) + reserve <= self.num_free_blocks


class AdmitsWithoutReserve(BlockManager):
    """Admission leaves no block for those that run already."""

    def can_allocate(self, seq, hits, reserve=0):
        return super().can_allocate(seq, hits, 0)


class ReleasesNothing(BlockManager):
    """Everything is aborted, and the blocks stay taken."""

    def release_all(self):
        pass


class RewritesFullHit(Scheduler):
    """The last token of a full hit is written again, into the shared block."""

    def _admit(self, seq):
        admitted = super()._admit(seq)
        seq.write_start = seq.num_computed_tokens
        return admitted


class SkipsLastToken(Scheduler):
    """After a full hit nothing is left to compute."""

    def _admit(self, seq):
        admitted = super()._admit(seq)
        if admitted:
            seq.num_computed_tokens = seq.write_start
        return admitted


class RunsOneTooMany(Scheduler):
    """The cap on the running set is compared with > instead of >=."""

    def _admit(self, seq):
        self.max_num_seqs += 1
        admitted = super()._admit(seq)
        self.max_num_seqs -= 1
        return admitted


class AdmitsIntoEmptyEngineOnly(Scheduler):
    """Static batching: nobody joins while others run."""

    def _admit(self, seq):
        return not self.running and super()._admit(seq)


class AdmitsWithoutMark(Scheduler):
    """An admitted sequence still counts as waiting."""

    def _admit(self, seq):
        admitted = super()._admit(seq)
        seq.status = SequenceStatus.WAITING
        return admitted


class ResumesAfterPreemption(Scheduler):
    """A preempted sequence goes on where it was, as if its blocks were still there."""

    def _admit(self, seq):
        admitted = super()._admit(seq)
        if seq.num_preemptions:
            seq.num_computed_tokens = seq.write_start = len(seq) - 1
        return admitted


class PreemptsOldest(Scheduler):
    """The oldest sequence gives its blocks up."""

    def _make_room(self, seq, preempted, rows):
        if self.blocks.num_blocks_for(len(seq)) - len(seq.block_table) > self.blocks.num_free_blocks:
            self.running.append(self.running.pop(0))
        return super()._make_room(seq, preempted, rows)


class PreemptedKeepsBlocks(Scheduler):
    """A sequence that cannot grow goes back to the queue with its blocks."""

    def _make_room(self, seq, preempted, rows):
        if seq is not self.running[-1] or self.blocks.grow(seq):
            return super()._make_room(seq, preempted, rows)
        self.running.remove(seq)
        preempted.append(seq)
        seq.status = SequenceStatus.WAITING
        return False


class PreemptedKeepsRunning(Scheduler):
    """A preempted sequence loses its blocks and stays in the running list."""

    def _requeue(self, preempted):
        self.running += [seq for seq in reversed(preempted)]
        for seq in preempted:
            seq.status, seq.num_computed_tokens = SequenceStatus.RUNNING, len(seq) - 1
        super()._requeue([])


class ServesNewestFirst(Scheduler):
    """No fault: the order of service within a step is the policy's business."""

    def __init__(self, *args):
        super().__init__(*args)
        self.policy = lambda running, waiting, budget: first_come_first_served(running[::-1], waiting, budget)


class PreemptedStaysInPlan(ServesNewestFirst):
    """The row of a sequence that is preempted after it was served stays in the step."""

    def _make_room(self, seq, preempted, rows):
        return super()._make_room(seq, preempted, {})


class PreemptedGoesToTail(Scheduler):
    """A preempted sequence queues up behind those that never ran."""

    def _requeue(self, preempted):
        super()._requeue([])
        self.waiting = deque(seq for seq in self.waiting if seq not in preempted)
        self.waiting.extend(preempted)


class PreemptedForgetsWhatItGenerated(Scheduler):
    """Tokens generated before a preemption count as prompt after it."""

    def _requeue(self, preempted):
        super()._requeue(preempted)
        for seq in preempted:
            seq.num_prompt_tokens = len(seq)


class Overtakes(Scheduler):
    """What does not fit is skipped, and a later one takes the room."""

    def __init__(self, *args):
        super().__init__(*args)
        fits = lambda seq: self.blocks.can_allocate(seq, self.blocks.find_prefix(seq), len(self.running))
        self.policy = lambda running, waiting, budget: ((seq, budget) for seq in (*running, *filter(fits, waiting)))


class PrefillsFirst(Scheduler):
    """A long prompt is admitted before the running sequences got their token."""

    def __init__(self, *args):
        super().__init__(*args)
        self.policy = lambda running, waiting, budget: ((seq, budget) for seq in (*waiting, *running))


class CutsChunksShort(Scheduler):
    """Everyone gets one token, whatever the budget."""

    def __init__(self, *args):
        super().__init__(*args)
        self.policy = lambda running, waiting, budget: ((seq, 1) for seq in (*running, *waiting))


class PlansOneTokenTooMany(Scheduler):
    """The budget is overdrawn by one."""

    def schedule(self):
        self.max_num_batched_tokens += 1
        plan = super().schedule()
        self.max_num_batched_tokens -= 1
        return plan


class PlansRowTwice(Scheduler):
    """One sequence is in the batch twice, as a running and as an admitted one."""

    def schedule(self):
        plan = super().schedule()
        plan.rows.extend(plan.rows[:self.max_num_batched_tokens - plan.num_tokens])
        return plan


class PlansEmptyRow(Scheduler):
    """A chunk ends one token early, a decode before its only token."""

    def _plan_row(self, seq, num_tokens):
        return super()._plan_row(seq, num_tokens - 1)


class PlansLastTokens(Scheduler):
    """A chunk holds the end of what is missing, not its beginning."""

    def _plan_row(self, seq, num_tokens):
        row = super()._plan_row(seq, num_tokens)
        row.token_ids = seq.token_ids[-num_tokens:]
        return row


class SamplesEveryRow(Scheduler):
    """A chunk in the middle of a prompt yields a token too."""

    def _plan_row(self, seq, num_tokens):
        row = super()._plan_row(seq, num_tokens)
        row.samples = True
        return row


class PublishesWhatIsNotFinite(Scheduler):
    """The blocks of a sequence with NaN in them are shared."""

    def finish(self, seq, reason, stop_reason=None):
        if seq.error is not None:
            self.blocks.publish(seq, 0)
        return super().finish(seq, reason, stop_reason)


class PublishesUncomputedChunks(Scheduler):
    """After its first chunk a prompt is findable as a whole."""

    def update(self, plan, result):
        chunked = [self.sequences[row.seq_id] for row in plan.rows if not row.samples]
        finished = super().update(plan, result)
        for seq in chunked:
            if not seq.finished:
                computed, seq.num_computed_tokens = seq.num_computed_tokens, len(seq)
                self.blocks.publish(seq, 0)
                seq.num_computed_tokens = computed
        return finished


class LosesChunk(Scheduler):
    """A chunk that does not end the prompt counts for nothing."""

    def update(self, plan, result):
        finished = super().update(plan, result)
        for row in plan.rows:
            if not row.samples and row.seq_id in self.sequences:
                self.sequences[row.seq_id].num_computed_tokens = 0
        return finished


class FinishLeaksBlocks(Scheduler):
    """A sequence that is aborted takes its blocks with it."""

    def finish(self, seq, reason, stop_reason=None):
        if reason == "abort":
            seq.block_table = []
        return super().finish(seq, reason, stop_reason)


class FinishStaysListed(Scheduler):
    """A finished sequence stays in the running list."""

    def finish(self, seq, reason, stop_reason=None):
        ran = seq in self.running
        super().finish(seq, reason, stop_reason)
        self.running += [seq] * ran
        return seq


class FinishIsAMarkOnly(Scheduler):
    """A finished sequence is marked so, and nobody collects it."""

    def finish(self, seq, reason, stop_reason=None):
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason
        return seq


class AbortsNothing(Scheduler):
    """A failed step leaves its requests queued."""

    def abort_all(self):
        return []


class AbortsOneByOne(Scheduler):
    """After an interrupt each sequence returns the blocks in its table: one that was just being taken is lost."""

    def abort_all(self):
        for seq in list(self.sequences.values()):
            self.finish(seq, "abort")
        return []


# Scenarios: what to do to an engine for a fault to show. Without the fault each of them passes.

def one_after_the_other(h):
    for prompt in ([1, 2, 3, 4], [1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [1, 2, 3, 4]):
        h.add(prompt, max_tokens=1)
        h.finish()


def equal_prompts_in_one_step(h):
    for _ in range(2):
        h.add([1, 2, 3, 4, 1], ignore_eos=True, max_tokens=3)
    h.finish()
    one_after_the_other(h)


def hit_on_a_running_sequence(h):
    h.add([1, 2, 3, 4, 1], ignore_eos=True)
    h.step(2)
    h.add([1, 2, 3, 4, 2], ignore_eos=True, max_tokens=1)
    h.step()
    h.finish()


def hit_on_a_finished_sequence(h):
    for _ in range(2):
        h.add([1, 2, 3, 4, 1], ignore_eos=True, max_tokens=3)
        h.finish()


def full_hit_beside_a_decode(h):
    h.add([1, 2, 3, 4], ignore_eos=True, max_tokens=6)
    h.step()
    h.add([1, 2, 3, 4], ignore_eos=True, max_tokens=6)
    h.finish()


def equal_tokens_after_different_ones(h):
    h.add([1, 1, 2, 2], max_tokens=1)
    h.finish()
    h.add([3, 3, 2, 2], max_tokens=1)
    h.add([2, 2, 1, 1], max_tokens=1)
    h.finish()


def equal_prompts_of_two_adapters(h):
    h.add([1, 2, 3], b"one", max_tokens=1)
    h.finish()
    h.add([1, 2, 3], b"two", max_tokens=1)
    h.finish()


def long_prompt(h):
    h.add([1, 2, 3, 4, 4, 3, 2, 1], ignore_eos=True, max_tokens=3)
    h.finish()


def long_prompt_beside_a_decode(h):
    h.add([1], ignore_eos=True, max_tokens=8)
    h.step()
    long_prompt(h)


def hit_that_just_does_not_fit(h):
    h.add([1, 2, 3, 4, 1], max_tokens=1)
    h.finish()
    h.add([2] * 9, ignore_eos=True, max_tokens=3)
    h.step()
    h.add([1, 2, 3, 4, 1], max_tokens=1)
    h.finish()


def more_than_may_run(h):
    for token in (1, 2, 3, 4):
        h.add([token], ignore_eos=True, max_tokens=3)
    h.finish()


def more_than_fits(h):
    """Three sequences grow until the newest must give way."""
    for token in (1, 2, 3):
        h.add([token], ignore_eos=True, max_tokens=9)
    h.finish()


def long_one_before_a_short_one(h):
    h.add([1, 2, 3, 4], ignore_eos=True, max_tokens=6)
    h.add([1] * 11, max_tokens=1)
    h.add([2], max_tokens=1)
    h.finish()


def abort_while_running(h):
    seq = h.add([1, 2, 3], ignore_eos=True)
    h.add([2, 2, 3], ignore_eos=True, max_tokens=5)
    h.step()
    h.abort(seq)
    h.finish()


def all_aborted(h):
    h.add([1, 2, 3])
    h.step()
    h.abort_all()


def interrupted_anywhere(h):
    for when in ("before", "after", *range(1, 150)):
        h.add([1, 2, 3])
        h.interrupted_step(when)
        h.abort_all()


def not_finite(h):
    seq = h.add([1, 2, 3, 4], ignore_eos=True)
    h.step_not_finite(seq)
    h.add([1, 2, 3, 4], ignore_eos=True, max_tokens=2)
    h.finish()


@dataclass(frozen=True)
class Fault:
    """expected: the error of the whole harness. alone: that of FakeRunner where nothing but its own checks is on.

    """

    bug: type
    scenario: Callable
    expected: str
    alone: str | None = None
    config: dict = field(default_factory=dict)

    def harness(self, check=True, planted=True):
        return Harness(tiny_config(**self.config), check, **self.classes(planted))

    def classes(self, planted=True):
        kind = "block_manager" if issubclass(self.bug, BlockManager) else "scheduler"
        return {kind: self.bug if planted else self.bug.__base__}


small, tight = {"num_blocks": 4}, {"block_size": 1, "num_blocks": 12}
FAULTS = [
    Fault(KeepsStaleEntry, one_after_the_other, "shared block rewritten", "shared block rewritten", small),
    Fault(KeepsStaleCacheEntry, one_after_the_other, "hash entry = block", "shared block rewritten", small),
    Fault(DuplicateTakesOverEntry, equal_prompts_in_one_step, "hash entry = block"),
    Fault(DropsEntryOfAnother, equal_prompts_in_one_step, "hash entry = block"),
    Fault(FreesSharedBlock, hit_on_a_running_sequence, "free xor referenced"),
    Fault(LosesFreedBlock, abort_while_running, "free + used = N", "blocks left over"),
    Fault(ForgetsReference, hit_on_a_running_sequence, "ref_count = owners"),
    Fault(LeavesHitInFreeList, hit_on_a_finished_sequence, "free xor referenced", None, small),
    Fault(PeeksAtFreeList, long_prompt, "ref_count = owners", "slot written twice"),
    Fault(PublishesOnAllocation, long_prompt, "hash entry holds other tokens", "shared block rewritten"),
    Fault(HashesWithoutParent, equal_tokens_after_different_ones, "hash entry holds other tokens", "reads wrong K/V"),
    Fault(IgnoresCacheExtra, equal_prompts_of_two_adapters, "hash entry holds other tokens", "reads wrong K/V"),
    Fault(GrowsTooLate, long_prompt, "position without a slot", "position without a slot"),
    Fault(TakesHitsForFree, hit_that_just_does_not_fit, "admitted without reserve"),
    Fault(AdmitsWithoutReserve, more_than_fits, "admitted without reserve"),
    Fault(ReleasesNothing, all_aborted, "blocks left over", "blocks left over"),
    Fault(RewritesFullHit, full_hit_beside_a_decode, "shared block rewritten", "shared block rewritten"),
    Fault(SkipsLastToken, full_hit_beside_a_decode, "one token to compute"),
    Fault(RunsOneTooMany, more_than_may_run, "running <= max_num_seqs", None, {"max_num_seqs": 2}),
    Fault(AdmitsIntoEmptyEngineOnly, more_than_may_run, "room left idle"),
    Fault(AdmitsWithoutMark, more_than_may_run, "each sequence in one list"),
    Fault(ResumesAfterPreemption, more_than_fits, "reads wrong K/V", "reads wrong K/V", tight),
    Fault(PreemptsOldest, more_than_fits, "older sequence preempted", None, tight),
    Fault(PreemptedKeepsBlocks, more_than_fits, "waiting owns nothing", None, tight | {"num_blocks": 11}),
    Fault(PreemptedKeepsRunning, more_than_fits, "computed tokens have blocks", "reads wrong K/V", tight),
    Fault(PreemptedStaysInPlan, more_than_fits, "row of a sequence that does not run", "row of a sequence that does not run", tight | {"num_blocks": 13}),
    Fault(PreemptedGoesToTail, more_than_fits, "overtaken", None, tight | {"max_num_seqs": 2}),
    Fault(PreemptedForgetsWhatItGenerated, more_than_fits, "other tokens than alone", "other tokens than alone", tight),
    Fault(Overtakes, long_one_before_a_short_one, "overtaken", None, tight),
    Fault(PrefillsFirst, long_prompt_beside_a_decode, "running sequence got no token", None, {"budget": 4}),
    Fault(CutsChunksShort, long_prompt, "room left idle"),
    Fault(PlansOneTokenTooMany, long_prompt, "over budget", "over budget", {"budget": 4}),
    Fault(PlansRowTwice, long_prompt, "two rows of one sequence", "two rows of one sequence"),
    Fault(PlansEmptyRow, long_prompt, "room left idle", "empty row"),
    Fault(PlansLastTokens, long_prompt, "wrong tokens planned", "wrong tokens planned", {"budget": 4}),
    Fault(SamplesEveryRow, long_prompt, "samples elsewhere than at the end", "samples elsewhere than at the end", {"budget": 4}),
    Fault(PublishesWhatIsNotFinite, not_finite, "hash entry holds other tokens", "reads wrong K/V"),
    Fault(PublishesUncomputedChunks, long_prompt, "hash entry holds other tokens", "shared block rewritten", {"budget": 4}),
    Fault(LosesChunk, long_prompt, "running sequence got no token", "no progress", {"budget": 4, "caching": False}),
    Fault(FinishLeaksBlocks, abort_while_running, "ref_count = owners", "blocks left over"),
    Fault(FinishStaysListed, abort_while_running, "each sequence in one list"),
    Fault(FinishIsAMarkOnly, abort_while_running, "running is marked so"),
    Fault(AbortsNothing, all_aborted, "not aborted", "not aborted"),
    Fault(AbortsOneByOne, interrupted_anywhere, "blocks left over", "blocks left over"),
]


def named_error(fault, harness):
    with pytest.raises((Violation, InvariantError)) as caught:
        fault.scenario(harness)
    assert str(caught.value).startswith(caught.value.name + ": ")
    return caught.value.name


every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.bug.__name__)


@every_fault
def test_scenario_passes_without_the_fault(fault):
    fault.scenario(fault.harness(planted=False))
    fault.scenario(fault.harness(planted=False, check=False))


@every_fault
def test_harness_names_the_fault(fault):
    assert named_error(fault, fault.harness()) == fault.expected


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.alone], ids=lambda fault: fault.bug.__name__)
def test_fake_runner_alone_names_the_fault(fault):
    assert named_error(fault, fault.harness(check=False)) == fault.alone


@every_fault
def test_random_machine_finds_the_fault(fault):
    """By which check is a matter of chance: random operations meet a fault's consequences in any order."""

    class Faulty(EngineMachine):
        classes = fault.classes()

    quick = settings(CI, max_examples=500, stateful_step_count=30, phases=[Phase.generate], verbosity=Verbosity.quiet, report_multiple_bugs=False)
    with pytest.raises(Exception) as caught:
        run_state_machine_as_test(Faulty, settings=quick)
    assert not isinstance(caught.value, HypothesisException), caught.value


def names_of_checks(path):
    """The names in every `require(condition, name, ...)` and `Violation(name, ...)` of a file."""
    calls = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    at = {"require": 1, "_require": 1, "Violation": 0}
    names = [call.args[at[call.func.id]] for call in calls if call.func.id in at]
    return {name.value for name in names if isinstance(name, ast.Constant)}


def test_every_check_is_shown_to_fail():
    checks = names_of_checks(invariants.__file__) | names_of_checks(engine_fakes.__file__)
    assert checks == {name for fault in FAULTS for name in (fault.expected, fault.alone) if name}
