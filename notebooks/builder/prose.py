"""What is in the markdown of a notebook: its words, its headings, where its links point. Owns the reading of markdown; judges nothing."""

from __future__ import annotations

import re

from nbformat import NotebookNode

from .cells import tags

FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
IMAGE = re.compile(r"!\[[^\[\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
LINK = re.compile(r"\[[^\[\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HTML_LINK = re.compile(r"""<(?:a|img)\b[^>]*?\b(?:href|src)\s*=\s*["']([^"']+)["']""", re.IGNORECASE)
ANCHOR = re.compile(r"""<[^>]+\b(?:id|name)\s*=\s*["']([^"']+)["']""", re.IGNORECASE)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def markdown(nb: NotebookNode, header: bool = True) -> list[str]:
    """The markdown cells without their fenced code; without the stamped header unless it is asked for."""
    cells = [cell for cell in nb.cells if cell.cell_type == "markdown" and (header or "header" not in tags(cell))]
    return [FENCE.sub("", cell.source) for cell in cells]


def words(nb: NotebookNode) -> int:
    """Words a reader reads: no fenced code, no HTML tags, no targets of links, no stamped header."""
    text = "\n".join(markdown(nb, header=False))
    text = re.sub(r"\]\([^)]*\)", "] ", re.sub(r"<svg\b.*?</svg>|<[^>\n]+>", " ", text, flags=re.DOTALL))
    return sum(1 for word in text.split() if re.search(r"\w", word))


def targets(text: str) -> list[str]:
    """Where the links and images of one markdown text point, in order. A badge is an image inside a link: both are found."""
    plain = CODE.sub("code", FENCE.sub("", text))
    images = [match.group(1) for match in IMAGE.finditer(plain)]
    return [*images, *LINK.findall(IMAGE.sub("image", plain)), *HTML_LINK.findall(plain)]


def links(nb: NotebookNode) -> list[str]:
    """Every target in the notebook once; addresses with a scheme (https:, mailto:, data:) are left out."""
    found = dict.fromkeys(target for cell in nb.cells if cell.cell_type == "markdown" for target in targets(cell.source))
    return [target for target in found if not ADDRESS.match(target)]


def anchors(nb: NotebookNode) -> set[str]:
    """What `#...` can point at: headings as JupyterLab and nbconvert name them, and ids in HTML."""
    found = set()
    for text in markdown(nb):
        for heading in HEADING.findall(text):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            found.add(re.sub(r"[`*]", "", plain).replace(" ", "-"))
        found.update(ANCHOR.findall(text))
    return found
