"""The ladder: one figure that grows from notebook to notebook, tokens a second and bytes a token, from naive to now.

Its rungs stand in ladder.json, measured when the notebooks were built, all on one machine; a notebook adds what it just measured.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.teach import sketch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = Path(__file__).with_name("ladder.json")
#: When this variable is set, `show` saves its rung: the build of the notebooks does so.
SAVE = "MINIVLLM_SAVE_LADDER"
NAMES = {"00": "the finished engine, 8 at once", "01": "naive: everything recomputed", "02": "KV cache, one at a time",
         "04": "block table, one at a time", "06": "continuous batching, 8 at once"}


def rungs() -> dict[str, dict[str, Any]]:
    """What was measured when the notebooks were built: notebook number -> tokens_per_second, bytes_per_token, device."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def show(notebook: str, tokens_per_second: float, bytes_per_token: float, device: str = "cpu") -> Figure:
    """The ladder up to `notebook`, whose rung is the one measured here and now. Notebook 00 stands last: it is where the way leads."""
    if notebook not in NAMES:
        raise ValueError(f"no rung for notebook {notebook!r}: there are {', '.join(NAMES)}")
    here = {"tokens_per_second": round(tokens_per_second, 2), "bytes_per_token": round(bytes_per_token), "device": device}
    if os.environ.get(SAVE):
        FILE.write_text(json.dumps(dict(sorted({**rungs(), notebook: here}.items())), indent=1) + "\n")
    known = {**rungs(), notebook: here}
    climbed = [number for number in sorted(known) if number != "00" and number <= max(notebook, "01")]
    return _draw([*climbed, *(["00"] if "00" in known else [])], known, notebook)


def _draw(numbers: list[str], known: dict[str, dict[str, Any]], notebook: str) -> Figure:
    drawn = sketch.figure(10, 0.9 + 0.55 * len(numbers))
    speed, moved = drawn.subplots(1, 2, sharey=True)
    labels = [f"{number}  {NAMES[number]}" for number in numbers]
    for axis, key, unit, scale in ((speed, "tokens_per_second", "tokens a second", 1), (moved, "bytes_per_token", "MB read for each token", 1e6)):
        values = [known[number][key] / scale for number in numbers]
        bars = axis.barh(labels, values, color=["#0072B2" if number == notebook else "#B8C4CE" for number in numbers])
        axis.bar_label(bars, [f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in values], padding=4, fontsize=12)
        axis.set_title(unit, fontsize=13, loc="left")
        axis.set_xlim(0, 1.25 * max(values))
        axis.set_xticks([])
        axis.spines[:].set_visible(False)
        axis.tick_params(left=False, labelsize=12)
    speed.invert_yaxis()
    return drawn
