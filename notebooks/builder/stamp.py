"""The two cells that are the same in every notebook: the header (tag `header`) and the setup cell (tag `setup`).
Owns their text, and writes them into a notebook; the text comes from series.toml and pyproject.toml."""

from __future__ import annotations

import re

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from .cells import tags
from .series import Entry, Series

COLAB = "https://colab.research.google.com"
GITHUB = "https://github.com"
KAGGLE = "https://kaggle.com"
BADGE = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]"
KAGGLE_BADGE = f"[![Open in Kaggle]({KAGGLE}/static/images/open-in-kaggle.svg)]"

HEADER = """\
# {heading}

{badge}({address}){more}

{topic}

Previous: {before} · Next: {after} · {minutes} minutes with the exercises · runs {runs}"""

#: How a notebook's setup cell begins; and how, if it is to run on Kaggle too, which says in the environment that it is Kaggle.
IN_COLAB = """\
import importlib, subprocess
from importlib.util import find_spec

if find_spec("google") and find_spec("google.colab") and not find_spec("minivllm"):  # a fresh Colab
"""
IN_EITHER = """\
import importlib, os, subprocess
from importlib.util import find_spec

kaggle, colab = "KAGGLE_KERNEL_RUN_TYPE" in os.environ, find_spec("google") and find_spec("google.colab")
if (kaggle or colab) and not find_spec("minivllm"):  # a fresh Kaggle or Colab
"""
SETUP = """\
    clone = "git clone -q --depth 1 -b {tag} {github}/{repository} minivllm-source"
    command = f"(test -d minivllm-source || {{clone}}) && bash minivllm-source/colab_setup.sh"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    print(done.stdout)
    if done.returncode:
        raise RuntimeError(f"minivllm could not be set up: {{done.stderr.strip() or 'no reason given'}}")
    importlib.invalidate_caches()
from minivllm.teach import notebook
notebook.where()"""


def link(series: Series, entry: Entry | None, none: str) -> str:
    """Links where the notebook is there, its name where it is still planned. Colab cannot follow a relative one."""
    if entry is None:
        return none
    if not entry.ready:
        return f"{entry.heading} (planned)"
    return f"[{entry.heading}]({entry.name}.ipynb) ([in Colab]({colab_address(series, entry)}))"


def colab_address(series: Series, entry: Entry) -> str:
    return f"{COLAB}/github/{series.repository}/blob/{series.tag}/notebooks/{entry.name}.ipynb"


def kaggle_address(series: Series, entry: Entry) -> str:
    return f"{KAGGLE}/kernels/welcome?src={GITHUB}/{series.repository}/blob/{series.tag}/notebooks/{entry.name}.ipynb"


def header_text(series: Series, entry: Entry) -> str:
    before, after = series.neighbours(entry)
    more = f"\n{KAGGLE_BADGE}({kaggle_address(series, entry)})" if entry.kaggle else ""
    return HEADER.format(heading=entry.heading, badge=BADGE, address=colab_address(series, entry), more=more, topic=entry.topic,
                         before=link(series, before, "none, this is the first"), after=link(series, after, "none, this is the last"),
                         minutes=entry.minutes, runs=series.runs)


def setup_text(series: Series, entry: Entry | None = None) -> str:
    begin = IN_EITHER if entry is not None and entry.kaggle else IN_COLAB
    return begin + SETUP.format(tag=series.tag, repository=series.repository, github=GITHUB)


def stamp(nb: NotebookNode, series: Series, entry: Entry) -> None:
    """Sets both cells, in place: those with the tags, or new ones (the header first, setup before the first code cell)."""
    header = next((cell for cell in nb.cells if "header" in tags(cell)), None)
    if header is None:
        if nb.cells and re.fullmatch(rf"# {entry.number}\b.*", nb.cells[0].source):  # a title that stands alone gives way
            del nb.cells[0]
        header = new_markdown_cell(metadata={"tags": ["header"]})
        nb.cells.insert(0, header)
    header.source = header_text(series, entry)
    setup = next((cell for cell in nb.cells if "setup" in tags(cell)), None)
    if setup is None:
        setup = new_code_cell(metadata={"tags": ["setup"]})
        first = next((at for at, cell in enumerate(nb.cells) if cell.cell_type == "code"), len(nb.cells))
        nb.cells.insert(first, setup)
    setup.source = setup_text(series, entry)
