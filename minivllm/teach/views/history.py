"""History: a trace read as frames, one per step. Owns nothing but what it derives; knows no engine, no drawing and no torch.

Reading forward costs the new events only. Going back starts again from the nearest state that was kept. Shown in notebook 04.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from minivllm.engine.events import Event, PoolState, Trace
from minivllm.teach.views.contents import Contents

#: What a sequence does in a step. "idle": it runs, but the policy gave it nothing.
STATUSES = ("waiting", "prefill", "decode", "preempted", "finished", "idle")
_KEPT_STATES = 32


def letter_name(index: int) -> str:
    """A, B, ... Z, AA, AB, ...: the name of the index-th sequence."""
    name = ""
    while index >= 0:
        index, letter = divmod(index, 26)
        name, index = chr(65 + letter) + name, index - 1
    return name


class Entry(NamedTuple):
    """What a sequence did in `step`: tokens computed in it, tokens with K/V after it, tokens known after it."""

    step: int
    status: str
    tokens: int = 0
    computed: int = 0
    length: int = 0


@dataclass(eq=False)
class SequenceLog:
    """All that the trace says of one sequence. token_ids holds None where the trace began too late to know."""

    seq_id: int
    index: int  # the how many-th to appear
    name: str
    num_prompt_tokens: int | None = None
    token_ids: list[int | None] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    losses: list[tuple[int, int]] = field(default_factory=list)  # (step, computed tokens) of each preemption

    def note(self, entry: Entry) -> None:
        """Keep `entry`; of one step the last one counts."""
        if self.entries and self.entries[-1].step == entry.step:
            self.entries.pop()
        self.entries.append(entry)

    def at(self, step: int) -> Entry | None:
        """The newest entry up to `step`; None before the sequence was there."""
        index = bisect_right(self.entries, step, key=lambda entry: entry.step)
        return self.entries[index - 1] if index else None

    def activity(self, step: int) -> Entry | None:
        """What it did in this very step; None before it was there and after it finished."""
        entry = self.at(step)
        if entry is None or entry.step == step or entry.status in ("waiting", "preempted"):
            return entry
        return None if entry.status == "finished" else Entry(step, "idle", 0, entry.computed, entry.length)

    def is_prefill(self, step: int, start: int, tokens: int) -> bool:
        """Whether `step` computed a part of the prompt, or what a preemption up to that step had thrown away."""
        lost = max((computed for at, computed in self.losses if at <= step), default=0)
        return tokens > 1 or start < max(self.num_prompt_tokens or 0, lost)

    def pad(self, length: int) -> None:
        self.token_ids += [None] * (length - len(self.token_ids))


@dataclass
class SequenceFrame:
    """One sequence after a step."""

    log: SequenceLog
    status: str
    computed: int
    length: int
    block_table: list[int]

    @property
    def name(self) -> str:
        return self.log.name

    @property
    def token_ids(self) -> list[int | None]:
        return self.log.token_ids[:self.length]


@dataclass
class Frame:
    """Everything after a step. `written`: slots of each block that hold K/V. The sets: the blocks to which that happened in the step."""

    step: int
    block_size: int
    pool: PoolState
    written: list[int]
    content: dict[int, tuple[int, int]]
    sequences: dict[int, SequenceFrame]
    evicted: set[int]
    allocated: set[int]
    published: set[int]
    touched: set[int]
    prefill_tokens: int
    decode_tokens: int
    events: list[Event]

    def blocks_that_are(self, kind: str) -> list[int]:
        """The blocks that are "used", "shared" (used by two or more), "cached" (free, but findable) or "free" (and empty)."""
        owners, hashes = self.pool.owners, self.pool.hashes
        tests = {"used": lambda b: owners[b], "shared": lambda b: len(owners[b]) > 1,
                 "cached": lambda b: not owners[b] and hashes[b] is not None, "free": lambda b: not owners[b] and hashes[b] is None}
        return [block for block in range(len(owners)) if tests[kind](block)]


class History:
    """Frames of `trace`, which may still grow. `sequences` by id, in order of appearance; `batch`: step -> [prefill, decode tokens]."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.sequences: dict[int, SequenceLog] = {}
        self.batch: dict[int, list[int]] = {}
        self._starts: dict[int, int] = {}  # step -> its first event
        self._read = 0
        for seq_id in sorted({seq_id for owners in trace.initial.owners for seq_id in owners}):
            self._log(seq_id)
        self._now = Contents(trace.initial, trace.block_size)
        self._kept, self._interval = [self._now.copy()], 16
        self.first = trace.step if not trace.events else trace.events[0].step

    @property
    def last(self) -> int:
        """The newest step of which anything is known."""
        return self.trace.events[-1].step if self.trace.events else self.first

    def name(self, seq_id: int) -> str:
        return self._log(seq_id).name

    def index_of(self, seq_id: int) -> int:
        return self._log(seq_id).index

    def read(self) -> None:
        """Take in what the trace has gained."""
        events = self.trace.events
        if self._read == 0 and events:
            self.first = events[0].step
        while self._read < len(events):
            event = events[self._read]
            self._starts.setdefault(event.step, self._read)
            if event.seq_id is not None:
                self._take(event, self._log(event.seq_id))
            self._read += 1

    def frame(self, step: int | None = None) -> Frame:
        """The frame of `step`, by default the newest. Raises ValueError for a step that is not there."""
        self.read()
        step = self.last if step is None else step
        if not self.first <= step <= self.last:
            raise ValueError(f"step {step} is not in this trace: it holds steps {self.first} to {self.last}")
        if step < self._now.step:
            self._now = next(kept for kept in reversed(self._kept) if kept.step <= step).copy()
        for complete in self._now.advance(self.trace.events, step):
            self._keep(complete)
        return self._snapshot(step)

    def events_of(self, step: int) -> list[Event]:
        start = self._starts.get(step)
        if start is None:
            return []
        end = start
        while end < self._read and self.trace.events[end].step == step:
            end += 1
        return self.trace.events[start:end]

    def _log(self, seq_id: int) -> SequenceLog:
        if seq_id not in self.sequences:
            self.sequences[seq_id] = SequenceLog(seq_id, len(self.sequences), letter_name(len(self.sequences)))
        return self.sequences[seq_id]

    def _take(self, event: Event, log: SequenceLog) -> None:
        kind, data, step = event.kind, event.data, event.step
        before = log.entries[-1] if log.entries else Entry(step, "waiting")
        if kind == "add":
            log.num_prompt_tokens, log.token_ids = data["prompt_tokens"], list(data["token_ids"])
            log.note(Entry(step, "waiting", 0, 0, len(log.token_ids)))
        elif kind == "admit":
            log.pad(data["tokens"])
            log.note(Entry(step, "prefill", 0, data["cached_tokens"], len(log.token_ids)))
        elif kind == "compute":
            self._take_compute(step, data["start"], data["tokens"], data["token"], log)
        elif kind == "preempt":
            log.losses.append((step, data["computed_tokens"]))
            log.note(Entry(step, "preempted", 0, 0, before.length))
        elif kind == "finish":
            if log.num_prompt_tokens is not None:  # a token that was not finite was computed but not kept
                del log.token_ids[log.num_prompt_tokens + data["generated_tokens"]:]
            log.note(Entry(step, "finished", before.tokens if before.step == step else 0, before.computed, len(log.token_ids)))

    def _take_compute(self, step: int, start: int, tokens: int, token: int | None, log: SequenceLog) -> None:
        prefill = log.is_prefill(step, start, tokens)
        self.batch.setdefault(step, [0, 0])[0 if prefill else 1] += tokens
        log.pad(start + tokens)
        if token is not None:
            log.token_ids.append(token)
        log.note(Entry(step, "prefill" if prefill else "decode", tokens, start + tokens, len(log.token_ids)))

    def _keep(self, step: int) -> None:
        if step >= self._kept[-1].step + self._interval:
            self._kept.append(self._now.copy())
            if len(self._kept) > _KEPT_STATES:
                self._kept, self._interval = self._kept[::2], self._interval * 2

    def _snapshot(self, step: int) -> Frame:
        now, sequences = self._now, {}
        for seq_id, log in self.sequences.items():
            if (entry := log.at(step)) is not None or seq_id in now.tables:
                entry = entry or Entry(step, "decode")
                sequences[seq_id] = SequenceFrame(log, entry.status, entry.computed, entry.length, list(now.tables.get(seq_id, ())))
        prefill, decode = self.batch.get(step, (0, 0))
        return Frame(step, now.block_size, now.pool.copy(), list(now.written), dict(now.content), sequences, set(now.evicted),
                     set(now.allocated), set(now.published), set(now.touched), prefill, decode, self.events_of(step))
