"""GraphView: each step of an engine as rows computed, rows of padding, and by replay or one launch at a time. Shown in notebook 09."""

from __future__ import annotations

from typing import Any

from minivllm.teach.views.batch import BatchView, nice_top
from minivllm.teach.views.captions import count
from minivllm.teach.views.history import Frame
from minivllm.teach.views.scene import WIDTH, Box, Label, Scene, add_heading, fitting_size, swatches

_LEFT, _TOP, _HEIGHT = 62, 86, 180


class GraphView(BatchView):
    """The last `window` steps of an LLM, an Engine or a Trace that decodes by graphs of `sizes` (ascending)."""

    def __init__(self, source: Any, sizes: list[int], window: int = 60, **options: Any):
        if not sizes or sorted(sizes) != list(sizes):
            raise ValueError(f"sizes must be a list of graph sizes in ascending order, got {sizes!r:.60}")
        super().__init__(source, window, **options)
        self.sizes = list(sizes)

    @property
    def name(self) -> str:
        return "GraphView: rows, padding, replay or eager"

    def size_of(self, step: int) -> int:
        """The rows of the graph that serves `step`; 0 for a step that none serves: it computes a prompt, or too many rows."""
        prefill, decode = self.history.batch.get(step, (0, 0))
        return 0 if prefill or not decode else next((size for size in self.sizes if size >= decode), 0)

    def padded_share(self) -> float:
        """Rows of padding among all rows that replays computed."""
        first, last = self.steps
        sizes = {step: self.size_of(step) for step in range(first, last + 1)}
        rows = sum(self.history.batch[step][1] for step, size in sizes.items() if size)
        return 1 - rows / max(1, sum(sizes.values()))

    def draw(self, frame: Frame) -> Scene:
        first = self.window_start(frame.step, self.window)
        steps = [step for step in range(first, frame.step + 1) if step in self.history.batch]
        top = nice_top(self.sizes[-1])  # a prompt's bar is cut there: it would leave no room for the others
        words = self._told(frame.step)
        scene = Scene(WIDTH, _TOP + _HEIGHT + 74, alt=f"Step {frame.step}. {words}")
        add_heading(scene, f"Step {frame.step}", "", [words])
        self._axis(scene, top)
        shown = min(self.window, self.history.last - self.history.first + 1)
        pitch = max(13, min(40, (WIDTH - _LEFT) // max(1, shown)))
        for step in steps:
            self._column(scene, frame.step, step, _LEFT + (step - first) * pitch, pitch, top)
        scene.place(swatches([(Box(0, 0, 26, 20, "s0", "hatch"), "eager: tokens (cut at the top)"),
                              (Box(0, 0, 26, 20, "s1"), "replay: rows of sequences"),
                              (Box(0, 0, 26, 20, None, "cross", "dashed"), "replay: rows of padding"),
                              (Box(0, 0, 26, 20, None, None, "thick"), "this step")]), 0, _TOP + _HEIGHT + 44)
        return scene

    def _told(self, step: int) -> str:
        prefill, decode = self.history.batch.get(step, (0, 0))
        if not prefill + decode:
            return "Nothing has run yet."
        size = self.size_of(step)
        if not size:
            why = "it computes a prompt" if prefill else f"no graph has {decode} rows"
            return f"Eager, {count(prefill + decode, 'token')}: {why}."
        return f"Replay of the graph of {count(size, 'row')}: {count(decode, 'sequence')}, {size - decode} padding."

    def _column(self, scene: Scene, now: int, step: int, x: float, pitch: int, top: int) -> None:
        width, bottom, unit = pitch - (4 if pitch > 20 else 2), _TOP + _HEIGHT, _HEIGHT / top
        (prefill, decode), size = self.history.batch[step], self.size_of(step)
        total = prefill + decode
        height = min(max(total, size), top) * unit
        tip = f"step {step}: {self._told(step)}"
        own = min(total, top) * unit
        scene.add(Box(x, bottom - own, width, own, *(("s1",) if size else ("s0", "hatch")), tip=tip))
        if size > decode:
            scene.add(Box(x, bottom - size * unit, width, (size - decode) * unit, None, "cross", "dashed", tip=tip))
        if step == now:
            scene.add(Box(x, bottom - height, width, height, None, None, "thick"))
        label = str(total) if not size or size == decode else f"{decode}+{size - decode}"
        if text_size := fitting_size(label, pitch - 1, (13, 11, 10, 9), False):
            scene.add(Label(x + width / 2, bottom - height - 5, label, text_size, "middle"))
        every = next(n for n in (1, 2, 5, 10, 20) if n * pitch >= 34)
        if step % every == 0:
            scene.add(Label(x + width / 2, bottom + 22, str(step), 13, "middle", quiet=True))
