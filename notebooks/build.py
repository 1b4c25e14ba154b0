"""Builds, checks and exports the notebooks. NN_topic.py (py:percent) is the source, NN_topic.ipynb its executed pair.

    python notebooks/build.py                build every notebook that is ready: stamp header and setup cell, run, write the .ipynb
    python notebooks/build.py 01 02          build these
    python notebooks/build.py check [01 ..]  check without running: the pair agrees, everything ran, lengths, links, exercises
    python notebooks/build.py export OUT     write OUT/learner, OUT/solutions and OUT/html (pages that need no network)

Needs the packages of the extra "test". Exits with 1, and says why, when a notebook is refused or a check fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from builder import checks, execute, export, pair, stamp
from builder.series import Entry, Series


def build(series: Series, entry: Entry) -> list[str]:
    """Stamps the .py, runs it and writes the .ipynb; what is still wrong. Raises Refused, no .ipynb written."""
    source = series.source(entry)
    nb = pair.read_source(source)
    stamp.stamp(nb, series, entry)
    nb = pair.prepare(nb)
    pair.write(source, pair.source_text(nb, series.folder))
    execute.execute(nb, series.folder)
    pair.write(series.notebook(entry), pair.notebook_text(nb))
    return checks.problems(series, entry)


def build_all(series: Series, entries: list[Entry]) -> list[str]:
    found = []
    for entry in entries:
        begin = time.perf_counter()
        try:
            wrong = build(series, entry)
            word = "built"
        except execute.Refused as reason:
            wrong = [f"{entry.name}: {reason}"]
            word = "refused, the .ipynb is as it was"
        print(f"{entry.name}: {word} ({time.perf_counter() - begin:.1f} s)", flush=True)
        found += wrong
    return found


def check(series: Series, entries: list[Entry]) -> list[str]:
    found = checks.strays(series) + [problem for entry in entries for problem in checks.problems(series, entry)]
    if not found:
        print(f"{len(entries)} notebooks: every check passed")
    return found


def run(arguments: list[str], folder: Path) -> list[str]:
    """Does what the command line says; the problems that were found."""
    series = Series.load(folder)
    if arguments[:1] == ["check"]:
        return check(series, series.select(arguments[1:]))
    if arguments[:1] == ["export"]:
        if len(arguments) != 2:
            raise ValueError("export needs one folder: python notebooks/build.py export OUT")
        return export.export(series, Path(arguments[1]))
    return build_all(series, series.select(arguments))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", help="names of notebooks, or check, or export OUT")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="where the notebooks are (default: beside this file)")
    given = parser.parse_args()
    try:
        found = run(given.arguments, given.folder)
    except (ValueError, FileNotFoundError) as error:
        found = [str(error)]
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
