"""BlockView: the pool as a grid of blocks. Who uses what, what is shared, cached, evicted, and how full each block is.

Shown in every notebook from 04 on.
"""

from __future__ import annotations

from typing import Any

from minivllm.teach.views import groups
from minivllm.teach.views.captions import caption, count
from minivllm.teach.views.history import Frame, SequenceFrame
from minivllm.teach.views.scene import (WIDTH, Box, Label, Scene, add_heading, colour_of, cut, cut_front, fitting_size, in_layers, swatches,
                                   text_width)
from minivllm.teach.views.view import View

_MAX_CELLS = 512


class BlockView(View):
    """The block pool of an LLM, an Engine or a Trace.

    blocks: (first, last) shows only these. sequences: at most so many lines, one a sequence, below the pool; 0 for none.
    """

    def __init__(self, source: Any, blocks: tuple[int, int] | None = None, sequences: int = 8, **options: Any):
        super().__init__(source, **options)
        num_blocks = len(self.trace.initial.owners)
        first, last = blocks or (0, num_blocks - 1)
        if not 0 <= first <= last < num_blocks:
            self.close()
            raise ValueError(f"blocks=({first}, {last}) is not within the pool: it has blocks 0 to {num_blocks - 1}")
        self.shown = range(first, last + 1)
        self.max_sequences = sequences

    @property
    def name(self) -> str:
        return f"BlockView: {len(self.trace.initial.owners):,} blocks of {count(self.trace.block_size, 'token')}"

    def draw(self, frame: Frame) -> Scene:
        words, totals = caption(frame), totals_of(frame)
        scene = Scene(WIDTH, 0, alt=f"Step {frame.step}. {' '.join(words)} In all: {totals}.")
        add_heading(scene, f"Step {frame.step}", f"{len(frame.pool.owners):,} blocks of {count(frame.block_size, 'token')}", words)
        y = 76.0
        if len(self.shown) > _MAX_CELLS:
            grid, legend = groups.grid(self, frame), groups.legend(self)
        else:
            grid, legend = Grid(self, frame).scene, legend_of_blocks()
        scene.place(grid, 0, y)
        y += grid.height + 22
        scene.add(Label(0, y, totals, 15, bold=True))
        y = self._lines(scene, frame, y + 12)
        scene.place(legend, 0, y + 4)
        scene.height = y + 4 + legend.height
        return scene

    def _lines(self, scene: Scene, frame: Frame, y: float) -> float:
        """One line a sequence: those that run or wait, then the newest that finished. The room does not shrink, so nothing jumps."""
        room = min(self.max_sequences, len(self.history.sequences))
        order = sorted(frame.sequences.values(), key=lambda s: (1, -s.log.seq_id) if s.status == "finished" else (0, s.log.seq_id))
        for index, seq in enumerate(sorted(order[:room], key=lambda seq: seq.log.seq_id)):
            self._line(scene, seq, y + 27 * index)
        if 0 < room < len(order):
            scene.add(Label(0, y + 27 * room + 15, f"and {count(len(order) - room, 'more sequence')}", 13, quiet=True))
        return y + 27 * room + (24 if 0 < room < len(self.history.sequences) else 4)

    def _line(self, scene: Scene, seq: SequenceFrame, y: float) -> None:
        fill = f"s{colour_of(self.history.index_of(seq.log.seq_id))}"
        scene.add(Box(1, y, 36, 22, fill if seq.block_table else "pale", text=seq.name), Label(46, y + 16, seq.status, 14))
        prompt = seq.log.num_prompt_tokens
        known = f" of {seq.length}" if seq.computed < seq.length else ""
        if seq.block_table:
            tokens = f"K/V of {seq.computed}{known} {'token' if seq.computed == 1 and not known else 'tokens'}"
        else:
            tokens = count(seq.length, "token") + (f", {prompt} of them prompt" if prompt is not None else "")
        scene.add(Label(130, y + 16, tokens, 14, quiet=True))
        table = cut(f"blocks {' '.join(map(str, seq.block_table))}", 14, 190) if seq.block_table else ""
        scene.add(*[Label(340, y + 16, table, 14)] if table else [])
        if text := self.text(seq.token_ids[-40:]):
            scene.add(Label(545, y + 16, cut_front(text, 14, WIDTH - 545), 14, quiet=True))


class Grid:
    """One cell a block, for up to 512 of them."""

    def __init__(self, view: BlockView, frame: Frame):
        self.view, self.frame = view, frame
        blocks = view.shown
        self.per_row = 8 if len(blocks) <= 16 else 16 if len(blocks) <= 64 else 32
        self.margin = 38 if self.per_row == 32 else 5
        self.pitch, gap = {8: (112, 9), 16: (56, 7), 32: (27, 4)}[self.per_row]
        self.w, self.h = self.pitch - gap, {8: 78, 16: 48, 32: 23}[self.per_row]
        self.step = self.h + gap
        self.scene = Scene(WIDTH, -(-len(blocks) // self.per_row) * self.step)
        for index, block in enumerate(blocks):
            x, y = self.margin + index % self.per_row * self.pitch, index // self.per_row * self.step + 2
            if self.per_row == 32 and index % 32 == 0:
                self.scene.add(Label(self.margin - 9, y + self.h - 6, str(block), 13, "end", quiet=True))
            self._cell(block, x, y)
        in_layers(self.scene)

    def _cell(self, block: int, x: float, y: float) -> None:
        frame, size = self.frame, self.frame.block_size
        owners, written = frame.pool.owners[block], frame.written[block]
        tip = self.view.tip(frame, block) if len(self.view.shown) <= 256 else ""
        self._ring(block, x, y)
        if not owners:
            cached = frame.pool.hashes[block] is not None
            self.scene.add(Box(x, y, self.w, self.h, "grey" if cached else None, "dots" if cached else None, tip=tip))
            self._texts(block, x, y, "grey" if cached else None, self._filler(block) if cached else "")
            return
        colour, shared = colour_of(self.view.history.index_of(self._first(block, owners))), len(owners) > 1
        full = written >= size
        self.scene.add(Box(x, y, self.w, self.h, f"{'s' if full else 't'}{colour}", "hatch" if shared and full else None, tip=tip))
        if written and not full:
            height = (self.h - 2) * written / size
            self.scene.add(Box(x + 1, y + self.h - 1 - height, self.w - 2, height, f"s{colour}", None, "none"))
        self._texts(block, x, y, f"s{colour}", self._owner_text(owners), f"×{len(owners)}" if shared else "", written)

    def _ring(self, block: int, x: float, y: float) -> None:
        """Around the cell, a little apart, so that it is seen on a dark page too: what happened to the block in this step."""
        border = "dashed" if block in self.frame.evicted else "thick" if block in self.frame.touched and self.frame.written[block] else ""
        if border:
            out = 1 if self.per_row == 32 else 3
            self.scene.add(Box(x - out, y - out, self.w + 2 * out, self.h + 2 * out, None, None, border))

    def _first(self, block: int, owners: list[int]) -> int:
        """The owner whose colour the block has: who filled it, as long as it owns it."""
        filler = self.frame.content.get(block, (owners[0], 0))[0]
        return filler if filler in owners else owners[0]

    def _filler(self, block: int) -> str:
        name = self.view.history.name(self.frame.content[block][0]) if block in self.frame.content else "?"
        return name if self.per_row == 32 else f"({name})"

    def _owner_text(self, owners: list[int]) -> str:
        names, large = [self.view.history.name(seq_id) for seq_id in owners], self.per_row == 8
        text = " ".join(names)
        if text_width(text, 20 if large else 16, True) > self.w - 6:
            text = f"{names[0]} +{len(names) - 1}" if len(names) > 1 else names[0]
        return f"×{len(names)}" if self.per_row == 32 and len(names) > 1 else text

    def _texts(self, block: int, x: float, y: float, fill: str | None, owner: str, shared: str = "", written: int | None = None) -> None:
        add, center = self.scene.add, x + self.w / 2
        if self.per_row == 32:
            if owner:
                size = fitting_size(owner, self.w - 1, (13, 11, 10, 9), True)
                add(Label(center, y + 16, owner if size else "…", size or 13, "middle", True, fill))
            return
        add(Label(x + 5, y + 16, str(block), 13, "start", False, fill, quiet=fill is None))
        if shared:
            add(Label(x + self.w - 5, y + 16, shared, 13, "end", True, fill))
        large = self.per_row == 8
        if owner:
            add(Label(center, y + (46 if large else 38), owner, 20 if large else 16, "middle", True, fill))
        if large and written is not None:
            add(Label(center, y + 68, f"{written} of {self.frame.block_size}", 13, "middle", False, fill))


def totals_of(frame: Frame) -> str:
    used, shared, cached, free = (len(frame.blocks_that_are(kind)) for kind in ("used", "shared", "cached", "free"))
    part = f" ({shared:,} shared)" if shared else ""
    return f"used {used:,}{part}, cached {cached:,}, free {free:,} of {len(frame.pool.owners):,} blocks"


def legend_of_blocks() -> Scene:
    half = Box(0, 0, 26, 20, "t0")
    scene = swatches([(half, "in use, filled up to here"), (Box(0, 0, 26, 20, "s0", "hatch", text="×2"), "shared"),
                      (Box(0, 0, 26, 20, "grey", "dots", text="(A)"), "cached: free, findable"), (Box(0, 0, 26, 20), "free"),
                      (Box(0, 0, 26, 20, None, None, "thick"), "written now"), (Box(0, 0, 26, 20, None, None, "dashed"), "evicted now")])
    scene.items.insert(1, Box(half.x + 1, half.y + 8, 24, 11, "s0", None, "none"))
    return scene
