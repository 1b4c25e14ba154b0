"""The notebooks' plain figures: numbers in a grid, lines, bars. White background, large type, no colour that is needed to understand.

Every function returns a matplotlib Figure that a notebook shows, once, as the last expression of a cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.teach.views.figures import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

#: Okabe and Ito's colours in an order in which neighbours differ in lightness too; with them go markers and dashes.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS, DASHES = "osD^vP", ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))


def figure(width: float, height: float) -> Figure:
    """An empty figure of `width` by `height` inches."""
    return picture()(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")


def heatmaps(panels: Mapping[str, Tensor], rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """Matrices side by side, each [rows, columns], the number written in every cell; NaN is drawn as a cross."""
    drawn = figure(3.6 * len(panels), 0.75 * len(rows) + 1.1)
    for axis, (title, matrix) in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        axis.imshow(matrix.numpy(), cmap="Blues", vmin=0, vmax=1.8 * max(1e-9, matrix.nan_to_num().max().item()), aspect="auto")
        for i, line in enumerate(matrix.tolist()):
            for j, value in enumerate(line):
                axis.text(j, i, "×" if value != value else f"{value:g}" if value == int(value) else f"{value:.2f}",
                          ha="center", va="center", fontsize=14, color="#999999" if value != value else "black")
        axis.set_xticks(range(len(columns)), columns, fontsize=12)
        axis.set_yticks(range(len(rows)), rows, fontsize=12)
        axis.set_title(title, fontsize=13)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    return drawn


def lines(xs: Sequence[float], ys: Mapping[str, Sequence[float]], x: str, y: str, log: bool = False) -> Figure:
    """One line for each of `ys` over the same `xs`, named at its end; `x` and `y` name the axes with their units."""
    drawn = figure(8, 4)
    axis = drawn.subplots()
    for number, (name, values) in enumerate(ys.items()):
        axis.plot(xs, values, marker=MARKERS[number], linestyle=DASHES[number], color=COLOURS[number], linewidth=2.5, markersize=8, label=name)
    if log:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.set_xticks(xs, [f"{value:g}" for value in xs])
    _finish(axis, x, y)
    return drawn


def stacked(names: Sequence[str], parts: Mapping[str, Sequence[float]], x: str) -> Figure:
    """Horizontal bars, one for each of `names`, made of the same `parts`; the value stands in every part that has room for it."""
    drawn = figure(9, 1.3 + 0.55 * len(names))
    axis = drawn.subplots()
    left = [0.0] * len(names)
    for number, (name, values) in enumerate(parts.items()):
        bars = axis.barh(names, values, left=left, color=COLOURS[number], hatch=("", "//", "..", "xx")[number % 4], edgecolor="white", label=name)
        room = 0.06 * max(map(sum, zip(*parts.values())))
        axis.bar_label(bars, [f"{value:,.0f}" if value > room else "" for value in values], label_type="center", fontsize=12,
                       bbox={"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.2"})
        left = [a + b for a, b in zip(left, values)]
    axis.invert_yaxis()
    _finish(axis, x, "")
    axis.legend(fontsize=12, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(parts))
    return drawn


def strip(size: int, taken: Mapping[int, int], title: str) -> Figure:
    """A memory of `size` slots as one strip; `taken` maps the start of each buffer to its length. Free pieces are numbered with their lengths."""
    drawn = figure(11, 1.9)
    axis = drawn.subplots()
    position = 0
    for number, start in enumerate(sorted(taken)):
        _piece(axis, position, start - position)
        axis.barh(0, taken[start], left=start, color=COLOURS[number % 2 * 4], edgecolor="white", hatch=("", "//")[number % 2])
        position = start + taken[start]
    _piece(axis, position, size - position)
    axis.set_xlim(0, size)
    axis.set_ylim(-0.5, 0.9)
    axis.set_yticks([])
    axis.set_title(title, fontsize=13, loc="left")
    axis.set_xlabel("slot (filled: buffers in use; the numbers are the lengths of the free pieces)", fontsize=12)
    axis.spines[["top", "right", "left"]].set_visible(False)
    return drawn


def _piece(axis: Any, start: int, length: int) -> None:
    """A free piece: an outline, its length above it."""
    if length > 0:
        axis.barh(0, length, left=start, color="white", edgecolor="#444444", linestyle=":", linewidth=1.2)
        axis.text(start + length / 2, 0.5, str(length), ha="center", va="bottom", fontsize=12, fontweight="bold")


def _finish(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x, fontsize=13)
    axis.set_ylabel(y, fontsize=13)
    axis.tick_params(labelsize=12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=12, frameon=False)
