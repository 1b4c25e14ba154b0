"""The exercises of a notebook: statement, stub, check and solution cells, valid unsolved. Owns their tags; runs nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbformat import NotebookNode

from .cells import shown, tags

WANTED = (2, 3)
PARTS = ("statement", "stub", "check", "solution")
TAG = re.compile(r"exercise-(\d+)-(statement|stub|check|solution|plug)")
NOT_ATTEMPTED = "not attempted yet"
#: What a check prints for a right answer: of a function, and of an input that exposes a planted fault.
PASSED = re.compile(r"^(?:\d+ checks? passed|exposed:)", re.MULTILINE)
#: What a stub leaves open: a function raises, an input is None.
OPEN = re.compile(r"\bNotImplementedError\b|\bNone\b")


def is_solution(cell: NotebookNode) -> bool:
    return any((match := TAG.fullmatch(tag)) and match[2] == "solution" for tag in tags(cell))


def problems(cells: list[NotebookNode]) -> Iterator[str]:
    """Sentences about every exercise of a notebook that is not whole, in order and unsolved."""
    found: dict[str, dict[str, NotebookNode]] = {}
    for cell in cells:
        for tag in tags(cell):
            if tag.startswith("exercise-") and not TAG.fullmatch(tag):
                yield f"the tag {tag} is none of exercise-N-{{{', '.join(PARTS)}, plug}}"
            elif match := TAG.fullmatch(tag):
                parts = found.setdefault(match[1], {})
                if match[2] in parts:
                    yield f"exercise {match[1]} has two cells tagged {tag}"
                parts[match[2]] = cell
    if not WANTED[0] <= len(found) <= WANTED[1]:
        yield f"{len(found)} exercises; {WANTED[0]} to {WANTED[1]} are wanted"
    for number, parts in found.items():
        yield from (f"exercise {number} {problem}" for problem in wrong(parts, cells))
    yield from uses_of_solutions(cells)


def wrong(parts: dict[str, NotebookNode], cells: list[NotebookNode]) -> Iterator[str]:
    missing = [part for part in PARTS if part not in parts]
    if missing:
        yield f"has no {' and no '.join(missing)} cell"
        return
    places = [cells.index(parts[part]) for part in PARTS]
    if places != sorted(places):
        yield f"has its cells in another order than {', '.join(PARTS)}"
    for part in PARTS:
        kind = "markdown" if part == "statement" else "code"
        if parts[part].cell_type != kind:
            yield f"has a {part} cell that is not {kind}"
            return
    if not OPEN.search(parts["stub"].source):
        yield "has a stub that neither raises NotImplementedError nor holds None"
    if NOT_ATTEMPTED not in shown(parts["check"]):
        yield f"is not unsolved: its check cell does not print {NOT_ATTEMPTED!r}"
    if not PASSED.search(shown(parts["solution"])):
        yield "has a solution cell that prints neither 'N checks passed' nor 'exposed: ...'"


def uses_of_solutions(cells: list[NotebookNode]) -> Iterator[str]:
    """A learner's copy has no solution cells: what only they define, no later cell may use."""
    defined: set[str] = set()
    only_solved: set[str] = set()
    for cell in cells:
        if cell.cell_type != "code":
            continue
        bound, used = names(cell.source)
        if is_solution(cell):
            only_solved |= bound - defined
            continue
        for name in sorted(used & only_solved - bound):
            yield f"the name {name} is used, and only a solution defines it: {cell.source.strip().splitlines()[0]}"
        defined |= bound
        only_solved -= bound


def names(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell binds, and those that it reads. Lines for IPython (%, !) are left out."""
    plain = "\n".join("" if re.match(r"\s*[%!]", line) else line for line in source.splitlines())
    bound, used = set(), set()
    for node in ast.walk(ast.parse(plain)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
    return bound, used
