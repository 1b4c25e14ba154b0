"""SlotView: a small pool slot by slot, with the slot mapping of the step: which token's K/V goes where. Shown in notebook 03."""

from __future__ import annotations

from typing import Any

from minivllm.teach.views.captions import caption, count
from minivllm.teach.views.history import Frame
from minivllm.teach.views.scene import WIDTH, Box, Label, Scene, add_heading, colour_of, cut, in_layers, swatches
from minivllm.teach.views.view import View

_MOST_BLOCKS, _MOST_SLOTS = 24, 16  # what can be read
_LEFT, _HEIGHT = 76, 27


class SlotView(View):
    """The pool of an LLM, an Engine or a Trace: a row for each block, a cell for each slot. ValueError for a pool too large to read."""

    def __init__(self, source: Any, **options: Any):
        super().__init__(source, **options)
        num_blocks, size = len(self.trace.initial.owners), self.trace.block_size
        if num_blocks > _MOST_BLOCKS or size > _MOST_SLOTS:
            self.close()
            raise ValueError(f"SlotView shows at most {_MOST_BLOCKS} blocks of {_MOST_SLOTS} slots, and this pool has {num_blocks} of "
                             f"{size}: take a BlockView, or make the LLM with num_kv_blocks={_MOST_BLOCKS} and block_size={_MOST_SLOTS}")

    @property
    def name(self) -> str:
        return f"SlotView: {count(len(self.trace.initial.owners), 'block')} of {count(self.trace.block_size, 'slot')}"

    def draw(self, frame: Frame) -> Scene:
        words, mapping = caption(frame), slot_mapping(frame)
        scene = Scene(WIDTH, 0, alt=f"Step {frame.step}. {' '.join(words)} {self._told(frame, mapping)}")
        add_heading(scene, f"Step {frame.step}", f"{count(len(frame.written), 'block')} of {count(frame.block_size, 'slot')}", words)
        grid = self._grid(frame, {slot for slots in mapping.values() for slot in slots})
        scene.place(grid, 0, 76)
        y = 76 + grid.height + 24
        scene.add(Label(0, y, f"slot_mapping of this step, {count(sum(map(len, mapping.values())), 'token')}", 15, bold=True))
        room = min(6, len(self.history.sequences))
        for index, (seq_id, slots) in enumerate(list(mapping.items())[:room]):
            self._line(scene, frame, seq_id, slots, y + 10 + 27 * index)
        y += 10 + 27 * room + 6
        kinds = {"holds a token's K/V": ("s0",), "written in this step": ("s0", None, "thick"), "reserved, not yet written": ("t0",),
                 "cached: free, findable": ("grey", "dots"), "free": ()}
        legend = swatches([(Box(0, 0, 26, 20, *look), meaning) for meaning, look in kinds.items()])
        scene.place(legend, 0, y)
        scene.height = y + legend.height
        return scene

    def _grid(self, frame: Frame, now: set[int]) -> Scene:
        size = frame.block_size
        pitch = (WIDTH - _LEFT - 4) / size
        scene = Scene(WIDTH, _HEIGHT * len(frame.written))
        for block, written in enumerate(frame.written):
            y = _HEIGHT * block
            scene.add(Label(0, y + 18, f"block {block}", 14))
            owners = frame.pool.owners[block]
            colour = colour_of(self.history.index_of(frame.content[block][0])) if block in frame.content else 0
            for offset in range(size):
                slot, full = block * size + offset, offset < written
                fill = (f"s{colour}" if full else f"t{colour}") if owners else "grey" if full else None
                scene.add(Box(_LEFT + offset * pitch + 2, y + 2, pitch - 5, _HEIGHT - 5, fill, "dots" if fill == "grey" else None,
                              "thick" if slot in now else "thin"),
                          Label(_LEFT + (offset + 0.5) * pitch, y + 18, str(slot), 13, "middle", slot in now, fill, quiet=fill is None))
        in_layers(scene)
        return scene

    def _line(self, scene: Scene, frame: Frame, seq_id: int, slots: list[int], y: float) -> None:
        end = frame.sequences[seq_id].computed
        where = f"position {end - 1}" if len(slots) == 1 else f"positions {end - len(slots)} to {end - 1}"
        scene.add(Box(1, y, 36, 22, f"s{colour_of(self.history.index_of(seq_id))}", text=self.history.name(seq_id)),
                  Label(46, y + 16, where, 14, quiet=True),
                  Label(190, y + 16, cut(f"slot{'' if len(slots) == 1 else 's'} {', '.join(map(str, slots))}", 14, WIDTH - 190), 14))

    def _told(self, frame: Frame, mapping: dict[int, list[int]]) -> str:
        lines = [f"{self.history.name(seq_id)} to {', '.join(map(str, slots))}" for seq_id, slots in mapping.items()]
        return f"Slots written: {'; '.join(lines)}." if lines else "Nothing is written."


def slot_mapping(frame: Frame) -> dict[int, list[int]]:
    """Sequence -> the slots of the tokens computed in this step; -1 where nothing is written because a shared block holds it already."""
    mapping = {}
    for event in frame.events:
        if event.kind == "compute":
            table, size, start = _table(frame, event.seq_id), frame.block_size, event.data["start"]
            positions = range(start, start + event.data["tokens"])
            mapping[event.seq_id] = [table[p // size] * size + p % size if _written(frame, table[p // size]) else -1 for p in positions]
    return mapping


def _table(frame: Frame, seq_id: int) -> list[int]:
    """The block table that the step's write went through. Who finished in this step has given its blocks back, the last one first."""
    freed = [event.block for event in frame.events if event.kind == "free" and event.seq_id == seq_id]
    return frame.sequences[seq_id].block_table or freed[::-1]


def _written(frame: Frame, block: int) -> bool:
    return block in frame.touched
