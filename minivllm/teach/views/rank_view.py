"""RankView: one pool a rank. Blocks belong to the same sequences everywhere; each rank's slots hold other heads. Shown in notebook 10."""

from __future__ import annotations

from typing import Any

from minivllm.layers.parallel import local_kv_heads
from minivllm.teach.views.blocks import BlockView, Grid, legend_of_blocks, totals_of
from minivllm.teach.views.captions import caption
from minivllm.teach.views.history import Frame
from minivllm.teach.views.scene import WIDTH, Box, Label, Scene, add_heading

_MOST_BLOCKS = 64


class RankView(BlockView):
    """The pools of all ranks of an LLM. Of an Engine or a Trace: give `heads=(query heads, kv heads)` and `ranks`."""

    def __init__(self, source: Any, ranks: int | None = None, heads: tuple[int, int] | None = None, sequences: int = 4, **options: Any):
        super().__init__(source, sequences=sequences, **options)
        if self.llm is not None:
            ranks = ranks or self.llm.config.tensor_parallel_size
            heads = heads or (self.llm.model_config.num_heads, self.llm.model_config.num_kv_heads)
        if ranks is None or heads is None:
            self.close()
            raise ValueError("an Engine or a Trace does not know its ranks: give ranks=3 and heads=(9, 3), or an LLM")
        if len(self.shown) > _MOST_BLOCKS:
            self.close()
            raise ValueError(f"a RankView draws up to {_MOST_BLOCKS} blocks a rank, and this pool has {len(self.shown)}: "
                             "give blocks=(0, 31)")
        self.ranks, (self.num_heads, self.num_kv_heads) = ranks, heads

    @property
    def name(self) -> str:
        return f"RankView: {self.ranks} ranks, {len(self.trace.initial.owners):,} blocks each"

    def kv_heads(self, rank: int) -> range:
        """The kv heads whose K/V this rank's slots hold."""
        first = rank * self.num_kv_heads // self.ranks
        return range(first, first + local_kv_heads(self.num_kv_heads, self.ranks))

    def query_heads(self, rank: int) -> range:
        each = self.num_heads // self.ranks
        return range(rank * each, (rank + 1) * each)

    def draw(self, frame: Frame) -> Scene:
        words, totals = caption(frame), totals_of(frame)
        heads = " ".join(f"Rank {rank} holds kv head {_span(self.kv_heads(rank))}." for rank in range(self.ranks))
        scene = Scene(WIDTH, 0, alt=f"Step {frame.step}. {' '.join(words)} {heads} On every rank: {totals}.")
        size = f"{self.ranks} ranks, {len(frame.pool.owners):,} blocks of {frame.block_size} tokens each"
        add_heading(scene, f"Step {frame.step}", size, words)
        y = 76.0
        for rank in range(self.ranks):
            self._heads(scene, rank, y)
            grid = Grid(self, frame).scene
            scene.place(grid, 0, y + 34)
            y += 34 + grid.height + 12
        scene.add(Label(0, y + 10, f"on every rank: {totals}", 15, bold=True))
        y = self._lines(scene, frame, y + 22)
        legend = legend_of_blocks()
        scene.place(legend, 0, y + 4)
        scene.height = y + 4 + legend.height
        return scene

    def _heads(self, scene: Scene, rank: int, y: float) -> None:
        """The line above a rank's pool: its name, and which of the kv heads its slots hold."""
        scene.add(Label(0, y + 20, f"rank {rank}", 16, bold=True))
        mine, x = self.kv_heads(rank), 74.0
        width = min(48.0, 300.0 / self.num_kv_heads)
        for head in range(self.num_kv_heads):
            held = head in mine
            text = f"kv {head}" if width >= 40 else str(head) if width >= 20 else ""
            scene.add(Box(x, y + 3, width - 4, 22, "many" if held else None, None, "thick" if held else "thin", text if held else "", 13))
            if not held and text:
                scene.add(Label(x + (width - 4) / 2, y + 19, text, 13, "middle", quiet=True))
            x += width
        others = [other for other in range(self.ranks) if other != rank and self.kv_heads(other) == mine]
        shared = f"; the same K/V on rank {', '.join(map(str, others))}" if others else ""
        scene.add(Label(x + 8, y + 20, f"read by query heads {_span(self.query_heads(rank))}{shared}", 14, quiet=True))


def _span(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
