"""A Scene as a matplotlib figure: what readers on GitHub and in exported notebooks see. White background, no pyplot."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.teach.views.scene import DARK, FILLS, MARK, MUTED, Box, Label, Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120
_POINTS = 72 / 100  # a scene's unit is a hundredth of an inch
_HATCHES = {"hatch": ("////", (1, 1, 1, 0.5)), "dots": ("....", "#A2A2A2"), "cross": ("xxx", "#E69F00")}


@functools.cache
def picture() -> type[Figure]:
    """The class of all figures here; made when first asked for, since only then matplotlib is needed."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A Figure that shows itself, once, as the last expression of a cell, whether pyplot was imported or not."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", metadata={"Software": None})
            return buffer.getvalue()

    return Picture


def figure(scenes: Sequence[Scene], columns: int = 1) -> Figure:
    """The scenes in rows of `columns`, a little apart."""
    gap, columns = 28, min(columns, len(scenes))
    rows = [scenes[i:i + columns] for i in range(0, len(scenes), columns)]
    heights = [max(scene.height for scene in row) for row in rows]
    width = max(scene.width for scene in scenes)
    whole = Scene(width * columns + gap * (columns - 1), sum(heights) + gap * (len(rows) - 1))
    y = 0.0
    for row, height in zip(rows, heights):
        for column, scene in enumerate(row):
            whole.place(scene, column * (width + gap), y)
        y += height + gap
    margin = 10
    drawn = picture()(figsize=((whole.width + 2 * margin) / 100, (whole.height + 2 * margin) / 100), dpi=_DPI, facecolor="white")
    axes = drawn.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-margin, whole.width + margin), ylim=(whole.height + margin, -margin))
    axes.axis("off")
    for order, item in enumerate(whole.items):
        (_box if isinstance(item, Box) else _label)(axes, item, order)
    return drawn


def _box(axes: Any, box: Box, order: int) -> None:
    from matplotlib.patches import Rectangle

    place = ((box.x, box.y), box.w, box.h)
    if box.fill:
        axes.add_patch(Rectangle(*place, facecolor=FILLS[box.fill], edgecolor="none", zorder=order))
    if box.pattern:
        hatch, ink = _HATCHES[box.pattern]
        axes.add_patch(Rectangle(*place, fill=False, hatch=hatch, edgecolor=ink, linewidth=0, zorder=order))
    if box.border != "none":
        thick = box.border != "thin"
        dashes = (0, (2, 1.3)) if box.border == "dashed" else "solid"
        axes.add_patch(Rectangle(*place, fill=False, edgecolor=MARK if thick else "#868686", linewidth=(2.5 if thick else 1) * _POINTS,
                                 linestyle=dashes, joinstyle="miter", zorder=order))
    if box.text:
        _label(axes, Label(box.x + box.w / 2, box.y + box.h / 2 + box.size * 0.36, box.text, box.size, "middle", True, box.fill), order)


def _label(axes: Any, label: Label, order: int) -> None:
    align = {"start": "left", "middle": "center", "end": "right"}[label.anchor]
    text = label.text.replace("$", r"\$")  # no mathematics in a token's text
    axes.text(label.x, label.y, text, fontsize=label.size * _POINTS, ha=align, va="baseline", zorder=order + 0.5,
              fontweight="bold" if label.bold else "normal", color=MUTED if label.quiet and not label.on else DARK)
