"""MemoryView: where the device's memory goes, and what the KV cache's share of it is used for. Shown in notebooks 00 and 02."""

from __future__ import annotations

from typing import Any

from minivllm.teach.views.history import Frame
from minivllm.teach.views.scene import WIDTH, Box, Label, Scene, text_width
from minivllm.teach.views.view import View

Part = tuple[str, int, Box, str]  # name, size, how it looks, a remark


class MemoryView(View):
    """The memory account of an LLM, and its block pool slot by slot; of an Engine or a Trace the pool alone."""

    def __init__(self, source: Any, **options: Any):
        super().__init__(source, **options)
        self.account = self.llm.memory if self.llm is not None else None

    @property
    def name(self) -> str:
        return f"MemoryView: {len(self.trace.initial.owners) * self.trace.block_size:,} slots of K/V"

    def draw(self, frame: Frame) -> Scene:
        self._measure()
        scene, y = Scene(WIDTH, 0), 0.0
        if self.account is not None:
            y = _bar(scene, y, f"Memory of {self.account.device}", self._device_parts(), human_size) + 22
        slots = len(frame.pool.owners) * frame.block_size
        per_slot = self.account.bytes_per_token if self.account else 0
        title = f"KV cache after step {frame.step}: {slots:,} slots" + (f" of {per_slot:,} bytes" if per_slot else "")
        scene.height = _bar(scene, y, title, pool_parts(frame), lambda n: human_size(n * per_slot) if per_slot else f"{n:,} slots")
        return scene

    def _measure(self) -> None:
        """The account as it is now, whatever step is shown; after the end as it was last."""
        if self.llm is not None and self._pacer is not None:
            try:
                self.account = self.llm.memory
            except RuntimeError:  # closed: the last account stays
                pass

    def _device_parts(self) -> list[Part]:
        a = self.account
        others = max(0, a.total - a.free - a.weights - a.kv_cache)
        return [("weights", a.weights, Box(0, 0, 0, 0, "s1"), ""),
                ("KV cache", a.kv_cache, Box(0, 0, 0, 0, "s0"), f"{a.num_blocks:,} blocks of {a.block_size} tokens"),
                ("everything else in use", others, Box(0, 0, 0, 0, "many", "hatch"), "other programs included"),
                ("free", a.free, Box(0, 0, 0, 0), f"of it {human_size(a.activation_peak)} for activations"
                 + (" (predicted for the largest step)" if a.predicted else " (the most so far)"))]


def pool_parts(frame: Frame) -> list[Part]:
    """What the slots of the pool are, in slots."""
    size, used = frame.block_size, frame.blocks_that_are("used")
    written = sum(frame.written[block] for block in used)
    return [("written", written, Box(0, 0, 0, 0, "s0"), "K/V of running sequences"),
            ("reserved", len(used) * size - written, Box(0, 0, 0, 0, "t0", "cross"), "in their last blocks, not written yet"),
            ("cached", len(frame.blocks_that_are("cached")) * size, Box(0, 0, 0, 0, "grey", "dots"), "nobody's, but can be found"),
            ("free", len(frame.blocks_that_are("free")) * size, Box(0, 0, 0, 0), "")]


def _bar(scene: Scene, y: float, title: str, parts: list[Part], show: Any) -> float:
    """A bar of all parts in proportion, and a line for each below it. Returns where it ends."""
    total, x = max(1, sum(size for _, size, _, _ in parts)), 2.0
    said = [f"{name} {show(size)}, {share(size, total)}" for name, size, _, _ in parts]
    scene.alt = f"{scene.alt} {title}: {'; '.join(said)}.".strip()
    scene.add(Label(0, y + 18, title, 16, bold=True))
    shown = sum(size > 0 for _, size, _, _ in parts)
    for name, size, look, _ in parts:
        width = (WIDTH - 4 - 4 * shown) * size / total + 4  # the smallest part is still seen
        if size:
            label = name if text_width(name, 14, True) < width - 8 else ""
            scene.add(Box(x, y + 30, width, 44, look.fill, look.pattern, "thin", label, 14, f"{name}: {show(size)}"))
            x += width
    y += 86
    for name, size, look, remark in parts:
        scene.add(Box(2, y, 26, 18, look.fill, look.pattern), Label(40, y + 14, name, 14), Label(330, y + 14, show(size), 14, "end", True),
                  Label(400, y + 14, share(size, total), 14, "end"), *[Label(424, y + 14, remark, 14, quiet=True)] * bool(remark))
        y += 25
    return y + 4


def share(size: int, total: int) -> str:
    percent = 100 * size / total
    return f"{percent:.0f}%" if percent >= 10 or not size else f"{percent:.1f}%" if percent >= 0.1 else "<0.1%"


def human_size(size: float) -> str:
    """Bytes as KiB, MiB or GiB, with three figures or so."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.0f} GiB" if size >= 100 else f"{size:.2f} GiB"
