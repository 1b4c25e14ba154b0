"""Copies of the series for others: learner notebooks without solutions, solution notebooks, and pages that need no network.
Owns what each copy leaves out and where its links lead; changes nothing in the notebooks folder."""

from __future__ import annotations

import copy
import re
from pathlib import Path

from nbformat import NotebookNode

from . import checks, page, pair, prose
from .exercises import is_solution
from .series import Series
from .stamp import GITHUB

ADDRESS = re.compile(r"^(?:[a-z]+:|#)", re.IGNORECASE)


def export(series: Series, out: Path) -> list[str]:
    """Writes out/learner, out/solutions and out/html; what is wrong with the pages. Raises ValueError where a notebook fails its checks."""
    entries = [entry for entry in series.entries if entry.ready]
    wrong = [problem for entry in entries for problem in checks.problems(series, entry)]
    if wrong:
        raise ValueError("\n".join(["nothing is exported while a check fails:", *wrong]))
    for folder in ("learner", "solutions", "html"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    found = []
    for entry in entries:
        nb = pair.read_notebook(series.notebook(entry))
        pair.write(out / "learner" / f"{entry.name}.ipynb", pair.notebook_text(learner_copy(nb, series)))
        pair.write(out / "solutions" / f"{entry.name}.ipynb", pair.notebook_text(with_links(nb, series, ".ipynb")))
        text = page.notebook_page(with_links(nb, series, ".html"), series, entry)
        found += [f"{entry.name}.html: {problem}" for problem in page.network_references(text) + unshown_math(nb)]
        pair.write(out / "html" / f"{entry.name}.html", text)
    pair.write(out / "html" / "index.html", page.index_page(series))
    print(f"{len(entries)} notebooks written to {out}: learner, solutions, html")
    return found


def learner_copy(nb: NotebookNode, series: Series) -> NotebookNode:
    """Without solution cells and without outputs: what a learner fills in and runs."""
    nb = with_links(nb, series, ".ipynb")
    nb.cells = [cell for cell in nb.cells if not is_solution(cell)]
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nb


def with_links(nb: NotebookNode, series: Series, suffix: str) -> NotebookNode:
    """A copy whose links work outside the repository: to the other copies, else to the file at its tag."""
    nb = copy.deepcopy(nb)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            for target in sorted(prose.targets(cell.source), key=len, reverse=True):
                cell.source = re.sub(rf"""(?<=[("'<]){re.escape(target)}(?=[)\s"'>])""", moved(target, series, suffix), cell.source)
    return nb


def moved(target: str, series: Series, suffix: str) -> str:
    path, hash_, anchor = target.partition("#")
    if ADDRESS.match(target):
        return target
    if "/" not in path and path.endswith(".ipynb"):
        return path.removesuffix(".ipynb") + suffix + hash_ + anchor
    file = (series.folder / path).resolve().relative_to(series.folder.parent)
    return f"{GITHUB}/{series.repository}/blob/{series.tag}/{file.as_posix()}{hash_}{anchor}"


def unshown_math(nb: NotebookNode) -> list[str]:
    """TeX between dollar signs: it is typeset by a script from the network, so that an offline page would show its source."""
    texts = [prose.CODE.sub("", text) for text in prose.markdown(nb)]
    found = [match for text in texts for match in re.findall(r"\$\$?[^$\n]+\$\$?", text)]
    return [f"TeX does not show offline, write it in words or code: {match}" for match in found]
