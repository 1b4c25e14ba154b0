"""The offline pages. Owns how a notebook and the index look as HTML; a page carries all it needs and asks no network for anything."""

from __future__ import annotations

import copy
import html
import re
from html.parser import HTMLParser
from pathlib import Path

from nbformat import NotebookNode

from .execute import WIDGET
from .series import Entry, Series
from .stamp import BADGE, KAGGLE_BADGE

LIVE = "Live view: it moves while the notebook runs, and is not part of this page."
#: What a script that asks the network holds; the address of SVG's namespace is a name, and nobody asks for it.
SCRIPT_FETCHES = re.compile(r"""https?:(?!//www\.w3\.org/)|["'`]//\w|\b(?:import|fetch|require)\s*\(|\bimport\s+[\w{*"']|XMLHttpRequest|WebSocket""")
SHELL = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<nav aria-label="Series">{links}</nav>
<main>
{body}
</main>
<nav aria-label="Series, again">{links}</nav>
</body>
</html>
"""


def style() -> str:
    """The page's own rules, then the colours of code for light and for dark."""
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    own = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{own}"


def notebook_page(nb: NotebookNode, series: Series, entry: Entry) -> str:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(for_a_page(nb))
    body = collapsed(re.sub(r'id="cell-id=', 'id="', body))
    before, after = (one if one and one.ready else None for one in series.neighbours(entry))
    links = ['<a href="index.html">All notebooks</a>']
    links += [f'<a rel="prev" href="{before.name}.html">&larr; {html.escape(before.heading)}</a>'] if before else []
    links += [f'<a rel="next" href="{after.name}.html">{html.escape(after.heading)} &rarr;</a>'] if after else []
    return SHELL.format(title=html.escape(entry.heading), style=style(), links=" ".join(links), body=body)


def for_a_page(nb: NotebookNode) -> NotebookNode:
    """The badge becomes a link in words, a widget a remark that it is one."""
    nb = copy.deepcopy(nb)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = cell.source.replace(BADGE, "[Open in Colab]").replace(KAGGLE_BADGE, "[Open in Kaggle]")
        for output in cell.get("outputs", []):
            if WIDGET in output.get("data", {}):
                output.data = {"text/html": f'<p class="live">{LIVE}</p>'}
    return nb


def collapsed(body: str) -> str:
    """The input of each solution cell inside <details>; nbconvert has marked the cells with their tags."""
    start = r'(<div class="[^"]*celltag_exercise-\d+-solution[^>]*>\s*)'
    pattern = re.compile(start + r'(<div class="input">.*?)(?=<div class="output_wrapper">)', re.DOTALL)
    return pattern.sub(r"\1<details><summary>Solution</summary>\2</details>", body)


def index_page(series: Series) -> str:
    rows = []
    for entry in series.entries:
        title = html.escape(entry.heading)
        title = f'<a href="{entry.name}.html">{title}</a>' if entry.ready else f"{title} (planned)"
        rows.append(f"<li>{title}<br><span>{html.escape(entry.topic)} {entry.minutes} minutes.</span></li>")
    body = '<h1>minivllm, built step by step</h1>\n<ol class="series">\n' + "\n".join(rows) + "\n</ol>"
    return SHELL.format(title="minivllm, built step by step", style=style(), links='<a href="index.html">All notebooks</a>', body=body)


class _References(HTMLParser):
    """Collects what a browser would fetch by itself; where a reader may click is not among it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        if tag in ("iframe", "object", "embed", "base"):
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            fetched = name in ("src", "srcset", "poster", "data", "background") or name in ("href", "xlink:href") and tag != "a"
            if fetched and value and not re.match(r"data:|#", value):
                self.found.append(value)
            if name == "style":
                self.handle_style(value or "")

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.handle_style(data)
        elif self.inside == "script" and SCRIPT_FETCHES.search(data):
            self.found.append(f"script: {data.strip()[:60]}")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_style(self, text: str) -> None:
        self.found += re.findall(r"@import[^;]*|url\(\s*[\"']?(?!data:|#|[\"'])[^)]*\)", text)


def network_references(text: str) -> list[str]:
    """Sentences about everything the page would fetch from anywhere; a page that carries all it needs has none."""
    parser = _References()
    parser.feed(text)
    parser.close()
    return [f"the page fetches {reference}" for reference in parser.found]
