"""First fit: notebook 02's contiguous buffers in a memory of `size` slots, each in the lowest hole that is large enough.

Requests are rows of lengths.json, taken in order; each stays for as many steps as its answer has tokens. Used again by notebook 04, which
gives the same requests to a block manager.
"""

from __future__ import annotations

from collections.abc import Callable

Row = dict[str, int]  # "prompt" and "answer", in tokens


class Buffers:
    """`taken`: start of each buffer -> its length. `ends`: start -> the step with which its request is done."""

    def __init__(self, size: int):
        self.size, self.step = size, 0
        self.taken: dict[int, int] = {}
        self.ends: dict[int, int] = {}

    @property
    def free(self) -> int:
        return self.size - sum(self.taken.values())

    def hole(self, need: int) -> int | None:
        """The lowest start of `need` free slots in a row, or None."""
        begin = 0
        for start in sorted(self.taken):
            if start - begin >= need:
                return begin
            begin = start + self.taken[start]
        return begin if self.size - begin >= need else None

    def wait(self) -> None:
        """Go to the step in which the next request ends, and free its buffer."""
        self.step = min(self.ends.values())
        for start in [start for start, end in self.ends.items() if end <= self.step]:
            del self.taken[start], self.ends[start]

    def place(self, start: int, need: int, steps: int) -> None:
        self.taken[start], self.ends[start] = need, self.step + steps


def until_blocked(rows: list[Row], size: int) -> tuple[dict[int, int], int, int]:
    """(taken, need, free) when the first request finds no hole for its `need` slots although `free` slots are free in all.

    Every buffer has exactly the length that its request will need. Raises ValueError where that never happens.
    """
    memory = Buffers(size)
    for row in rows:
        need = row["prompt"] + row["answer"]
        while (start := memory.hole(need)) is None:
            if memory.free >= need:
                return memory.taken, need, memory.free
            memory.wait()
        memory.place(start, need, row["answer"])
    raise ValueError(f"every request found a hole in {size} slots: take fewer slots")


def steps_needed(rows: list[Row], size: int, reserve: Callable[[Row], int]) -> int:
    """Steps until all requests are answered, when each waits for `reserve(row)` slots in a row. A running request writes a token a step."""
    memory = Buffers(size)
    for row in rows:
        need = reserve(row)
        if need > size:
            raise ValueError(f"a buffer of {need} slots never fits into {size}")
        while (start := memory.hole(need)) is None:
            memory.wait()
        memory.place(start, need, row["answer"])
    return max(memory.ends.values(), default=0)
