"""What `graph_bench.measure` found, as lines of text and as figures. A part that is not there is said to be missing, in one line.

Measures nothing. Shown by notebook 09.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minivllm.teach.graph_bench import MODEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = dict[str, Any]
PARTS = {"add_rms_norm": "sum and norm", "norm_rope_store": "q/k norms, rotary, cache write", "silu_and_mul": "silu and product"}
#: Tokens a second without torch.compile and with it, measured earlier on an H200: 128 tokens in, 128 out.
COMPILED_BEFORE = ({1: (639, 635), 8: (5351, 5257), 64: (27028, 27043), 256: (52775, 51923)},
                   {1: (627, 621), 8: (5257, 5053), 64: (26697, 22538), 256: (50484, 47126)})
WAYS = {"torch": "plain torch", "compiled": "torch.compile", "triton": "a Triton kernel"}


def missing(found: Found, *parts: str) -> str | None:
    """Why these parts cannot be shown; None if they can."""
    if not found:
        return "no saved figures: run this notebook on a GPU to measure them"
    for part in parts:
        if part not in found:
            return f"not among these figures: {part}"
        if isinstance(found[part], dict) and "error" in found[part]:
            return f"{part} could not be measured: {found[part]['error']}"
    return None


def steps(found: Found, part: str = "eager") -> Iterator[str]:
    """The steps of `part`, "eager" or "unfused", a line for each batch."""
    if why := missing(found, part):
        yield why
        return
    yield f"{found['device']}, {found['dtype']}; a model of Qwen3-0.6B's shape, {found['context']} tokens of context a row"
    yield "rows   whole step, us   GPU works, us   share   kernels   copies   allocations"
    for rows, step in found[part].items():
        share = step["gpu_us"] / step["wall_us"]
        yield (f"{rows:>4}{step['wall_us']:16,.0f}{step['gpu_us']:16,.0f}{share:8.0%}{step['launches']:10,}{step['copies']:9,}"
               f"{step['allocations']:14,}")


def replays(found: Found) -> Iterator[str]:
    """The same steps by replay, and what the host does around it."""
    if why := missing(found, "eager", "replay"):
        yield why
        return
    yield "rows   eager, us   replayed, us   times   graph alone, us   fill buffers   send graph   the rest   allocations"
    for rows, step in found["replay"].items():
        eager = found["eager"][rows]["wall_us"]
        rest = step["wall_us"] - step["graph_us"] - step["load_us"]
        yield (f"{rows:>4}{eager:12,.0f}{step['wall_us']:15,.0f}{eager / step['wall_us']:8.1f}{step['graph_us']:18,.0f}"
               f"{step['load_us']:15,.0f}{step['launch_us']:13,.0f}{rest:11,.0f}{step['allocations']:14,}")


def captures(found: Found) -> Iterator[str]:
    """Time and memory of all captures."""
    if why := missing(found, "captures"):
        yield why
        return
    every = found["captures"]
    yield f"{len(every)} sizes: {sum(one['ms'] for one in every) / 1e3:.2f} s, {sum(one['bytes'] for one in every) / 2**20:,.0f} MiB in all"
    yield _all_logits(every)
    for one in every:
        if one["size"] in (1, 8, 128, 240, 256):
            yield f"size {one['size']:4}: {one['ms']:7.1f} ms, {one['bytes'] / 2**20:7.1f} MiB"


def _all_logits(every: list[dict[str, Any]]) -> str:
    rows, vocab = sum(one["size"] for one in every), MODEL["vocab_size"]
    return f"logits of every size would be {rows:,} rows x {vocab:,} numbers of 2 bytes = {2 * rows * vocab / 2**20:,.0f} MiB more"


def paddings(found: Found) -> Iterator[str]:
    """What padded rows cost."""
    if why := missing(found, "padding"):
        yield why
        return
    for case in found["padding"]:
        yield (f"{case['rows']:3} rows: {case['exact_us']:6,.0f} us in a graph of {case['rows']}, {case['padded_us']:6,.0f} us in one of "
               f"{case['size']}; {case['size']} real rows take {case['full_us']:,.0f} us")


def kernels(found: Found, part: str = "eager_kernels") -> Iterator[str]:
    """The kernels of one layer, numbered as in `layers`."""
    if why := missing(found, part):
        yield why
        return
    layer = found[part]["layer"]
    for number, (name, _, duration) in enumerate(layer, 1):
        yield f"{number:3}  {duration:6.1f} us  {name}"
    if layer:
        yield f"{sum(duration for _, _, duration in layer):11.1f} us of work in {layer[-1][1] + layer[-1][2]:.0f} us"


def fusions(found: Found) -> Iterator[str]:
    """Launches and times of PARTS by WAYS."""
    if why := missing(found, "fusion"):
        yield why
        return
    rows = found["fusion"]["rows"]
    yield f"{'':33}kernels   us in a graph at {' / '.join(map(str, rows))} rows      us called from Python"
    for part, words in PARTS.items():
        yield words
        for way, said in WAYS.items():
            one = found["fusion"][part][way]
            if "error" in one:
                yield f"  {said:31}{one['error'][:70]}"
                continue
            graph, eager = (" / ".join("-" if value is None else f"{value:.1f}" for value in one[key]) for key in ("graph_us", "eager_us"))
            yield f"  {said:31}{one['launches']:7}   {graph:>24}   {eager:>26}"


def compiled(found: Found) -> Iterator[str]:
    """Tokens a second with torch.compile and without."""
    if why := missing(found, "generate", "generate_compiled"):
        yield why
        return
    for rows, plain in found["generate"].items():
        other = found["generate_compiled"][rows]
        yield f"{rows:>4} at once: {plain:9,.0f} tokens/s, with torch.compile {other:9,.0f} ({other / plain - 1:+.1%})"


def compiled_before() -> Iterator[str]:
    """The same of two earlier pairs of runs."""
    for pair in COMPILED_BEFORE:
        yield "an earlier pair:  " + ",  ".join(f"{rows} at once {with_ / plain - 1:+.1%}" for rows, (plain, with_) in pair.items())


def errors(found: Found) -> Iterator[str]:
    """What CUDA said to what it refuses."""
    if why := missing(found, "errors"):
        yield why
        return
    for what, said in found["errors"].items():
        yield f"{what:38} {said[:110]}"


def waiting(found: Found) -> Figure | None:
    """For each batch, eager and replayed: how long the GPU works and how long it waits."""
    from minivllm.teach import sketch

    if missing(found, "eager", "replay"):
        return None
    names, works, waits = [], [], []
    for rows in found["eager"]:
        for part, words in (("eager", "eager"), ("replay", "graph")):
            step = found[part][rows]
            names.append(f"{rows} row{'' if rows == '1' else 's'}, {words}")
            works.append(min(step["gpu_us"], step["wall_us"]))
            waits.append(max(0.0, step["wall_us"] - step["gpu_us"]))
    return sketch.stacked(names, {"the GPU works": works, "the GPU waits": waits}, x="microseconds a decode step")


def layers(found: Found) -> Figure | None:
    """One layer, eager and in a graph, on the same axis of time; below it the graph's alone, larger. Numbers as `kernels` lists them."""
    from minivllm.teach import sketch

    if missing(found, "eager_kernels", "replay_kernels"):
        return None
    eager, graph = (found[part]["layer"] for part in ("eager_kernels", "replay_kernels"))
    drawn = sketch.figure(11, 4.2)
    both, alone = drawn.subplots(2, 1, height_ratios=[2, 1.2])
    for place, layer in enumerate((eager, graph)):
        _row(both, place, layer, numbered=layer is eager)
    both.set_yticks([0, 1], [f"{words}: {_end(layer):.0f} us" for words, layer in (("eager", eager), ("in a graph", graph))], fontsize=13)
    both.set_ylim(1.5, -0.7)
    _row(alone, 0, graph, numbered=True)
    alone.set_yticks([0], ["in a graph,\nenlarged"], fontsize=13)
    alone.set_ylim(0.5, -0.75)
    alone.set_xlabel(f"microseconds; one layer of {found['layers']}, {found['eager_kernels']['batch']} rows. White: the GPU waits", fontsize=13)
    for axis in (both, alone):
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=12)
    return drawn


def _end(layer: list[list[Any]]) -> float:
    return layer[-1][1] + layer[-1][2] if layer else 0.0


def _row(axis: Any, place: int, layer: list[list[Any]], numbered: bool) -> None:
    """Every other kernel a little lower: in a graph one may begin before the one before it has ended."""
    from minivllm.teach import sketch

    for number, (_, start, duration) in enumerate(layer, 1):
        axis.barh(place + 0.08 * (number % 2), duration, left=start, height=0.5, color=sketch.COLOURS[(number - 1) % len(sketch.COLOURS)],
                  edgecolor="black", linewidth=0.6)
        if numbered:
            axis.text(start + duration / 2, place - 0.3, str(number), ha="center", va="bottom", fontsize=11)
