"""BatchView: how many tokens each step computes, prefill and decode stacked. Shown in notebooks 06 and 09."""

from __future__ import annotations

from typing import Any

from minivllm.teach.views.captions import count
from minivllm.teach.views.history import Frame
from minivllm.teach.views.scene import WIDTH, Box, Label, Scene, add_heading, fitting_size, swatches
from minivllm.teach.views.view import View

_LEFT, _TOP, _HEIGHT = 62, 86, 180


class BatchView(View):
    """The batch of each of the last `window` steps of an LLM, an Engine or a Trace."""

    def __init__(self, source: Any, window: int = 60, **options: Any):
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        super().__init__(source, **options)
        self.window = window

    @property
    def name(self) -> str:
        return "BatchView: tokens computed in each step"

    def draw(self, frame: Frame) -> Scene:
        first = self.window_start(frame.step, self.window)
        batches = [(step, *self.history.batch.get(step, (0, 0))) for step in range(first, frame.step + 1)]
        top = nice_top(max(prefill + decode for _, prefill, decode in batches))
        prefill, decode = frame.prefill_tokens, frame.decode_tokens
        words = f"{count(prefill + decode, 'token')} in this step: {prefill} prefill, {decode} decode"
        scene = Scene(WIDTH, _TOP + _HEIGHT + 74, alt=f"Step {frame.step}. {words}.")
        add_heading(scene, f"Step {frame.step}", "", [words])
        self._axis(scene, top)
        steps = min(self.window, self.history.last - self.history.first + 1)
        pitch = max(13, min(40, (WIDTH - _LEFT) // max(1, steps)))
        for index, (step, prefill, decode) in enumerate(batches):
            self._bar(scene, frame.step, step, prefill, decode, _LEFT + index * pitch, pitch, _HEIGHT / top)
        scene.place(swatches([(Box(0, 0, 26, 20, "s0", "hatch"), "prefill"), (Box(0, 0, 26, 20, "s1"), "decode"),
                              (Box(0, 0, 26, 20, None, None, "thick"), "this step")]), 0, _TOP + _HEIGHT + 44)
        return scene

    def _axis(self, scene: Scene, top: int) -> None:
        for value in (0, top // 2, top):
            y = _TOP + _HEIGHT * (1 - value / top)
            scene.add(Box(_LEFT - 6, y, WIDTH - _LEFT + 6 if value == 0 else 6, 0.5),
                      Label(_LEFT - 12, y + 5, f"{value:,}", 13, "end", quiet=True))
        scene.add(Label(_LEFT - 12, _TOP - 16, "tokens", 13, "end", quiet=True),
                  Label(_LEFT - 12, _TOP + _HEIGHT + 22, "step", 13, "end", quiet=True))

    def _bar(self, scene: Scene, now: int, step: int, prefill: int, decode: int, x: float, pitch: int, unit: float) -> None:
        width, bottom = pitch - (4 if pitch > 20 else 2), _TOP + _HEIGHT
        tip = f"step {step}: {prefill} prefill, {decode} decode"
        if decode:
            scene.add(Box(x, bottom - decode * unit, width, decode * unit, "s1", tip=tip))
        if prefill:
            scene.add(Box(x, bottom - (decode + prefill) * unit, width, prefill * unit, "s0", "hatch", tip=tip))
        total, height = prefill + decode, (prefill + decode) * unit
        if step == now and total:
            scene.add(Box(x, bottom - height, width, height, None, None, "thick"))
        if total and (size := fitting_size(str(total), pitch - 1, (13, 11), False)):
            scene.add(Label(x + width / 2, bottom - height - 5, str(total), size, "middle"))
        every = next(n for n in (1, 2, 5, 10, 20) if n * pitch >= 34)
        if step % every == 0:
            scene.add(Label(x + width / 2, bottom + 22, str(step), 13, "middle", quiet=True))


def nice_top(value: int) -> int:
    """The least even number of the form 2, 4, 6 or 10 times a power of ten that is not below `value`."""
    power = 1
    while True:
        for factor in (2, 4, 6, 10):
            if factor * power >= value:
                return factor * power
        power *= 10
