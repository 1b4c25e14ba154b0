"""TimelineView: a row for each sequence, a column for each step. Who waits, who computes, who is preempted. Shown in notebook 06."""

from __future__ import annotations

from typing import Any

from minivllm.teach.views.captions import caption, count
from minivllm.teach.views.history import Frame, SequenceLog
from minivllm.teach.views.scene import WIDTH, Box, Label, Scene, add_heading, colour_of, fitting_size, swatches
from minivllm.teach.views.view import View

#: status -> fill, pattern, sign, what the legend says.
LOOKS = {
    "waiting": ("pale", "dots", "", "waits"),
    "prefill": ("s0", None, "P", "prefill (tokens)"),
    "decode": ("s1", None, "D", "decode"),
    "idle": (None, None, "–", "no token in this step"),
    "preempted": ("s4", None, "X", "preempted"),
    "finished": ("s2", None, "✓", "last step"),
}
_LEFT, _ROW = 112, 26


class TimelineView(View):
    """The last `window` steps of the newest `rows` sequences of an LLM, an Engine or a Trace."""

    def __init__(self, source: Any, window: int = 60, rows: int = 24, **options: Any):
        if window < 1 or rows < 1:
            raise ValueError(f"window and rows must be at least 1, got {window} and {rows}")
        super().__init__(source, **options)
        self.window, self.rows = window, rows

    @property
    def name(self) -> str:
        return "TimelineView: a row for each sequence, a column for each step"

    def draw(self, frame: Frame) -> Scene:
        first = self.window_start(frame.step, self.window)
        logs = self._logs(first, frame.step)
        words, room = caption(frame), min(self.rows, len(self.history.sequences))
        scene = Scene(WIDTH, 0, alt=f"Step {frame.step}. {' '.join(words)} " + ", ".join(
            f"{log.name} {frame.sequences[log.seq_id].status}" for log in logs if log.seq_id in frame.sequences))
        hidden = sum(seq.log.at(frame.step) is not None for seq in frame.sequences.values()) - len(logs)
        add_heading(scene, f"Step {frame.step}", f"and {count(hidden, 'sequence')} before these" if hidden > 0 else "", words)
        pitch = self._pitch()
        for row, log in enumerate(logs):
            self._row(scene, frame, log, first, pitch, 78 + row * _ROW)
        y = 78 + room * _ROW
        self._axis(scene, frame, first, pitch, y)
        legend = swatches((Box(0, 0, 24, 20, fill, pattern, text=sign), meaning) for fill, pattern, sign, meaning in LOOKS.values())
        scene.place(legend, 0, y + 36)
        scene.height = y + 36 + legend.height
        return scene

    def _logs(self, first: int, step: int) -> list[SequenceLog]:
        """Sequences that were there in these steps; if they are too many, those that have not finished and the newest that have."""
        there = [log for log in self.history.sequences.values()
                 if (entry := log.at(step)) and (entry.status != "finished" or entry.step >= first)]
        unfinished = [log for log in there if log.at(step).status != "finished"][:self.rows]
        finished = [log for log in there if log.at(step).status == "finished"]
        room = self.rows - len(unfinished)
        return sorted(unfinished + (finished[-room:] if room else []), key=lambda log: log.index)

    def _pitch(self) -> int:
        """The width of a step: as wide as the steps so far allow, within reason."""
        steps = min(self.window, self.history.last - self.history.first + 1)
        return max(13, min(40, (WIDTH - _LEFT) // max(steps, 1)))

    def _row(self, scene: Scene, frame: Frame, log: SequenceLog, first: int, pitch: int, y: float) -> None:
        seq = frame.sequences.get(log.seq_id)
        scene.add(Box(1, y, 34, 21, f"s{colour_of(log.index)}", text=log.name),
                  Label(42, y + 15, {"preempted": "preempt"}.get(seq.status, seq.status) if seq else "", 13, quiet=True))
        for step in range(first, frame.step + 1):
            entry = log.activity(step)
            if entry is None:
                continue
            fill, pattern, sign, _ = LOOKS[entry.status]
            if entry.status == "prefill":
                sign = str(entry.tokens) if fitting_size(str(entry.tokens), pitch - 3, (11,), True) else "P"
            size = fitting_size(sign, pitch - 1, (13, 11, 10, 9), True)
            x, width = _LEFT + (step - first) * pitch, pitch - (2 if pitch > 20 else 1)
            scene.add(Box(x, y, width, 21, fill, pattern, text=sign, size=size,
                          tip=f"step {step}: {log.name} {entry.status}" + (f", {count(entry.tokens, 'token')}" if entry.tokens else "")))

    def _axis(self, scene: Scene, frame: Frame, first: int, pitch: int, y: float) -> None:
        every = next(n for n in (1, 2, 5, 10, 20) if n * pitch >= 34)
        for step in range(first, frame.step + 1):
            if step % every == 0:
                scene.add(Label(_LEFT + (step - first + 0.5) * pitch, y + 14, str(step), 13, "middle", quiet=True))
        scene.add(Label(_LEFT - 12, y + 14, "step", 13, "end", quiet=True))
