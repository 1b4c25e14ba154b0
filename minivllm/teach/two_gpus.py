"""Two GPUs against one, measured: here where there are two, else as saved from two H200. For notebook 10.

    python -m minivllm.teach.two_gpus FILE.json FILE2.json    condense raw files of `minivllm bench parallel` into what the notebook shows

What is saved (`saved/h200_parallel.json`): device, torch, date; for each shape under `shapes` the lists throughput, all_reduce, in_a_step,
greedy, prefill and life of the raw file, fewer fields each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("saved") / "h200_parallel.json"
MISSING = "no figures of two H200 are saved beside this notebook yet: what follows is predicted alone"
Found = dict[str, Any]

_KEPT = {
    "throughput": ("ranks", "eager", "graphs", "dtype", "sequences", "step_ms", "tokens_per_second", "rank_weight_bytes"),
    "all_reduce": ("ranks", "rows", "bytes", "count", "us", "predicted_us", "latency_us", "bandwidth_gb_s", "step_ms"),
    "greedy": ("ranks", "equal", "tokens", "distinct_tokens", "smallest_gap", "gaps_where_parted"),
    "prefill": ("ranks", "tokens", "overlap_chunk_size", "ms"),
    "life": ("create", "create_again", "close_after_create", "killed_to_error", "killed_to_closed"),
}


def condense(raw: list[Found]) -> Found:
    """What `bench parallel` wrote, one file a shape, as one dict without what the notebook does not show."""
    if not raw:
        raise ValueError("give at least one file that `python -m minivllm bench parallel --output FILE` wrote")
    about = raw[0]["environment"]
    found: Found = {"device": about["device"], "torch": about["versions"]["torch"], "date": about["date"], "shapes": {}}
    for one in raw:
        if one["environment"]["device"] != about["device"]:
            raise ValueError(f"the files are of different devices: {about['device']} and {one['environment']['device']}")
        shape = {part: [_few(row, fields) for row in one.get(part, [])] for part, fields in _KEPT.items()}
        shape["in_a_step"] = [_in_a_step(row) for row in one.get("in_a_step", [])]
        found["shapes"][one["shape"]] = shape
    return found


def _few(row: Found, fields: tuple[str, ...]) -> Found:
    short = lambda value: float(f"{value:.4g}") if isinstance(value, float) else value
    return {name: [short(one) for one in value] if isinstance(value := row[name], list) else short(value) for name in fields if name in row}


def _in_a_step(row: Found) -> Found:
    """NCCL's kernels of one decode step, added up."""
    kernels = row["kernels"].values()
    return {"ranks": row["ranks"], "eager": row["eager"], "sequences": row["sequences"], "step_ms": round(row["profiled_step_ms"], 3),
            "nccl_ms": round(sum(kernel["ms_a_step"] for kernel in kernels), 3),
            "calls": round(sum(kernel["a_step"] for kernel in kernels), 1)}


def saved() -> Found:
    """What was saved; {} where nothing was."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def measure(shape: str = "qwen3-0.6b", batches: tuple[int, ...] = (1, 64)) -> Found:
    """On this machine's first two GPUs, a short run: tokens of one and of two compared, decode steps with CUDA graphs, all-reduces."""
    import torch

    from minivllm.bench import parallel, report

    if torch.cuda.device_count() < 2:
        raise ValueError(f"two GPUs are needed, and torch sees {torch.cuda.device_count()}")
    raw: Found = {"environment": report.environment(torch.device("cuda")), "shape": shape,
                  "throughput": [], "all_reduce": [], "in_a_step": []}
    with parallel.model_directory(shape) as directory:
        raw["greedy"] = parallel.greedy(directory, [1, 2], "cuda")
        for size in (1, 2):
            for part, rows in parallel.throughput(directory, size, list(batches), "cuda", eager=False, rounds=1).items():
                raw[part] += rows
    return condense([raw])


def lines(found: Found) -> Iterator[str]:
    """What was found, a few lines a shape; one line where there is nothing."""
    if not found:
        yield MISSING
        return
    yield f"{found['device']}, torch {found['torch']}; random weights, 128 tokens in, 128 out, CUDA graphs (prompts without)"
    for name, shape in found["shapes"].items():
        yield f"\n{name}"
        yield from _tokens(shape)
        yield from _steps(shape)
        yield from (f"  smallest all-reduce {row['latency_us']:.1f} us, large ones {row['bandwidth_gb_s']:,.0f} GB/s"
                    for row in shape["all_reduce"][:1])
        yield from (f"  all-reduce of {row['rows']:4} rows, {row['bytes']:9,} bytes: {row['us']:5.1f} us, "
                    f"{row['count']} a step: {row['step_ms']:5.2f} ms" for row in shape["all_reduce"])
        yield from (f"  in a real step of {row['sequences']:4}: {row['calls']:g} kernels of NCCL, {row['nccl_ms']:.2f} ms together"
                    for row in shape["in_a_step"] if not row["eager"])
        yield from (f"  a step of {row['tokens']:,} tokens of prompts: {row['ms']:6.1f} ms "
                    f"on {row['ranks']} GPU{'s' if row['ranks'] > 1 else ''}"
                    for row in shape.get("prefill", []) if row["overlap_chunk_size"] is None)


def _tokens(shape: Found) -> Iterator[str]:
    for row in shape["greedy"]:
        if row["ranks"] > 1:
            parted = row.get("gaps_where_parted") or []
            where = f"; where they part the two best logits are {max(parted):.1g} apart at most" if parted else ""
            yield f"  float32, {row['ranks']} GPUs, {row['tokens']} tokens: the same as one GPU's: {row['equal']}{where}"


def _steps(shape: Found) -> Iterator[str]:
    steps = {(row["ranks"], row["sequences"], row["eager"]): row for row in shape["throughput"]}
    for (ranks, sequences, eager), row in steps.items():
        if eager:  # the host's pace, one launch at a time: notebook 09
            continue
        one = steps.get((1, sequences, eager))
        gain = f", {row['tokens_per_second'] / one['tokens_per_second']:.2f} times one GPU" if ranks > 1 and one else ""
        yield (f"  {ranks} GPU{'s' if ranks > 1 else ' '} {sequences:4} at once: {row['step_ms']:6.2f} ms a step, "
               f"{row['tokens_per_second']:8,.0f} tokens/s, weights {row['rank_weight_bytes'] / 1e9:5.2f} GB a GPU{gain}")


def step_times(found: Found) -> dict[tuple[str, str, int, int], float]:
    """(device, shape, sequences, ranks) -> ms of a decode step with graphs: what `scaling.figure` draws beside its predictions."""
    device = next((name for name in ("H200", "T4") if name in found.get("device", "")), found.get("device", ""))
    return {(device, name, row["sequences"], row["ranks"]): row["step_ms"]
            for name, shape in found.get("shapes", {}).items() for row in shape["throughput"] if not row["eager"]}


if __name__ == "__main__":
    FILE.write_text(json.dumps(condense([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]), indent=1) + "\n",
                    encoding="utf-8")
    print("\n".join(lines(saved())))
