"""Contents: what each block holds after some of a trace's events. Knows no names, no statuses and no drawing."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.engine.events import Event, PoolState


class Contents:
    """The pool with what its slots hold, after some of the events. `content`: block -> (sequence that filled it, first position)."""

    def __init__(self, initial: PoolState, block_size: int):
        self.block_size, self.pool, self.index, self.step = block_size, initial.copy(), 0, -1
        self.tables: dict[int, list[int]] = {}
        self.content: dict[int, tuple[int, int]] = {}
        for block, owners in enumerate(initial.owners):  # Simplified: a trace that begins late does not tell the order of a block table
            for seq_id in owners:
                self.content.setdefault(block, (seq_id, len(self.tables.setdefault(seq_id, [])) * block_size))
                self.tables[seq_id].append(block)
        self.written = [block_size if owners or key else 0 for owners, key in zip(initial.owners, initial.hashes)]
        self._begin(-1)

    def copy(self) -> Contents:
        twin = Contents.__new__(Contents)
        twin.block_size, twin.pool, twin.index, twin.step = self.block_size, self.pool.copy(), self.index, self.step
        twin.tables = {seq_id: list(table) for seq_id, table in self.tables.items()}
        twin.content, twin.written = dict(self.content), list(self.written)
        for name in ("evicted", "allocated", "published", "touched"):
            setattr(twin, name, set(getattr(self, name)))
        return twin

    def _begin(self, step: int) -> None:
        self.step = step
        self.evicted: set[int] = set()
        self.allocated: set[int] = set()
        self.published: set[int] = set()
        self.touched: set[int] = set()

    def advance(self, events: list[Event], step: int) -> Iterator[int]:
        """Apply events up to the end of `step`; yields each earlier step when it is complete."""
        while self.index < len(events) and events[self.index].step <= step:
            event = events[self.index]
            if event.step != self.step:
                yield self.step
                self._begin(event.step)
            self._apply(event)
            self.index += 1
        if self.step < step:
            self._begin(step)

    def _apply(self, event: Event) -> None:
        kind, block, seq_id = event.kind, event.block, event.seq_id
        if kind == "compute":
            self._write(seq_id, event.data["start"], event.data["tokens"])
            return
        self.pool.apply(event)
        if kind in ("allocate", "share"):
            table = self.tables.setdefault(seq_id, [])
            if kind == "allocate":
                self.allocated.add(block)
                self.content[block] = (seq_id, len(table) * self.block_size)
                self.written[block] = 0
            table.append(block)
        elif kind == "free":
            self.tables[seq_id].remove(block)
            self._forget_if_lost(block)
        elif kind == "evict":
            self.evicted.add(block)
        elif kind == "publish":
            self.published.add(block)
        elif kind == "reset":
            self.tables.clear()
            for number in range(len(self.written)):
                self._forget_if_lost(number)

    def _forget_if_lost(self, block: int) -> None:
        """What nobody owns and nobody can find is no content any more."""
        if not self.pool.owners[block] and self.pool.hashes[block] is None:
            self.written[block] = 0
            self.content.pop(block, None)

    def _write(self, seq_id: int, start: int, tokens: int) -> None:
        size, table, end = self.block_size, self.tables.get(seq_id, []), start + tokens
        for index in range(start // size, min(-(-end // size), len(table))):
            block, filled = table[index], min(size, end - index * size)
            if filled > self.written[block]:  # a shared block is full already, and never rewritten
                self.written[block] = filled
                self.touched.add(block)
