"""Lanes: the rows of a batch over the steps. A bar for each request in the row and the steps that it takes, and what lies idle between.

Knows numbers only. Shown in notebook 06.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.teach import sketch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bar = tuple[int, int, int]  # row of the batch, first step, the step after the last
_TAKEN = ("#0072B2", "#56B4E9")  # in turns along a row


def idle(bars: Sequence[Bar], rows: int, end: int) -> list[Bar]:
    """What no bar takes of `rows` rows up to step `end`."""
    pieces = []
    for row in range(rows):
        free_from = 0
        for _, start, stop in sorted(bar for bar in bars if bar[0] == row):
            if start > free_from:
                pieces.append((row, free_from, start))
            free_from = stop
        if free_from < end:
            pieces.append((row, free_from, end))
    return pieces


def figure(panels: Mapping[str, Sequence[Bar]], rows: int) -> Figure:
    """A panel for each way to batch, one above the other over the same steps. Bars carry the request's number where there is room."""
    drawn = sketch.figure(11, 0.6 + (0.55 + 0.2 * rows) * len(panels))
    last = max(stop for bars in panels.values() for _, _, stop in bars)
    axes = drawn.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, bars) in zip(axes, panels.items()):
        _panel(axis, bars, rows, last)
        axis.set_title(title, fontsize=13, loc="left")
    axes[-1].set_xlabel("step", fontsize=13)
    axes[-1].tick_params(axis="x", labelsize=12)
    return drawn


def _panel(axis: Any, bars: Sequence[Bar], rows: int, last: int) -> None:
    turn = [0] * rows
    for number, (row, start, stop) in enumerate(bars):
        axis.barh(row, stop - start, left=start, height=0.82, color=_TAKEN[turn[row] % 2], edgecolor="white", linewidth=0.8)
        turn[row] += 1
        if stop - start > 0.014 * last * len(str(number)):
            white = {"color": "white"} if turn[row] % 2 else {}
            axis.text((start + stop) / 2, row, str(number), ha="center", va="center", fontsize=9, **white)
    for row, start, stop in idle(bars, rows, max(stop for _, _, stop in bars)):
        axis.barh(row, stop - start, left=start, height=0.82, color="white", edgecolor="#8A8A8A", hatch="////", linewidth=0.6)
    axis.set_xlim(0, 1.01 * last)
    axis.set_ylim(rows - 0.4, -0.6)
    axis.set_yticks([0, rows - 1], ["row 0", f"row {rows - 1}"], fontsize=12)
    axis.spines[["top", "right"]].set_visible(False)


def batches(panels: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> Figure:
    """Tokens of each step, a panel for each way to schedule: (prefill tokens, decode tokens), stacked. The number stands on tall bars."""
    drawn = sketch.figure(11, 1.9 * len(panels) + 0.5)
    axes = drawn.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, (title, (prefill, decode)) in zip(axes, panels.items()):
        steps = range(len(prefill))
        axis.bar(steps, decode, color=_TAKEN[0], label="decode")
        bars = axis.bar(steps, prefill, bottom=decode, color="white", edgecolor="#444444", hatch="////", linewidth=0.8, label="prefill")
        axis.bar_label(bars, [str(a + b) for a, b in zip(prefill, decode)], fontsize=10, padding=2)
        axis.set_title(title, fontsize=13, loc="left")
        axis.set_ylabel("tokens", fontsize=12)
        axis.tick_params(labelsize=12)
        axis.margins(y=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=12, frameon=False, loc="upper right")
    axes[-1].set_xticks(range(0, max(len(prefill) for prefill, _ in panels.values()), 2))
    axes[-1].set_xlabel("step", fontsize=13)
    return drawn
