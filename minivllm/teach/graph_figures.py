"""What `graph_bench.measure` found, as lines of text and as figures. A part that is not there is said to be missing, in one line.

Measures nothing. Shown by notebook 09.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = dict[str, Any]
PARTS = {"add_rms_norm": "sum and norm", "norm_rope_store": "q/k norms, rotary, cache write", "silu_and_mul": "silu and product"}
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
    for one in every:
        if one["size"] in (1, 8, 64, max(other["size"] for other in every)):
            yield f"size {one['size']:4}: {one['ms']:7.1f} ms, {one['bytes'] / 2**20:7.1f} MiB"


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
    for number, (name, _, duration) in enumerate(found[part]["layer"], 1):
        yield f"{number:3}  {duration:6.1f} us  {name}"


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
    """One layer of each, its kernels on the same axis of time; numbers as `kernels` lists them."""
    from minivllm.teach import sketch

    if missing(found, "eager_kernels", "replay_kernels"):
        return None
    drawn = sketch.figure(11, 3.2)
    axis = drawn.subplots()
    for place, (part, words) in enumerate((("eager_kernels", "eager"), ("replay_kernels", "in a graph"))):
        layer = found[part]["layer"]
        for number, (_, start, duration) in enumerate(layer, 1):
            colour = sketch.COLOURS[(number - 1) % len(sketch.COLOURS)]
            axis.barh(place, duration, left=start, height=0.5, color=colour, edgecolor="black", linewidth=0.6)
            if part == "eager_kernels":
                axis.text(start + duration / 2, place - 0.32, str(number), ha="center", va="bottom", fontsize=11)
        if layer:
            end = layer[-1][1] + layer[-1][2]
            axis.text(end, place + 0.42, f"{words}: {end:.0f} us", ha="right", va="top", fontsize=12)
    axis.set_yticks([0, 1], ["eager", "in a graph"], fontsize=13)
    axis.set_ylim(1.6, -0.7)
    rows = found["eager_kernels"]["batch"]
    axis.set_xlabel(f"microseconds; one layer of {found['layers']}, {rows} rows. White: the GPU waits", fontsize=13)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=12)
    return drawn
