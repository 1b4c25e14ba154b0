"""View: what all live views have in common. Where the events come from, which step is shown, and as what.

A view turns the frame of a step into a Scene (`draw`); everything else follows from that: the widget that moves while the engine
runs, the figure for readers on GitHub, the step player for a page and the animation. A view looks and never touches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from minivllm.engine.engine import Engine
from minivllm.engine.events import Trace
from minivllm.teach.views.history import Frame, History
from minivllm.teach.views.live import Pacer, at_the_end_of_cells
from minivllm.teach.views.scene import Scene
from minivllm.teach.views.stepped import Stepped


class View(Stepped):
    """source: an LLM or an Engine, to watch it live (a trace is started if none runs), or a Trace, to look back.

    decode: token ids to text, for what blocks hold; an LLM and an Engine bring their own. Close a view to take it off its engine.
    """

    def __init__(self, source: Any, decode: Callable[[list[int]], str] | None = None, clock: Callable[[], float] = time.perf_counter):
        self.llm, self.engine, trace = _resolve(source)
        self.trace: Trace = trace
        self.history = History(trace)
        self.decode = decode or (self.engine.decode if self.engine else None)
        self._pacer: Pacer | None = None
        self._end_cells: Callable[[], None] = lambda: None
        if self.engine is not None:
            self._pacer = Pacer.of(self.engine, clock)
            self._pacer.views.append(self)
            self._end_cells = at_the_end_of_cells(self._after_cell)

    @property
    def source(self) -> Trace:
        return self.trace

    def draw(self, frame: Frame) -> Scene:
        """The picture of one frame. All that a kind of view must bring."""
        raise NotImplementedError

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step that can be shown."""
        self._follow()
        self.history.read()
        return self.history.first, self.history.last

    def scene(self, step: int | None = None) -> Scene:
        """The picture after `step`, by default the last. Raises ValueError for a step that was not recorded."""
        self._follow()
        return self.draw(self.history.frame(step))

    def close(self) -> None:
        """Leave the engine alone. The view still shows what it has seen. Safe to call twice."""
        if self._pacer is not None:
            self.refresh()
            self._pacer.remove(self)
            self._end_cells()
            self._pacer = None

    def window_start(self, step: int, window: int) -> int:
        """The first of at most `window` steps to show up to `step`. It moves in jumps, so that the picture stands still in between."""
        jump, earliest = max(1, window // 6), step - window + 1
        return self.history.first if earliest <= self.history.first else min(step, -(-earliest // jump) * jump)

    def text(self, token_ids: list[int | None]) -> str:
        """Tokens as text on one line; "" without a tokenizer."""
        if self.decode is None or None in token_ids:
            return ""
        return re.sub(r"\s+", " ", self.decode(list(token_ids)))

    def tip(self, frame: Frame, block: int) -> str:
        """What block `block` holds, for a pointer over it."""
        if block not in frame.content or not frame.written[block]:
            return f"block {block}: " + ("nothing written yet" if frame.pool.owners[block] else "free")
        seq_id, first = frame.content[block]
        last = first + frame.written[block] - 1
        held = f"positions {first} to {last} of {self.history.name(seq_id)}, {frame.written[block]} of {frame.block_size} slots written"
        owners = ", ".join(self.history.name(owner) for owner in frame.pool.owners[block])
        whose = f"used by {owners}" if owners else "free, but can be found"
        text = self.text(self.history.sequences[seq_id].token_ids[first:last + 1])
        return f"block {block}: {held}; {whose}" + (f"; text: {text[:80]}" if text else "")

    def _follow(self) -> None:
        """A trace started anew takes the old one's place."""
        if self._pacer is not None and (trace := self.engine.scheduler.trace) is not None and trace is not self.trace:
            self.trace, self.history = trace, History(trace)

    def _after_cell(self, *_: Any) -> None:
        if self._pacer is not None:
            self._pacer.catch_up()



def _resolve(source: Any) -> tuple[Any, Engine | None, Trace]:
    """(LLM, Engine, Trace) of what a view was given; what there is not is None."""
    if isinstance(source, Trace):
        return None, None, source
    engine = source if isinstance(source, Engine) else getattr(source, "engine", None)
    if not isinstance(engine, Engine):
        raise TypeError(f"a view shows an LLM, an Engine or a Trace, got {source!r:.80}")
    return (None if engine is source else source), engine, engine.scheduler.trace or engine.scheduler.start_trace()
