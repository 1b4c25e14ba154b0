"""What a decode step takes on one GPU and on several, predicted from bytes and link speed. No GPU is asked. For notebook 10.

A step reads the weights and the K/V, each rank its part; it pays for launches and the host, which nobody splits; and several ranks pay for
their all-reduces: a latency each, and the bytes of a ring. 16 bit throughout.
Simplified: collectives and computation do not overlap, as in the package's decodes, and matrix products are bound by their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.bench.parallel import SHAPES
from minivllm.simulate.devices import DEVICES
from minivllm.teach import sketch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXT = 192  # tokens: what `minivllm bench parallel` has on average, 128 of prompt and half of 128 of answer
NAMES = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-8b": "Qwen3-8B"}
PARTS = ("weights", "K/V", "launches, host", "all-reduces: latency", "all-reduces: bytes")


@dataclass(frozen=True)
class Pair:
    """Two GPUs and what joins them. link: bytes/s each way, by the datasheet. latency: seconds of the smallest all-reduce, assumed."""

    device: str
    joined_by: str
    link: float
    latency: float


PAIRS = {"T4": Pair("T4", "PCIe 3 x16", 16e9, 25e-6), "H200": Pair("H200", "NVLink", 450e9, 10e-6)}


@dataclass(frozen=True)
class Bytes:
    """Of one rank. held: its weights; read: those that a decode step reads (of an embedding only single rows); kv: a token's K/V."""

    held: int
    read: int
    kv: int


def rank_bytes(shape: Mapping[str, Any], ranks: int = 1, itemsize: int = 2) -> Bytes:
    """What a rank of `ranks` holds; norms are whole on each. shape: a config.json as a dict, as those of bench.parallel.SHAPES."""
    hidden, layers, dim = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
    heads, kv_heads, vocab = shape["num_attention_heads"], shape["num_key_value_heads"], -(-shape["vocab_size"] // ranks)
    own_kv = max(1, kv_heads // ranks)
    layer = hidden * dim * (2 * heads // ranks + 2 * own_kv) + 3 * hidden * shape["intermediate_size"] // ranks
    norms = hidden * (2 * layers + 1) + (2 * dim * layers if shape["architectures"][0].startswith("Qwen3") else 0)
    read = itemsize * (layers * layer + norms + vocab * hidden)
    held = read if shape["tie_word_embeddings"] else read + itemsize * vocab * hidden
    return Bytes(held, read, 2 * layers * own_kv * dim * itemsize)


def ring_bytes(num_bytes: float, ranks: int) -> float:
    """What each rank of a ring sends in an all-reduce of `num_bytes`."""
    return 2 * (ranks - 1) / ranks * num_bytes


def decode_ms(shape: Mapping[str, Any], pair: Pair, ranks: int, rows: int, context: int = CONTEXT) -> dict[str, float]:
    """Milliseconds of a decode step of `rows` sequences, by part (PARTS)."""
    device, own = DEVICES[pair.device], rank_bytes(shape, ranks)
    rate = device.bandwidth * device.read_efficiency
    count = 2 * shape["num_hidden_layers"] + 1 if ranks > 1 else 0
    sent = count * ring_bytes(2 * rows * shape["hidden_size"], ranks) + 2 * rows * (ranks - 1) * -(-shape["vocab_size"] // ranks)
    times = (own.read / rate, rows * context * own.kv / rate, device.step_overhead + rows * device.row_overhead,
             (count + 1) * pair.latency if count else 0.0, sent / pair.link)
    return {name: 1e3 * seconds for name, seconds in zip(PARTS, times)}


def fits(shape: Mapping[str, Any], pair: Pair, ranks: int) -> bool:
    return rank_bytes(shape, ranks).held < DEVICES[pair.device].memory


def lines(rows: tuple[int, ...] = (1, 64)) -> Iterator[str]:
    """Predictions for every pair, shape and batch, a line each."""
    yield "pair         model       sequences   one GPU, ms   two, ms   times as fast   of it all-reduces, ms"
    for pair in PAIRS.values():
        for name, label in NAMES.items():
            for count in rows:
                one, two = (decode_ms(SHAPES[name], pair, ranks, count) for ranks in (1, 2))
                first, second = sum(one.values()), sum(two.values())
                alone = f"{first:11.2f}" if fits(SHAPES[name], pair, 1) else "too large  "
                gain = f"{first / second:13.2f}" if fits(SHAPES[name], pair, 1) else "            -"
                yield (f"2 x {pair.device:8} {label:12}{count:9}   {alone}{second:10.2f}   {gain}"
                       f"{two[PARTS[3]] + two[PARTS[4]]:24.2f}")


def figure(measured: Mapping[tuple[str, str, int, int], float] | None = None, rows: tuple[int, ...] = (1, 64)) -> Figure:
    """Predicted steps as bars of parts, a panel for each pair. measured: (device, shape, sequences, ranks) -> ms, drawn as diamonds."""
    drawn = sketch.figure(11, 7.2)
    for axis, pair in zip(drawn.subplots(2, 1), PAIRS.values()):
        _panel(axis, pair, measured or {}, rows)
    more = {name: handle for axis in drawn.axes for handle, name in zip(*axis.get_legend_handles_labels())}
    drawn.legend(list(more.values()), list(more), fontsize=11, frameon=False, loc="outside upper center", ncols=3)
    return drawn


def _panel(axis: Any, pair: Pair, measured: Mapping[tuple[str, str, int, int], float], rows: tuple[int, ...]) -> None:
    bars = [(name, count, ranks) for name in NAMES for count in rows for ranks in (1, 2)]
    labels = [f"{NAMES[name]}, {count} at once, {ranks} GPU{'s' if ranks > 1 else ''}" for name, count, ranks in bars]
    steps = [decode_ms(SHAPES[name], pair, ranks, count) for name, count, ranks in bars]
    room = [fits(SHAPES[name], pair, ranks) for name, _, ranks in bars]
    left = [0.0] * len(bars)
    for number, part in enumerate(PARTS):
        values = [step[part] if there else 0 for step, there in zip(steps, room)]
        axis.barh(labels, values, left=left, color=sketch.COLOURS[number], hatch=("", "//", "..", "xx", "\\\\")[number], edgecolor="white",
                  label=part)
        left = [a + b for a, b in zip(left, values)]
    most = max(left)
    found = {place: measured[key] for place, bar in enumerate(bars) if (key := (pair.device, *bar)) in measured}
    if found:
        axis.plot(list(found.values()), list(found), "kD", markersize=7, linestyle="none", label="measured")
    for place, (total, there) in enumerate(zip(left, room)):
        text = f"{total:.1f}" + (f", measured {found[place]:.1f}" if place in found else "") if there else "does not fit"
        axis.text(max(total, found.get(place, 0)) + most / 45, place, text, va="center", fontsize=11)
    axis.set_xlim(0, 1.25 * max(most, *found.values(), 0))
    axis.invert_yaxis()
    axis.set_title(f"two {pair.device}, {pair.joined_by}: ms a decode step", fontsize=13, loc="left")
    axis.tick_params(labelsize=11)
    axis.spines[["top", "right"]].set_visible(False)
