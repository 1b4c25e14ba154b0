"""The end of a block, drawn: for each step which positions have K/V, which get it now, and which token is there without.

Takes records, one a step; knows no engine. Shown in notebook 04.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.teach.views import figures
from minivllm.teach.views.captions import count
from minivllm.teach.views.scene import WIDTH, Box, Label, Scene, swatches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEFT, _CELL, _HEIGHT, _GAP, _ROW = 205, 54, 34, 12, 62


@dataclass(frozen=True)
class StepRecord:
    """One sequence's step. length: tokens known when it was planned; positions `start` to `end` - 1 are computed in it.

    block_table: as planned. slots: where the step wrote.
    """

    length: int
    start: int
    end: int
    block_table: tuple[int, ...]
    slots: tuple[int, ...]

    def __str__(self) -> str:
        computes = f"{self.start}" if self.end == self.start + 1 else f"{self.start} to {self.end - 1}"
        table, slots = (" ".join(map(str, numbers)) for numbers in (self.block_table, self.slots))
        return f"{self.length:7} {self.start:9}   {computes:9} {table:12} {slots:12} {self.length + 1:9}"


def table(records: Sequence[StepRecord]) -> str:
    """The records as lines of text, below a head."""
    head = "step   tokens  computed   computes  block_table  slots      tokens then"
    return "\n".join([head, *(f"{number:4}  {record}" for number, record in enumerate(records))])


def figure(records: Sequence[StepRecord], block_size: int) -> Figure:
    """A row for each step, a cell for each position, a gap where a block ends."""
    return figures.figure([scene(records, block_size)])


def scene(records: Sequence[StepRecord], block_size: int) -> Scene:
    num_positions = -(-(records[-1].length + 1) // block_size) * block_size
    drawn = Scene(WIDTH, 0, alt=table(records))
    for position in range(num_positions):
        drawn.add(Label(_x(position, block_size) + _CELL / 2, 14, str(position), 14, "middle", quiet=True))
    drawn.add(Label(0, 14, "position", 14, quiet=True))
    owned = 0
    for number, record in enumerate(records):
        y = 26.0 + _ROW * number
        _step(drawn, number, record, block_size, num_positions, y)
        taken, owned = record.block_table[owned:], len(record.block_table)
        said = f"takes {count(len(taken), 'block')}: {', '.join(map(str, taken))}" if taken else "takes no block"
        drawn.add(Label(_x(num_positions, block_size), y + 22, said, 15, bold=bool(taken), quiet=not taken))
    y = 26 + _ROW * len(records) + 2
    legend = swatches([(Box(0, 0, 26, 20, "t0"), "K/V written before"), (Box(0, 0, 26, 20, "s0", None, "thick"), "written in this step"),
                       (Box(0, 0, 26, 20, None, None, "dashed"), "sampled by it: no K/V yet"), (Box(0, 0, 26, 20), "empty slot")])
    drawn.place(legend, 0, y)
    drawn.height = y + legend.height
    return drawn


def _x(position: int, block_size: int) -> float:
    return _LEFT + position * _CELL + position // block_size * _GAP


def _step(drawn: Scene, number: int, record: StepRecord, block_size: int, num_positions: int, y: float) -> None:
    drawn.add(Label(0, y + 15, f"step {number}: {record.length} tokens,", 15, bold=True),
              Label(0, y + 34, f"{record.start} of them computed", 14, quiet=True))
    slots = dict(zip(range(record.start, record.end), record.slots))
    for position in range(num_positions):
        x, owned = _x(position, block_size), position // block_size < len(record.block_table)
        if position in slots:
            drawn.add(Box(x, y, _CELL - 4, _HEIGHT, "s0", None, "thick", str(slots[position]), 14))
        elif position == record.length:  # the token that this step samples
            drawn.add(Box(x, y, _CELL - 4, _HEIGHT, None, None, "dashed", "new", 13))
        elif owned:
            drawn.add(Box(x, y, _CELL - 4, _HEIGHT, "t0" if position < record.start else None))
    for index in range(num_positions // block_size):
        text = f"block {record.block_table[index]}" if index < len(record.block_table) else "no block yet"
        drawn.add(Label(_x(index * block_size, block_size), y + _HEIGHT + 15, text, 13, quiet=True))
