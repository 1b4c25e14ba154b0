"""Figures of notebook 08: what each option keeps of one distribution, drawn counts against exact ones, a text with its probabilities.

Takes numbers and texts; knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.teach.sketch import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 84.0  # of a line of text, in units of which a character takes one


def kept(texts: Sequence[str], panels: Mapping[str, Sequence[float]], columns: int = 3) -> Figure:
    """The same tokens in every panel, a bar each, in %; 0 is drawn as a cross: the token cannot come."""
    rows = -(-len(panels) // columns)
    drawn = figure(3.9 * columns, 0.4 + 3.5 * rows)
    axes = drawn.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axis, (title, values) in zip(axes, panels.items()):
        axis.barh(range(len(texts)), [100 * value for value in values], color=COLOURS[0])
        for row, value in enumerate(values):
            label = "×" if value == 0 else f"{100 * value:.1f}" if value < 0.0995 else f"{100 * value:.0f}"
            axis.text(100 * value + 1.5, row, label, va="center", fontsize=11, color="#9A3A00" if value == 0 else "black")
        axis.set_title(title, fontsize=13, loc="left")
        axis.set_yticks(range(len(texts)), [_plain(text) for text in texts], fontsize=11)
        axis.set_xlim(0, 112)
        axis.set_xticks([0, 50, 100])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    drawn.supxlabel("probability that the token is drawn, % (×: never)", fontsize=12)
    return drawn


def counts(texts: Sequence[str], exact: Sequence[float], drawn_by: Mapping[str, Sequence[float]]) -> Figure:
    """Bars of each way's share of draws beside each other, and the exact probability as a line over each group. In %."""
    drawn = figure(10, 3.6)
    axis = drawn.subplots()
    width = 0.8 / len(drawn_by)
    for number, (name, values) in enumerate(drawn_by.items()):
        places = [index - 0.4 + width * (number + 0.5) for index in range(len(texts))]
        heights, hatch = [100 * value for value in values], ("", "//", "..")[number % 3]
        axis.bar(places, heights, width, color=COLOURS[number], hatch=hatch, edgecolor="white", label=name)
    begins, ends = ([index + side for index in range(len(texts))] for side in (-0.45, 0.45))
    axis.hlines([100 * value for value in exact], begins, ends, color="black", linewidth=2, label="exact")
    axis.set_xticks(range(len(texts)), [_plain(text) for text in texts], fontsize=12)
    axis.set_ylabel("share of the draws, %", fontsize=12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=12, frameon=False)
    return drawn


def text(lines: Mapping[str, Sequence[tuple[str, float]]]) -> Figure:
    """Texts, each a list of (token, probability): the darker a token's ground, the less likely it was. The % stands below each token."""
    placed, row = [], 0.0
    for title, tokens in lines.items():
        placed.append((0.0, row, title, None))
        row, x = row + 1.0, 0.0
        for token, probability in tokens:
            shown = _plain(token)
            width = max(len(shown), 4) + 1.0
            if x + width > _WIDTH:
                row, x = row + 2.0, 0.0
            placed.append((x, row, shown, probability))
            x += width
        row += 2.4
    drawn = figure(10, 0.3 + 0.27 * row)
    axis = drawn.subplots()
    for item in placed:
        _token(axis, *item)
    axis.set(xlim=(0, _WIDTH), ylim=(row, -0.8))
    axis.axis("off")
    return drawn


def _token(axis: Any, x: float, y: float, shown: str, probability: float | None) -> None:
    """One token on its ground, or a title where it has no probability."""
    if probability is None:
        axis.text(x, y, shown, fontsize=13, fontweight="bold", va="center")
        return
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    width, surprise = max(len(shown), 4) + 0.6, min(1.0, -math.log10(max(probability, 1e-9)) / 4)  # the darkest: one in 10,000
    axis.add_patch(Rectangle((x, y - 0.5), width, 1.0, facecolor=colormaps["Oranges"](0.05 + 0.55 * surprise), edgecolor="none"))
    axis.text(x + width / 2, y, shown, fontsize=11.5, ha="center", va="center", family="monospace")
    percent = 100 * probability
    label = "<0.1" if percent < 0.1 else f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"
    axis.text(x + width / 2, y + 0.83, label, fontsize=9.5, ha="center", va="center", color="#555555")


def _plain(token: str) -> str:
    """A token's text on one line, spaces at its ends as they are, and nothing that matplotlib would take for mathematics."""
    return token.replace("\n", "↵").replace("$", r"\$").strip(" ") or "␣"
