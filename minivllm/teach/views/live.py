"""What makes a view live: when it is drawn again, and the widgets that show it. Knows no view's drawing.

Pacer: one for each engine, so that all its views together stay within the budget. Panel: the picture, a slider and a play button.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minivllm.teach.views.svg import svg

if TYPE_CHECKING:
    from minivllm.engine.engine import Engine
    from minivllm.teach.views.stepped import Stepped
    from minivllm.teach.views.view import View

_SHORTEST = 0.1   # seconds from the end of a redraw to the next: at most ten a second
_RATIO = 19       # a redraw that took t is followed by 19 t without one: at most 5% of the time


class Pacer:
    """An observer of `engine` that redraws `views`, seldom enough. Its call between two redraws reads the clock and returns."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter):
        self.engine, self.clock = engine, clock
        self.views: list[View] = []
        self.next_time = 0.0
        self.num_events = 0  # that were there at the last redraw

    @classmethod
    def of(cls, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> Pacer:
        """The engine's pacer; a new one if it has none."""
        for observer in engine.observers:
            if isinstance(observer, Pacer):
                return observer
        pacer = cls(engine, clock)
        engine.observers.append(pacer)
        return pacer

    def __call__(self) -> None:
        if self.clock() < self.next_time and self.engine.scheduler.sequences:
            return
        self.redraw()

    def redraw(self) -> None:
        begin, trace = self.clock(), self.engine.scheduler.trace
        self.num_events = len(trace.events) if trace else 0
        for view in tuple(self.views):
            try:
                view.refresh()
            except Exception as error:
                self.remove(view)
                warnings.warn(f"{view.name} was detached from the engine because it failed: {error!r}", stacklevel=4)
        end = self.clock()
        self.next_time = end + max(_SHORTEST, _RATIO * (end - begin))

    def catch_up(self, *_: Any) -> None:
        """At the end of a notebook's cell: draw what the last redraw came too early for, or what an interrupt left."""
        trace = self.engine.scheduler.trace
        if trace is not None and len(trace.events) != self.num_events:
            self.redraw()

    def remove(self, view: View) -> None:
        if view in self.views:
            self.views.remove(view)
        if not self.views and self in self.engine.observers:
            self.engine.observers.remove(self)


class Panel:
    """The widgets of one view, made with what ipywidgets 7 and 8 both have. Raises ImportError without ipywidgets."""

    def __init__(self, view: Stepped):
        import ipywidgets as widgets

        self.view = view
        first, last = view.steps
        self.picture = widgets.HTML(value=self._draw(last))
        self.slider = widgets.IntSlider(value=last, min=first, max=max(first, last), description="step", continuous_update=True,
                                        layout=widgets.Layout(width="480px"))
        self.play = widgets.Play(value=last, min=first, max=max(first, last), interval=500)
        self.play_link = widgets.jslink((self.play, "value"), (self.slider, "value"))
        self.slider.observe(self._moved, names="value")
        self.root = widgets.VBox([self.picture, widgets.HBox([self.play, self.slider])])
        self._moving, self._source = False, view.source

    def refresh(self) -> None:
        """Show the newest step if the slider stands at its end; else leave the picture and make the slider longer."""
        first, last = self.view.steps
        follows, self._moving = self.slider.value >= self.slider.max or self.view.source is not self._source, True
        self._source = self.view.source
        try:
            for control in (self.slider, self.play):
                control.min = min(control.min, first)  # never above max, which widgets refuse
                control.max = last
                control.min = first
            if follows:
                self.picture.value = self._draw(last)
                self.slider.value = self.play.value = last
        finally:
            self._moving = False

    def _moved(self, change: Any) -> None:
        if not self._moving:
            first, last = self.view.steps
            self.picture.value = self._draw(min(max(change["new"], first), last))

    def _draw(self, step: int) -> str:
        return svg(self.view.scene(step), f"mv{id(self.view):x}")


def at_the_end_of_cells(callback: Callable[..., None]) -> Callable[[], None]:
    """Call `callback` after every cell, where there are cells; returns what ends that."""
    try:
        from IPython import get_ipython
    except ImportError:
        return lambda: None
    shell = get_ipython()
    if shell is None:
        return lambda: None
    shell.events.register("post_run_cell", callback)

    def stop() -> None:
        if callback in shell.events.callbacks["post_run_cell"]:
            shell.events.unregister("post_run_cell", callback)

    return stop
