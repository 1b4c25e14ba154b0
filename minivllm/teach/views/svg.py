"""A Scene as SVG: transparent, in the page's own text colour, with a description for screen readers. Knows no view and no widget."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from html import escape

from minivllm.teach.views.scene import DARK, FILLS, SIZES, Box, Label, Scene

#: The text colour of the page around it: Jupyter's, Colab's, VS Code's, or what it inherits.
PAGE_COLOUR = "var(--jp-ui-font-color1,var(--colab-primary-text-color,var(--vscode-editor-foreground,currentColor)))"
FONT = "system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
MAX_BYTES = 48_000
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_PATTERNS = {
    "hatch": ("h", 7, '<path d="M-2 9l11-11M-2 2l4-4M5 9l4-4" style="stroke:{ink};stroke-width:1.6;stroke-opacity:.5"/>'),
    "dots": ("d", 6, '<circle cx="1.5" cy="1.5" r="1" style="fill:{ink}"/><circle cx="4.5" cy="4.5" r="1" style="fill:{ink}"/>'),
    "cross": ("x", 8, '<path d="M0 0l8 8M8 0l-8 8" style="stroke:{ink}"/>'),
}
_INK = {"hatch": "#fff", "dots": "#a2a2a2", "cross": "#e69f00"}
_PATTERN_FILLS = {"hatch": [f for f in FILLS if f[0] == "s"] + ["many"], "dots": ["grey", "pale"], "cross": ["t0", None]}


def clean(text: str) -> str:
    """`text` safe inside SVG and HTML; characters that XML cannot hold become a replacement character."""
    return escape(_NOT_XML.sub("\ufffd", text))


def _number(value: float) -> str:
    return f"{round(value, 1):g}"


def _fill_class(fill: str | None, pattern: str | None = None) -> str:
    """Two or three letters: a picture has many boxes and must stay small."""
    return ("o" if fill is None else fill if fill[-1].isdigit() else f"f{fill[0]}") + (_PATTERNS[pattern][0] if pattern else "")


def _box(box: Box, tips: bool) -> list[str]:
    x, y, w, h = map(_number, (box.x, box.y, box.w, box.h))
    names = [_fill_class(box.fill, box.pattern)] if box.fill or box.pattern else []
    names += {"thin": [], "thick": ["k"], "dashed": ["e"], "none": ["n"]}[box.border]
    kind = f' class="{" ".join(names)}"' if names else ""
    path = f'<path{kind} d="M{x} {y}h{w}v{h}H{x}z"'
    path += f"><title>{clean(box.tip)}</title></path>" if tips and box.tip else "/>"
    if not box.text:
        return [path]
    x, y = box.x + box.w / 2, box.y + box.h / 2 + box.size * 0.36
    return [path, _label(Label(x, y, box.text, box.size, "middle", True, box.fill or "page"))]


def _label(label: Label) -> str:
    inside = label.on is not None  # the defaults are those of the many short texts in boxes
    kind = [] if label.on in FILLS else ["u"]
    kind += [] if label.anchor == "middle" else [{"start": "l", "end": "r"}[label.anchor]]
    kind += [] if label.bold else ["m"]
    kind += ["q"] if label.quiet and not inside else []
    kind += [f"z{label.size}"] if label.size != 13 else []
    attributes = f' class="{" ".join(kind)}"' if kind else ""
    return f'<text x="{_number(label.x)}" y="{_number(label.y)}"{attributes}>{clean(label.text)}</text>'


def items_of(scene: Scene, tips: bool = True) -> list[str]:
    """Paths and texts, each a string that stands for itself, whatever is drawn before and after it."""
    return [part for item in scene.items for part in (_box(item, tips) if isinstance(item, Box) else [_label(item)])]


def style(root: str, name: str, page_colour: str = PAGE_COLOUR) -> str:
    """The rules for everything inside the element that the selector `root` finds; `name` is where its patterns are."""
    fills = [f".{_fill_class(key)}{{fill:{colour}}}" for key, colour in FILLS.items()]
    patterned = [_fill_class(key, pattern) for pattern, keys in _PATTERN_FILLS.items() for key in keys]
    fills += [f".{kind}{{fill:url(#{name}-{kind})}}" for kind in patterned]
    mark = f"stroke:{page_colour};stroke-width:2.5"
    rules = ["path{fill:none;stroke:#868686;stroke-width:1}",
             f"text{{font:600 13px {FONT};text-anchor:middle;fill:{DARK};white-space:pre}}",
             f".u{{fill:{page_colour}}}", ".l{text-anchor:start}", ".r{text-anchor:end}", ".m{font-weight:400}", ".q{opacity:.78}",
             *[f".z{size}{{font-size:{size}px}}" for size in SIZES], *fills,
             f".k{{{mark}}}", f".e{{{mark};stroke-dasharray:6 4}}", ".n{stroke:none}",
             "text{pointer-events:none}"]
    return "".join(f"{root} {rule}" for rule in rules)


def definitions(name: str) -> str:
    parts = []
    for pattern, keys in _PATTERN_FILLS.items():
        _, size, drawing = _PATTERNS[pattern]
        ink = drawing.format(ink=_INK[pattern])
        parts += [f'<pattern id="{name}-{_fill_class(key, pattern)}" width="{size}" height="{size}" patternUnits="userSpaceOnUse">'
                  f'<path d="M0 0h{size}v{size}h-{size}z" style="stroke:none;fill:{FILLS[key] if key else "none"}"/>{ink}</pattern>' for key in keys]
    return f"<defs>{''.join(parts)}</defs>"


_MARGIN = 14  # of a file, around the scene


def opening(scene: Scene, name: str, file: bool = False) -> str:
    """The svg element's beginning. file: it will be a document of its own, which needs to say what it is."""
    namespace = ' xmlns="http:' + '//www.w3.org/2000/svg"' if file else ""
    margin = _MARGIN if file else 0
    width, height = _number(scene.width + 2 * margin), _number(scene.height + 2 * margin)
    corner = f"{-margin} {-margin}"
    return (f'<svg{namespace} id="{name}" role="img" aria-label="{clean(scene.alt)}" viewBox="{corner} {width} {height}" width="{width}" '
            f'style="max-width:100%;height:auto;background:transparent">')


def svg(scene: Scene, name: str | None = None) -> str:
    """The scene as an SVG element for a page. name: its id there, by default made from what it shows."""
    body = _joined(items_of(scene))
    if len(body.encode()) > MAX_BYTES - 6_000:  # what a pointer is told is the least of it
        body = _joined(items_of(scene, tips=False))
    name = name or content_name(body)
    return f"{opening(scene, name)}<style>{style('#' + name, name)}</style>{definitions(name)}{body}</svg>"


def _joined(items: list[str]) -> str:
    """The items, texts last; neighbours that look the same as one path, or as one text whose letters stand apart."""
    parts: list[str] = []
    for item in items:
        if item.startswith("<text"):
            continue
        kind, end = item[:item.find('d="') + 3], '"/>'
        if parts and item.endswith(end) and parts[-1].startswith(kind) and parts[-1].endswith(end):
            parts[-1] = parts[-1][:-len(end)] + item[len(kind):]
        else:
            parts.append(item)
    texts: list[list[str]] = []  # x, what follows it, letters
    for item in items:
        if item.startswith("<text"):
            x, rest = item[len('<text x="'):].split('"', 1)
            rest, letters = rest[:-len("</text>")].split(">", 1)
            if texts and len(letters) == 1 and texts[-1][1] == rest and texts[-1][0].count(" ") == len(texts[-1][2]) - 1:
                texts[-1][0] += f" {x}"
                texts[-1][2] += letters
            else:
                texts.append([x, rest, letters])
    return "".join([*parts, *[f'<text x="{x}"{rest}>{letters}</text>' for x, rest, letters in texts]])


def content_name(text: str) -> str:
    return "mv" + hashlib.sha256(text.encode()).hexdigest()[:8]


def animation(scenes: Sequence[Scene], seconds_per_step: float = 1.0) -> str:
    """The scenes one after the other, for ever, as an SVG file without a script. Who asked for less motion sees the last one.

    It brings its own paper: a page's colours and the reader's preference, which is all that an image file can ask for, may differ.
    """
    frames = [items_of(scene, tips=False) for scene in scenes]
    name, share = content_name("".join(map("".join, frames))), 100 / len(frames)
    motion = (f"#{name}{{--page:#1f2328;--paper:#fff}}@media (prefers-color-scheme:dark){{#{name}{{--page:#e6edf3;--paper:#0d1117}}}}"
              f"#{name} .f{{visibility:hidden;animation:{name} {seconds_per_step * len(frames):g}s infinite step-end}}"
              f"@keyframes {name}{{0%{{visibility:visible}}{share:.4f}%,100%{{visibility:hidden}}}}"
              f"@media (prefers-reduced-motion:reduce){{#{name} .f{{animation:none}}#{name} .z{{visibility:visible}}}}")
    texts = [[item for item in frame if item.startswith("<text")] for frame in frames]
    common = set(texts[0]).intersection(*texts)  # paths lie over one another, so their order is kept; texts do not
    paths = _timed([[item for item in frame if not item.startswith("<text")] for frame in frames], seconds_per_step)
    changing = _timed([[item for item in frame if item not in common] for frame in texts], seconds_per_step)
    whole = Scene(max(s.width for s in scenes), max(s.height for s in scenes), alt=" Then: ".join(scene.alt for scene in scenes))
    return (f"{opening(whole, name, file=True)}<style>{style('#' + name, name, 'var(--page)')}{motion}</style>{definitions(name)}"
            f'<rect x="-{_MARGIN}" y="-{_MARGIN}" width="{whole.width + 2 * _MARGIN:g}" height="{whole.height + 2 * _MARGIN:g}" rx="8" style="fill:var(--paper)"/>'
            f"{paths}{''.join(item for item in dict.fromkeys(texts[0]) if item in common)}{changing}</svg>\n")


def _timed(frames: list[list[str]], seconds_per_step: float) -> str:
    last = len(frames) - 1
    return "".join(f'<g class="f{" z" if i == last else ""}" style="animation-delay:{seconds_per_step * i:g}s">{"".join(frame)}</g>'
                   for i, frame in enumerate(frames))
