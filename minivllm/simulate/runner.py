"""SimulatedRunner: stands where the model runner stands, computes nothing, and advances a clock by what the step would take."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from minivllm.engine.step import StepPlan, StepResult
from minivllm.simulate.devices import Cost, StepWork


@dataclass
class PaddedBatch:
    """A static batch: `rows` sequences, every prompt padded to `prompt_tokens`, all computed until the last one has ended."""

    rows: int
    prompt_tokens: int
    steps: int = 0

    def next_work(self) -> StepWork:
        if self.steps == 0:
            each = self.prompt_tokens
            work = StepWork(self.rows * each, self.rows * each, self.rows * each * (each + 1) // 2, self.rows, self.rows)
        else:
            context = self.rows * (self.prompt_tokens + self.steps)
            work = StepWork(self.rows, context, context, self.rows, self.rows)
        self.steps += 1
        return work


class SimulatedRunner:
    """`now` is the simulated time in seconds. Every row that samples gets token 0.

    padded: while set, steps cost what that static batch costs, whatever is left of it in the plan.
    gaps: seconds between two tokens of one request, for all requests in the order they were made; longest_gap: the longest by seq_id.
    """

    def __init__(self, cost: Cost):
        self.cost = cost
        self.now = 0.0
        self.padded: PaddedBatch | None = None
        self.gaps = array("d")
        self.longest_gap: dict[int, float] = {}
        self.work = StepWork(0, 0, 0, 0, 0)   # of the last step
        self.seconds = 0.0                    # that it took
        self.decode_tokens = 0                # of its plan
        self.prefill_tokens = 0
        self._last_token: dict[int, float] = {}  # when each unfinished request got its newest token

    def execute(self, plan: StepPlan) -> StepResult:
        work = self._work(plan)
        self.work = work if self.padded is None else self.padded.next_work()
        self.seconds = self.cost.seconds(self.work)
        self.now += self.seconds
        tokens = {row.seq_id: 0 for row in plan.rows if row.samples}
        self._note_gaps(tokens)
        return StepResult(tokens)

    def forget(self, seq_id: int) -> float:
        """A request has ended. Returns the longest time between two of its tokens; 0 if it had only one."""
        del self._last_token[seq_id]
        return self.longest_gap.pop(seq_id, 0.0)

    def _work(self, plan: StepPlan) -> StepWork:
        tokens = kv_tokens = attended = samples = decodes = 0
        known = self._last_token
        for row in plan.rows:  # the hot loop of a simulation, after the scheduler's own
            count, start = len(row.token_ids), row.start
            tokens += count
            kv_tokens += start + count
            samples += row.samples
            if count == 1:
                attended += start + 1
                decodes += row.seq_id in known
            else:
                attended += count * start + count * (count + 1) // 2
        self.decode_tokens, self.prefill_tokens = decodes, tokens - decodes
        return StepWork(tokens, kv_tokens, attended, samples, len(plan.rows))

    def _note_gaps(self, tokens: dict[int, int]) -> None:
        now, last, longest = self.now, self._last_token, self.longest_gap
        for seq_id in tokens:
            before = last.get(seq_id)
            last[seq_id] = now
            if before is not None:
                gap = now - before
                self.gaps.append(gap)
                if gap > longest.get(seq_id, 0.0):
                    longest[seq_id] = gap
