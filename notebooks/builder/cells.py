"""Small questions to one cell: its tags, its first line, what it shows. Changes nothing."""

from __future__ import annotations

import re

from nbformat import NotebookNode


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def shown(cell: NotebookNode) -> str:
    return "\n".join(output_text(output) for output in cell.get("outputs", []))


def output_text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join([output.ename, output.evalue, *output.traceback]))
    return "\n".join(text for kind, text in output.data.items() if isinstance(text, str) and kind not in ("image/png", "image/jpeg"))


def first_line(cell: NotebookNode) -> str:
    return cell.source.strip().split("\n")[0]
