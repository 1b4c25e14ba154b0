"""The grid of a pool too large to draw block by block: a cell stands for several blocks. Part of BlockView."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.teach.views.history import Frame
from minivllm.teach.views.scene import WIDTH, Box, Label, Scene, colour_of, fitting_size, in_layers, swatches

if TYPE_CHECKING:
    from minivllm.teach.views.blocks import BlockView

_MAX_CELLS, _PER_ROW, _MARGIN, _H, _GAP = 512, 32, 60, 23, 4


def group_size(view: BlockView) -> int:
    """The fewest blocks a cell that need at most 512 cells."""
    return -(-len(view.shown) // _MAX_CELLS)


def grid(view: BlockView, frame: Frame) -> Scene:
    size, pitch = group_size(view), 26
    groups = [view.shown[i:i + size] for i in range(0, len(view.shown), size)]
    scene = Scene(WIDTH, -(-len(groups) // _PER_ROW) * (_H + _GAP))
    for index, blocks in enumerate(groups):
        x, y = _MARGIN + index % _PER_ROW * pitch, index // _PER_ROW * (_H + _GAP) + 2
        if index % _PER_ROW == 0:
            scene.add(Label(_MARGIN - 9, y + _H - 6, f"{blocks[0]}", 13, "end", quiet=True))
        _cell(scene, view, frame, blocks, x, y, pitch - _GAP)
    in_layers(scene)
    return scene


def _cell(scene: Scene, view: BlockView, frame: Frame, blocks: range, x: float, y: float, w: float) -> None:
    """From below: the share in use, then the share that is cached; what is free stays empty."""
    owners = {seq_id for block in blocks for seq_id in frame.pool.owners[block]}
    used = sum(bool(frame.pool.owners[block]) for block in blocks)
    cached = sum(frame.pool.hashes[block] is not None and not frame.pool.owners[block] for block in blocks)
    only = next(iter(owners)) if len(owners) == 1 else None
    fill = "many" if only is None else f"s{colour_of(view.history.index_of(only))}"
    whole = fill if used == len(blocks) else "grey" if cached == len(blocks) else None
    scene.add(Box(x, y, w, _H, whole, {"grey": "dots", "many": "hatch"}.get(whole)))
    unit, bottom = (_H - 2) / len(blocks), y + _H - 1
    if 0 < used < len(blocks):
        scene.add(Box(x + 1, bottom - used * unit, w - 2, used * unit, fill, "hatch" if only is None else None, "none"))
    if 0 < cached < len(blocks):
        scene.add(Box(x + 1, bottom - (used + cached) * unit, w - 2, cached * unit, "grey", "dots", "none"))
    name = view.history.name(only) if only is not None else ""
    if name and used * unit > 17 and (size := fitting_size(name, w - 1, (13, 11, 10, 9), True)):
        scene.add(Label(x + w / 2, y + 17, name, size, "middle", True, fill))


def legend(view: BlockView) -> Scene:
    return swatches([(Box(0, 0, 26, 20, "s0", text="A"), "in use by one sequence"), (Box(0, 0, 26, 20, "many", "hatch"), "by several"),
                     (Box(0, 0, 26, 20, "grey", "dots"), "cached: free, findable"), (Box(0, 0, 26, 20), "free"),
                     (Box(0, 0, 0, 20, None, None, "none"), f"a cell is {group_size(view)} blocks")])
