"""What must hold of a built notebook, checked without running it. Each check takes a Built and yields sentences; no file is written."""

from __future__ import annotations

import difflib
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from nbformat import NotebookNode

from . import exercises, pair, prose
from .cells import first_line, output_text, tags
from .series import Entry, Series
from .stamp import header_text, setup_text

CODE_CELLS = (20, 35)
MEDIAN_LINES = 8
LONGEST_CELL = 40
LONGEST_LINE = 112  # of code: what Colab and GitHub show without a scroll bar
WORDS = (1200, 2500)
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])(?:/(?:work|farm|home|root|tmp|Users|content|opt|var|mnt|usr)/\S+|[A-Za-z]:\\\S+)")


@dataclass(frozen=True)
class Built:
    """A notebook as it is on disk, with the series it belongs to."""

    series: Series
    entry: Entry
    nb: NotebookNode
    source: str

    @property
    def code(self) -> list[NotebookNode]:
        return [cell for cell in self.nb.cells if cell.cell_type == "code"]


def problems(series: Series, entry: Entry) -> list[str]:
    """Everything that is wrong with one notebook, each a sentence that begins with its name."""
    missing = [path.name for path in (series.source(entry), series.notebook(entry)) if not path.exists()]
    if missing:
        return [f"{entry.name}: {' and '.join(missing)} missing; write the .py and run python notebooks/build.py {entry.number}"]
    built = Built(series, entry, pair.read_notebook(series.notebook(entry)), series.source(entry).read_text(encoding="utf-8"))
    return [f"{entry.name}: {problem}" for check in CHECKS for problem in check(built)]


def strays(series: Series) -> list[str]:
    """Files that look like notebooks of the series and are not listed as ready."""
    ready = {entry.name for entry in series.entries if entry.ready}
    files = sorted(path for path in series.folder.iterdir() if re.fullmatch(r"\d\d_.*\.(py|ipynb)", path.name))
    return [f"{path.name} is there, but series.toml has no ready notebook {path.stem}" for path in files if path.stem not in ready]


def the_pair_agrees(built: Built) -> Iterator[str]:
    back = pair.source_text(built.nb, built.series.folder)
    if back != built.source:
        lines = difflib.unified_diff(built.source.splitlines(), back.splitlines(), ".py", ".ipynb converted back", lineterm="", n=0)
        yield f"the pair has drifted; run python notebooks/build.py {built.entry.number}\n" + "\n".join(list(lines)[:20])


def the_stamps_are_current(built: Built) -> Iterator[str]:
    for tag, text, what in (("header", header_text(built.series, built.entry), "first"), ("setup", setup_text(built.series, built.entry), None)):
        cells = [cell for cell in built.nb.cells if tag in tags(cell)]
        if [cell.source for cell in cells] != [text] or what and built.nb.cells[0] is not cells[0]:
            yield f"the {tag} cell is not what series.toml and pyproject.toml say; run python notebooks/build.py {built.entry.number}"


def every_code_cell_ran_in_order(built: Built) -> Iterator[str]:
    for number, cell in enumerate(built.code, start=1):
        if cell.execution_count != number:
            yield f"code cell {number} has the execution count {cell.execution_count}, not {number}: {first_line(cell)}"


def no_state_is_kept(built: Built) -> Iterator[str]:
    if set(built.nb.metadata) - {"kernelspec", "language_info"} or set(built.nb.metadata.get("language_info", ())) - {"name"}:
        yield f"its metadata holds more than kernel and language: {', '.join(sorted(built.nb.metadata))}"
    for cell in built.nb.cells:
        extra = set(cell.metadata) - {"tags", *pair.COLLAPSED}
        if extra:
            yield f"the metadata of a cell holds {', '.join(sorted(extra))}: {first_line(cell)}"


def cells_raise_where_they_say_so(built: Built) -> Iterator[str]:
    for cell in built.code:
        said = "raises-exception" in tags(cell)
        raised = any(output.output_type == "error" for output in cell.outputs)
        if said and not raised:
            yield f"a cell tagged raises-exception holds no error: {first_line(cell)}"
        if raised and not said:
            yield f"a cell holds an error and is not tagged raises-exception: {first_line(cell)}"


def outputs_are_fit_for_others(built: Built) -> Iterator[str]:
    for cell in built.code:
        if any(output.output_type == "stream" and output.name == "stderr" for output in cell.outputs):
            yield f"a cell wrote to stderr: {first_line(cell)}"
        for output in cell.outputs:
            text = output_text(output)
            here = f"(?:{re.escape(str(built.series.folder.parent))}|{re.escape(sys.prefix)})\\S*"
            path = MACHINE_PATH.search(text) or re.search(here, text)
            if path:
                yield f"an output names a path of one machine, {path.group()}: {first_line(cell)}"


def lengths_are_within_budget(built: Built) -> Iterator[str]:
    lengths = [sum(1 for line in cell.source.splitlines() if line.strip()) for cell in built.code]
    if not CODE_CELLS[0] <= len(lengths) <= CODE_CELLS[1]:
        yield f"{len(lengths)} code cells; {CODE_CELLS[0]} to {CODE_CELLS[1]} are wanted"
    if lengths and statistics.median(lengths) > MEDIAN_LINES:
        yield f"a median of {statistics.median(lengths):g} lines a code cell; at most {MEDIAN_LINES} are wanted"
    for cell, length in zip(built.code, lengths):
        if length > LONGEST_CELL:
            yield f"a code cell of {length} lines, the limit is {LONGEST_CELL}: {first_line(cell)}"
        for line in cell.source.splitlines():
            if len(line) > LONGEST_LINE:
                yield f"a line of code of {len(line)} characters, the limit is {LONGEST_LINE}: {line.strip()[:60]}"
    words = prose.words(built.nb)
    if not WORDS[0] <= words <= WORDS[1]:
        yield f"{words} words of prose; {WORDS[0]} to {WORDS[1]} are wanted"


def links_lead_somewhere(built: Built) -> Iterator[str]:
    for target in prose.links(built.nb):
        path, _, anchor = unquote(target).partition("#")
        file = (built.series.folder / path).resolve() if path else built.series.notebook(built.entry)
        if not file.is_relative_to(built.series.folder.parent):
            yield f"the link {target} leaves the repository"
        elif not file.exists():
            yield f"the link {target} leads to no file"
        elif anchor and file.suffix == ".ipynb" and anchor not in prose.anchors(pair.read_notebook(file)):
            yield f"the link {target} leads to no heading; there are {', '.join(sorted(prose.anchors(pair.read_notebook(file))))}"


def exercises_are_whole(built: Built) -> Iterator[str]:
    yield from exercises.problems(built.nb.cells)


CHECKS = (the_pair_agrees, the_stamps_are_current, every_code_cell_ran_in_order, no_state_is_kept, cells_raise_where_they_say_so,
          outputs_are_fit_for_others, lengths_are_within_budget, links_lead_somewhere, exercises_are_whole)
