"""Stepped: something with steps, each of which can be drawn. How it is shown follows from that: as a widget, a figure, a step player."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minivllm.teach.views.live import Panel
from minivllm.teach.views.scene import Scene
from minivllm.teach.views.svg import animation, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minivllm.teach.views.player import Page


class Stepped:
    """Give `steps` and `scene`; everything else is here. `source` changes when the steps are those of something else than before."""

    source: Any = None
    _panel: Panel | None = None

    @property
    def name(self) -> str:
        """One line, the same in every run."""
        return type(self).__name__

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step that can be shown."""
        raise NotImplementedError

    def scene(self, step: int | None = None) -> Scene:
        """The picture after `step`, by default the last. Raises ValueError for a step that is not there."""
        raise NotImplementedError

    def svg(self, step: int | None = None) -> str:
        return svg(self.scene(step))

    def figure(self, step: int | None = None, steps: Iterable[int] | None = None, columns: int = 1) -> Figure:
        """A matplotlib Figure of `step`, by default the last; or of several `steps`, in rows of `columns`."""
        from minivllm.teach.views import figures

        if step is not None and steps is not None:
            raise ValueError(f"give step={step} or steps, not both")
        return figures.figure([self.scene(number) for number in (steps if steps is not None else [step])], columns)

    def html(self, steps: Iterable[int] | None = None, max_steps: int = 120) -> Page:
        """A step player that needs no kernel and no network: a string that a notebook shows as what it is.

        steps: by default all; of more than `max_steps` the last ones.
        """
        from minivllm.teach.views import player

        return player.page([(number, self.scene(number)) for number in self._chosen(steps, max_steps)])

    def animation(self, steps: Iterable[int] | None = None, seconds_per_step: float = 1.0) -> str:
        """The text of an SVG file that shows these steps in a loop, without a script."""
        return animation([self.scene(number) for number in self._chosen(steps, 60)], seconds_per_step)

    def refresh(self) -> None:
        """Draw what is shown again, if it is shown. The engine's pacer calls it while the engine runs."""
        if self._panel is not None:
            self._panel.refresh()

    def _chosen(self, steps: Iterable[int] | None, most: int) -> list[int]:
        if steps is not None:
            chosen = list(steps)
            if not chosen:
                raise ValueError("steps is empty: give at least one step, or leave it out for all")
            return chosen
        first, last = self.steps
        return list(range(max(first, last - most + 1), last + 1))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widget, where ipywidgets is there; else the newest step as it is now."""
        try:
            self._panel = self._panel or Panel(self)
        except ImportError:
            return {"text/plain": self.name, "text/html": self.svg()}
        self._panel.refresh()
        shown = {"version_major": 2, "version_minor": 0, "model_id": self._panel.root.model_id}
        return {"text/plain": self.name, "application/vnd.jupyter.widget-view+json": shown}

    def __repr__(self) -> str:
        return self.name
