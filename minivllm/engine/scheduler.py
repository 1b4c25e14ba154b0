"""Scheduler: who computes what in the next step. Owns the running list and the waiting queue.

There is no prefill phase and no decode phase. Every running sequence gets the tokens it still lacks, as far as the step's
token budget goes: a long prompt is cut into chunks, and chunks and decodes share a batch. Knows no model and no device.
Built in notebooks 06 (continuous batching) and 07 (preemption). The semantics are vLLM V1's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.events import PoolState, Trace
from minivllm.engine.policies import Policy, first_come_first_served
from minivllm.engine.sequence import Sequence, SequenceStatus
from minivllm.engine.stats import Stats
from minivllm.engine.step import PlanRow, StepPlan, StepResult

#: Whether a sequence ends with its newest token: None, or (finish_reason, the stop token or string that ended it).
StopCheck = Callable[[Sequence], "tuple[str, int | str | None] | None"]


class Scheduler:
    """Plans steps over `blocks`: at most `max_num_batched_tokens` tokens a step, at most `max_num_seqs` sequences running.

    `sequences` holds every unfinished sequence; each is either in `running` (order of admission, the last is the newest) or
    in `waiting`. `max_num_batched_tokens >= max_num_seqs`, so that every running sequence advances in every step.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, stop_check: StopCheck,
                 policy: Policy = first_come_first_served, clock: Callable[[], float] = time.perf_counter):
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs})")
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stop_check = stop_check
        self.policy = policy
        self.clock = clock
        self.stats = Stats()
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.trace: Trace | None = None

    def add(self, seq: Sequence) -> None:
        seq.arrival_time = self.clock()
        self.sequences[seq.seq_id] = seq
        self.waiting.append(seq)
        if self.trace is not None:
            self.trace.record("add", seq.seq_id, prompt_tokens=seq.num_prompt_tokens, token_ids=list(seq.token_ids))

    def start_trace(self) -> Trace:
        """Record every event from now on, into a new trace."""
        state = PoolState.of(self.blocks, list(self.sequences.values()))
        self.trace = self.blocks.trace = Trace(state, self.blocks.block_size, self.clock)
        return self.trace

    def stop_trace(self) -> None:
        self.trace = self.blocks.trace = None

    def schedule(self) -> StepPlan:
        """Plan the next step: admit, allocate, preempt. Nothing counts as computed before `update`."""
        rows: dict[int, PlanRow] = {}
        preempted: list[Sequence] = []
        budget, unserved, closed = self.max_num_batched_tokens, len(self.running), False
        for seq, limit in self.policy(tuple(self.running), self.waiting, budget):
            if budget == 0 or (closed and unserved <= 0):
                break
            if seq in preempted or seq.seq_id in rows:
                continue
            if seq.status is SequenceStatus.WAITING:
                if seq.options is not None and seq.options.held:  # others may overtake it
                    continue
                closed = closed or bool(preempted) or not self._admit(seq)
                if closed:  # what does not fit now is not overtaken by others that wait; what runs goes on
                    continue
            else:
                unserved -= 1
                if not self.blocks.grow(seq):
                    budget += self._make_room(seq, preempted, rows)
                    if seq.status is SequenceStatus.WAITING:
                        continue
            num_tokens = len(seq.token_ids) - seq.num_computed_tokens
            if num_tokens > limit or num_tokens > budget:
                num_tokens = min(limit, budget)
            if num_tokens > 0:
                rows[seq.seq_id] = self._plan_row(seq, num_tokens)
                budget -= num_tokens
        self._requeue(preempted)
        plan = StepPlan(list(rows.values()))
        self.stats.batch_size = plan.num_tokens
        self._measure()
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Take in what `plan` computed: append tokens, publish full blocks, finish what is done. Returns the finished."""
        finished, block_size, stats = [], self.blocks.block_size, self.stats
        for row in plan.rows:
            seq, start, num_tokens = self.sequences[row.seq_id], row.start, len(row.token_ids)
            end = seq.num_computed_tokens = start + num_tokens
            if start < seq.num_prompt_tokens or start < seq.lost_tokens or num_tokens > 1:
                self._count_prefill(seq, start, end)
            if self.trace is not None:
                self.trace.record("compute", row.seq_id, start=start, tokens=num_tokens, token=result.tokens.get(row.seq_id))
            if row.seq_id in result.non_finite:
                seq.error = "the model's output was not finite (NaN or infinity); a wider dtype may help"
                finished.append(self.finish(seq, "abort"))
                continue  # what it wrote is not published either
            if end // block_size > start // block_size:
                self.blocks.publish(seq, start)
            if seq.options is not None:
                seq.options.take(row, result)
            if row.samples:
                seq.token_ids.append(result.tokens[row.seq_id])
                stats.generation_tokens += 1
                if seq.first_token_time is None:
                    seq.first_token_time = self.clock()
                if stop := self.stop_check(seq):
                    finished.append(self.finish(seq, *stop))
        stats.num_steps += 1
        if self.trace is not None:
            self.trace.step += 1  # what happens before the next step belongs to it
        return finished

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> Sequence:
        """End `seq`, wherever it is, and give its blocks back. Also the way to abort one, between two steps."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        seq.finished_time = self.clock()
        if self.trace is not None:
            self.trace.record("finish", seq.seq_id, reason=reason, generated_tokens=seq.num_generated_tokens)
        self.blocks.free(seq)
        self.sequences.pop(seq.seq_id, None)
        self.stats.num_requests_finished += 1
        self._measure()
        return seq

    def abort_all(self) -> list[Sequence]:
        """Abort every sequence. Right from any state: for interrupts and errors that hit the middle of a step."""
        aborted = list(self.sequences.values())
        for seq in aborted:
            seq.status = SequenceStatus.FINISHED
            seq.finish_reason, seq.finished_time = "abort", self.clock()
            seq.error = "a step that it was part of failed or was interrupted"
            seq.block_table.clear()
            if self.trace is not None:
                self.trace.record("finish", seq.seq_id, reason="abort", generated_tokens=seq.num_generated_tokens)
        self.sequences.clear()
        self.running.clear()
        self.waiting.clear()
        self.blocks.release_all()
        self.stats.num_requests_finished += len(aborted)
        self._measure()
        return aborted

    def _admit(self, seq: Sequence) -> bool:
        """Start `seq` if a place is free and all its tokens fit, with one more block left for each sequence that runs already."""
        if len(self.running) >= self.max_num_seqs:
            return False
        may_hit = seq.options is None or seq.options.may_hit(seq)
        hits = self.blocks.find_prefix(seq) if may_hit else []
        if not self.blocks.can_allocate(seq, hits, reserve=len(self.running)):
            return False
        if self.trace is not None:
            self.trace.record("admit", seq.seq_id, tokens=len(seq), cached_tokens=min(len(hits) * self.blocks.block_size, len(seq) - 1),
                              again=seq.num_cached_tokens is not None)
        self.blocks.allocate(seq, hits)
        num_hit_tokens = len(hits) * self.blocks.block_size
        seq.write_start = num_hit_tokens
        # After a full hit the last token is computed all the same: its logits are needed. It writes nothing.
        seq.num_computed_tokens = min(num_hit_tokens, len(seq) - 1)
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            seq.admitted_time = self.clock()
            self.stats.prefix_cache_queries += len(seq) if self.blocks.enable_prefix_caching and may_hit else 0
            self.stats.prefix_cache_hits += seq.num_computed_tokens
        return True

    def _make_room(self, seq: Sequence, preempted: list[Sequence], rows: dict[int, PlanRow]) -> int:
        """Get blocks for all tokens of `seq`, preempting the newest sequences as needed, at worst `seq` itself.

        Returns how many tokens left the plan with them: none under FCFS, but another policy may have served them before.
        """
        withdrawn = 0
        while not self.blocks.grow(seq):
            victim = self.running.pop()
            if self.trace is not None:
                self.trace.record("preempt", victim.seq_id, computed_tokens=victim.num_computed_tokens, for_seq=seq.seq_id)
            self.blocks.free(victim)
            victim.status = SequenceStatus.WAITING
            victim.lost_tokens = max(victim.lost_tokens, victim.num_computed_tokens)
            victim.num_computed_tokens = victim.write_start = 0
            victim.num_preemptions += 1
            self.stats.num_preemptions += 1
            preempted.append(victim)
            if (row := rows.pop(victim.seq_id, None)) is not None:
                withdrawn += len(row.token_ids)
            if victim is seq:
                break
        return withdrawn

    def _plan_row(self, seq: Sequence, num_tokens: int) -> PlanRow:
        start, tokens = seq.num_computed_tokens, seq.token_ids
        end = start + num_tokens
        options = None if seq.options is None else seq.options.row(seq, start, end, self.stats.num_steps)
        return PlanRow(seq.seq_id, start, tokens[start:end], seq.block_table[:], seq.write_start, end == len(tokens),
                       seq.sampling, seq.seed, options)

    def _requeue(self, preempted: list[Sequence]) -> None:
        """Take the admitted out of the queue and put the preempted at its head, the oldest first."""
        while self.waiting and self.waiting[0].status is SequenceStatus.RUNNING:
            self.waiting.popleft()
        if len(self.running) + len(self.waiting) + len(preempted) > len(self.sequences):  # a policy took from the middle
            self.waiting = deque(seq for seq in self.waiting if seq.status is SequenceStatus.WAITING and seq not in preempted)
        self.waiting.extendleft(preempted)

    def _count_prefill(self, seq: Sequence, start: int, end: int) -> None:
        """Positions `start` to `end` were computed, and not as a decode. What lies below `seq.lost_tokens` was once more."""
        self.stats.prompt_tokens += end - start
        self.stats.recomputed_tokens += max(0, min(end, seq.lost_tokens) - start)

    def _measure(self) -> None:
        stats = self.stats
        stats.num_requests_running = len(self.running)
        stats.num_requests_waiting = len(self.waiting)
        stats.kv_cache_usage_perc = self.blocks.num_used_blocks / len(self.blocks.blocks)
