"""The two files of a notebook. Owns the conversion between them (jupytext.toml says how), what the .ipynb keeps, and how it is written:
the same cells give the same bytes."""

from __future__ import annotations

import os
from pathlib import Path

import jupytext
import nbformat
from jupytext.config import load_jupytext_configuration_file
from nbformat import NotebookNode

from .cells import tags
from .exercises import is_solution

PERCENT = "py:percent"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}
#: How a solution is collapsed: in JupyterLab, and in Colab.
COLLAPSED = {"jupyter": {"source_hidden": True}, "cellView": "form"}


def configuration(folder: Path):
    return load_jupytext_configuration_file(str(folder / "jupytext.toml"))


def read_source(path: Path) -> NotebookNode:
    """The .py as a notebook, with numbered cell ids (jupytext's are drawn at random)."""
    nb = jupytext.reads(path.read_text(encoding="utf-8"), fmt=PERCENT, config=configuration(path.parent))
    return prepare(nb)


def prepare(nb: NotebookNode) -> NotebookNode:
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.metadata = nbformat.from_dict(METADATA)
    for at, cell in enumerate(nb.cells):
        cell.id = f"cell-{at:02d}"
        cell.metadata = nbformat.from_dict({"tags": tags(cell)} if tags(cell) else {})
        if is_solution(cell):
            cell.metadata.update(nbformat.from_dict(COLLAPSED))
    return nb


def source_text(nb: NotebookNode, folder: Path) -> str:
    """The notebook as py:percent: what the .py has to be."""
    return jupytext.writes(nb, fmt=PERCENT, config=configuration(folder))


def read_notebook(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def notebook_text(nb: NotebookNode) -> str:
    nbformat.validate(nb)
    return nbformat.writes(nb, version=4) + "\n"


def write(path: Path, text: str) -> bool:
    """Writes the file whole or not at all; False where it already says this."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
    return True
