"""What happened, one small record each: the only thing that views, traces and `explain` read.

The scheduler and the block manager record into a Trace while they hold one; without one nothing is recorded, and a comparison
with None is all it costs. A trace can be saved, loaded, and replayed into the pool's state after any step. Built in notebook 04.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.engine.block_manager import BlockManager
    from minivllm.engine.sequence import Sequence

_FORMAT = 1
#: Every kind of event, with what its `data` says.
KINDS = {
    "add": "prompt_tokens; token_ids: what it holds so far",
    "admit": "tokens: all it has; cached_tokens: of these, found in the prefix cache; again: whether it was preempted before",
    "share": "a prefix hit: the block has one more owner",
    "allocate": "a block nobody owned",
    "evict": "the block is reused, so what it was published under is forgotten",
    "compute": "start, tokens: the positions computed in this step; token: the one they yield, None in the middle of a prompt",
    "publish": "hash: the block is full and computed, and findable from now on",
    "preempt": "computed_tokens: what must be computed again; for_seq: who needed its blocks",
    "free": "the block has one owner less",
    "finish": "reason, generated_tokens",
    "reset": "every sequence is gone and every block free",
}


@dataclass(slots=True)
class Event:
    """`step` counts from 0, the first step of the trace; `time` is in seconds on the engine's clock; `seq_id` and `block` are None where there is none."""

    step: int
    time: float
    kind: str
    seq_id: int | None = None
    block: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class PoolState:
    """The pool at one moment. owners: for each block the sequences that own it; hashes: what it is published under, in hex;

    free: the free blocks, the next to be reused first.
    """

    owners: list[list[int]]
    hashes: list[str | None]
    free: list[int]

    @classmethod
    def of(cls, manager: BlockManager, sequences: list[Sequence]) -> PoolState:
        owners = [[] for _ in manager.blocks]
        for seq in sequences:
            for block_id in seq.block_table:
                owners[block_id].append(seq.seq_id)
        return cls([sorted(ids) for ids in owners], [b.hash.hex() if b.hash else None for b in manager.blocks], list(manager.free_blocks))

    def copy(self) -> PoolState:
        return PoolState([list(ids) for ids in self.owners], list(self.hashes), list(self.free))

    def apply(self, event: Event) -> None:
        """Change the state as `event` did. Events that concern no block change nothing."""
        block, kind = event.block, event.kind
        if kind in ("allocate", "share"):
            if not self.owners[block]:
                self.free.remove(block)
            self.owners[block] = sorted([*self.owners[block], event.seq_id])
        elif kind == "evict":
            self.hashes[block] = None
        elif kind == "publish":
            self.hashes[block] = event.data["hash"]
        elif kind == "free":
            self.owners[block].remove(event.seq_id)
            if not self.owners[block]:
                self.free.append(block)
        elif kind == "reset":
            freed = [block for block, ids in enumerate(self.owners) if ids]
            self.free += freed
            for block in freed:
                self.owners[block] = []


class Trace:
    """Events in order, and the pool as it was before the first of them."""

    def __init__(self, initial: PoolState, block_size: int, clock: Callable[[], float] = time.perf_counter):
        self.initial = initial
        self.block_size = block_size
        self.clock = clock
        self.step = 0
        self.events: list[Event] = []

    def record(self, kind: str, seq_id: int | None = None, block: int | None = None, **data: Any) -> None:
        self.events.append(Event(self.step, self.clock(), kind, seq_id, block, data))

    def of_sequence(self, seq_id: int) -> list[Event]:
        return [event for event in self.events if event.seq_id == seq_id]

    def replay(self) -> Iterator[tuple[int, PoolState]]:
        """(step, the pool's state after it), for every step in order. The state is the caller's to keep."""
        state, step = self.initial.copy(), 0
        for event in self.events:
            while step < event.step:
                yield step, state.copy()
                step += 1
            state.apply(event)
        yield step, state.copy()

    def at(self, step: int) -> PoolState:
        """The pool's state after `step`. Raises ValueError for a step that was not recorded."""
        for number, state in self.replay():
            if number == step:
                return state
        raise ValueError(f"step {step} is not in this trace, which ends with step {self.step}")

    def save(self, path: str | Path) -> None:
        """Write JSON lines: what stood before, then one event a line."""
        head = {"minivllm_trace": _FORMAT, "block_size": self.block_size, "owners": self.initial.owners, "hashes": self.initial.hashes,
                "free": self.initial.free}
        with open(path, "w", encoding="utf-8") as file:
            print(json.dumps(head), file=file)
            for e in self.events:
                print(json.dumps([e.step, e.time, e.kind, e.seq_id, e.block, e.data]), file=file)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote. Raises ValueError for anything else, with the line."""
        number = 1
        try:
            with open(path, encoding="utf-8") as file:
                head = json.loads(next(file, ""))
                if head["minivllm_trace"] != _FORMAT:
                    raise ValueError(f"format {head['minivllm_trace']}")
                trace = cls(PoolState(head["owners"], head["hashes"], head["free"]), head["block_size"])
                for number, line in enumerate(file, start=2):
                    trace.events.append(Event(*json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a trace of minivllm, or a broken one (line {number}: {error})") from error
        trace.step = trace.events[-1].step if trace.events else 0
        return trace
