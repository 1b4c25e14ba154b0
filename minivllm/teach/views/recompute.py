"""RecomputeView: which positions each step of an engine without a cache computes, and which of them it had computed before.

Fed by hand, one call a step: the engine of notebook 01 has no events. Drawn and shown as every other view is.
"""

from __future__ import annotations

from minivllm.teach.views.scene import Box, Label, Scene, swatches
from minivllm.teach.views.stepped import Stepped

_LEFT, _CELL_HEIGHT, _MOST = 74, 26, 60


class RecomputeView(Stepped):
    """A row for each step, a column for each position. Raises ValueError for more than 60 of either, which nobody could read."""

    def __init__(self, num_steps: int, num_positions: int):
        if not (0 < num_steps <= _MOST and 0 < num_positions <= _MOST):
            raise ValueError(f"num_steps and num_positions must be 1 to {_MOST}, got {num_steps} and {num_positions}")
        self.num_steps, self.num_positions = num_steps, num_positions
        self.computed: list[int] = []

    @property
    def steps(self) -> tuple[int, int]:
        return 0, max(0, len(self.computed) - 1)

    def step(self, computed: int) -> None:
        """A step computed positions 0 to `computed` - 1."""
        if not 0 < computed <= self.num_positions or len(self.computed) == self.num_steps:
            raise ValueError(f"step {len(self.computed)} with {computed} positions does not fit into {self.num_steps} steps of {self.num_positions}")
        self.computed.append(computed)
        self.refresh()

    def scene(self, step: int | None = None) -> Scene:
        shown = self.computed if step is None else self.computed[:step + 1]
        width = min(40.0, (900 - _LEFT) / self.num_positions)
        scene = Scene(_LEFT + width * self.num_positions, 30 + _CELL_HEIGHT * self.num_steps + 70)
        for position in range(self.num_positions):
            if position % 5 == 0:
                scene.add(Label(_LEFT + (position + 0.5) * width, 18, str(position), 12, "middle", quiet=True))
        scene.add(Label(0, 18, "position", 12, quiet=True))
        before = 0
        for row, computed in enumerate(shown):
            y = 28 + row * _CELL_HEIGHT
            scene.add(Label(0, y + 18, f"step {row}", 13))
            for position in range(computed):
                again = position < before
                scene.add(Box(_LEFT + position * width, y, width - 2, _CELL_HEIGHT - 3, "grey" if again else "s1", "hatch" if again else None,
                              "thin" if again else "thick"))
            before = max(before, computed)
        self._add_counts(scene, shown, before)
        return scene

    def _add_counts(self, scene: Scene, shown: list[int], new: int) -> None:
        total = sum(shown)
        legend = swatches([(Box(0, 0, 24, 18, "s1", None, "thick"), "computed for the first time"),
                           (Box(0, 0, 24, 18, "grey", "hatch"), "computed again, the same numbers")], scene.width)
        scene.place(legend, 0, scene.height - 28)
        scene.add(Label(0, scene.height - 42, f"{total} positions computed, {new} of them new, {total - new} again", 15, bold=True))
        scene.alt = f"{len(shown)} steps without a cache: {total} positions computed, {new} of them new."

    @property
    def name(self) -> str:
        return f"RecomputeView: {self.num_steps} steps, {self.num_positions} positions"
