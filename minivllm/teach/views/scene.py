"""Scene: a picture as a short list of boxes and labels. Every view makes one for a step; svg.py and figures.py draw it.

Owns the colours and the widths of text. Knows nothing of blocks, sequences or widgets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

WIDTH = 900
#: Fills by name. s0 to s5: Okabe and Ito's colours, one for each sequence in turn, light enough for dark text; t0 to t5: the same,
#: thinned with white.
FILLS = {
    "s0": "#E69F00", "s1": "#56B4E9", "s2": "#2BB38A", "s3": "#F0E442", "s4": "#E8743B", "s5": "#CC79A7",
    "t0": "#FBECCC", "t1": "#DDF0FB", "t2": "#D2F0E6", "t3": "#FCFAD9", "t4": "#FBE1D5", "t5": "#F5E4ED",
    "grey": "#DADADA", "pale": "#F1F1F1", "many": "#9FB4C7",
}
NUM_COLOURS = 6
SIZES = (9, 10, 11, 13, 14, 15, 16, 17, 20)  # of text, in pixels at full width
DARK, MUTED, MARK = "#16181D", "#5F6670", "#16181D"  # text in boxes; quiet text and thin lines; thick borders on white
_NARROW, _WIDE = set("iljtfrI.,:;'|!()[]/ -·"), set("mwMW@%→<>=+~#…")


@dataclass(slots=True)
class Box:
    """A rectangle. fill: a name in FILLS or None; pattern: None, "hatch", "dots" or "cross"; border: "thin", "thick", "dashed" or "none".

    `text` stands in its middle; `tip` is what a pointer over it is told.
    """

    x: float
    y: float
    w: float
    h: float
    fill: str | None = None
    pattern: str | None = None
    border: str = "thin"
    text: str = ""
    size: int = 13
    tip: str = ""


@dataclass(slots=True)
class Label:
    """A line of text; `y` is its baseline. on: the fill it stands on, None for the page; quiet: less important."""

    x: float
    y: float
    text: str
    size: int = 13
    anchor: str = "start"
    bold: bool = False
    on: str | None = None
    quiet: bool = False


@dataclass
class Scene:
    """What is drawn, in this order. alt: the same in a sentence, for those who do not see it."""

    width: float
    height: float
    items: list[Box | Label] = field(default_factory=list)
    alt: str = ""

    def add(self, *items: Box | Label) -> None:
        self.items += items

    def place(self, other: Scene, x: float, y: float) -> None:
        """Draw `other` with its corner at (x, y)."""
        for item in other.items:
            fields = {name: getattr(item, name) for name in type(item).__slots__}
            self.add(type(item)(**{**fields, "x": item.x + x, "y": item.y + y}))


def colour_of(index: int) -> int:
    """Which of the colours the index-th sequence has."""
    return index % NUM_COLOURS


def text_width(text: str, size: float, bold: bool = False) -> float:
    """About how wide `text` will be; rather too much than too little, since every reader has other fonts."""
    return sum(map(_units, text)) * size * (1.08 if bold else 1.0)


@functools.lru_cache(maxsize=4096)
def _units(char: str) -> float:
    """The width of one character, in heights."""
    if char in _NARROW:
        return 0.36
    if char in _WIDE:
        return 1.0
    return 0.84 if char == "×" else 0.7 if char.isupper() else 1.3 if ord(char) > 0x2E80 else 0.62


def cut(text: str, size: float, width: float, bold: bool = False) -> str:
    """`text`, or as much of its beginning as fits into `width` with an ellipsis."""
    if text_width(text, size, bold) <= width:
        return text
    room, kept = width - text_width("…", size, bold), 0
    for char in text:
        room -= text_width(char, size, bold)
        if room < 0:
            break
        kept += 1
    return text[:kept].rstrip() + "…" if kept else ""


def cut_front(text: str, size: float, width: float) -> str:
    """`text`, or as much of its end as fits into `width` after an ellipsis."""
    return cut(text[::-1], size, width)[::-1]


def wrap(text: str, size: float, width: float, max_lines: int) -> list[str]:
    """`text` in lines of at most `width`; what does not fit into `max_lines` is cut."""
    lines: list[str] = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= width or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < max_lines:
            lines.append(word)
        else:
            lines[-1] = cut(longer + " …", size, width)
            break
    return lines


def fitting_size(text: str, width: float, sizes: Iterable[int], bold: bool = False) -> int:
    """The first of `sizes`, largest first, at which `text` fits into `width`; 0 if none."""
    return next((size for size in sizes if text_width(text, size, bold) <= width), 0)


def fit_sentences(sentences: list[str], size: float, width: float, max_lines: int) -> list[str]:
    """As many whole sentences as `max_lines` hold, in lines, and how many were left out."""
    for shown in range(len(sentences), 0, -1):
        left = len(sentences) - shown
        text = " ".join(sentences[:shown]) + (f" (And {left} more.)" if left else "")
        lines = wrap(text, size, width, max_lines)
        if " ".join(lines) == text:
            return lines
    return wrap(" ".join(sentences), size, width, max_lines)


def luminance(colour: str) -> float:
    channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours: 1 to 21; 4.5 is the least for text."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def in_layers(scene: Scene) -> None:
    """Sort the items: boxes with a border, boxes without one by fill, labels. Neighbours that look the same then take less room."""
    scene.items.sort(key=lambda item: (2, "") if isinstance(item, Label) else (0, "") if item.border != "none" else (1, item.fill or ""))


def add_heading(scene: Scene, title: str, aside: str, sentences: list[str]) -> None:
    """The top of a view, 76 high: a title, something quiet at the right or "", and below as many of `sentences` as two lines hold."""
    scene.add(Label(0, 18, title, 17, bold=True), *[Label(WIDTH, 18, aside, 14, "end", quiet=True)] * bool(aside))
    for index, line in enumerate(fit_sentences(sentences, 15, WIDTH, 2)):
        scene.add(Label(0, 42 + 20 * index, line, 15))


def swatches(entries: Iterable[tuple[Box, str]], width: float = WIDTH, size: int = 13) -> Scene:
    """A legend: each box with its meaning beside it, in as many rows as it takes."""
    scene, x, y = Scene(width, 24), 0.0, 0.0
    for box, meaning in entries:
        needed = box.w + 7 + text_width(meaning, size)
        if x and x + needed > width:
            x, y = 0.0, y + 26
        box.x, box.y = x + 2, y + 2
        scene.add(box, Label(x + box.w + 9, y + 2 + box.h / 2 + size * 0.36, meaning, size, quiet=True))
        x += needed + 20
    scene.height = y + 24
    return scene
