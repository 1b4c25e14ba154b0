"""What ranks pay for talking: an all-reduce alone and in a real step, and the message of a step. Part of `minivllm bench parallel`."""

from __future__ import annotations

import pickle
import statistics
import time
from typing import Any

import torch

from minivllm.bench.scheduler import decoding_engine
from minivllm.llm import LLM
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.wire import PlanReader, PlanWriter

_LARGE = 128 << 20  # bytes of the all-reduce that gives the bandwidth


def in_a_step(llm: LLM, steps: int = 16) -> dict[str, Any]:
    """Milliseconds a decode step spends in NCCL's kernels, by kernel, as torch's profiler sees rank 0. The LLM has requests in decode."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(4):
        llm.engine.step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        for _ in range(steps):
            llm.engine.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    kernels: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith(("ncclDevKernel", "ncclKernel")):
            kernels.setdefault(event.name.split("(")[0], []).append(event.time_range.elapsed_us())
    return {"profiled_step_ms": 1e3 * seconds / steps,
            "kernels": {name: {"a_step": len(times) / steps, "ms_a_step": sum(times) / steps / 1e3, "median_us": statistics.median(times)}
                        for name, times in kernels.items()}}


def all_reduces(runner: Any, shapes: list[tuple[int, int]], count: int) -> list[dict[str, Any]]:
    """Microseconds of one, with `count` of them in a row as a step has them; and the sum. Rank 0's clock."""
    small, large = (runner.everywhere(time_all_reduce, shape, many)[0] for shape, many in (((1, 64), count), ((_LARGE // 2, 1), 4)))
    share = 2 * (runner.ranks.size - 1) / runner.ranks.size  # of the bytes, what a ring sends from each rank
    bandwidth = share * (_LARGE // 2) * runner.dtype.itemsize / (large - small)
    rows = []
    for shape in shapes:
        seconds = runner.everywhere(time_all_reduce, shape, count)[0]
        num_bytes = shape[0] * shape[1] * runner.dtype.itemsize
        rows.append({"ranks": runner.ranks.size, "rows": shape[0], "bytes": num_bytes, "count": count, "us": 1e6 * seconds,
                     "predicted_us": 1e6 * (small + share * num_bytes / bandwidth), "step_ms": 1e3 * count * seconds,
                     "predicted_step_ms": 1e3 * count * (small + share * num_bytes / bandwidth),
                     "latency_us": 1e6 * small, "bandwidth_gb_s": bandwidth / 1e9})
    return rows


def set_overlap(runner: ModelRunner, chunk_size: int | None) -> None:
    """From now on sums over the ranks are made in chunks of so many tokens. Runs on every rank."""
    runner.ranks.overlap_chunk_size = chunk_size


@torch.inference_mode()
def time_all_reduce(runner: ModelRunner, shape: tuple[int, int], count: int, repeats: int = 9) -> float:
    """Seconds of one all-reduce: on a GPU `count` of them in a graph, as in a decode. Runs on every rank alike."""
    x = torch.zeros(shape, dtype=runner.dtype, device=runner.device)

    def reduce() -> None:
        for _ in range(count):
            runner.ranks.all_reduce(x)

    if runner.device.type != "cuda":
        reduce()
        begin = time.perf_counter()
        reduce()
        return (time.perf_counter() - begin) / count
    reduce()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        reduce()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        runner.ranks.all_reduce(x)  # so that all start together
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(times)


def wire_cost(num_running: int, steps: int = 64) -> dict[str, float]:
    """What the message of a decode step of `num_running` sequences costs: medians, beside a plain pickle of the plan."""
    engine = decoding_engine(num_running, 0)
    writer, reader, rows = PlanWriter(), PlanReader(), []
    for _ in range(steps + 1):
        plan = engine.scheduler.schedule()
        clock = [time.perf_counter()]
        for work in (lambda: writer.encode(plan), lambda: reader.decode(data), lambda: pickle.dumps(plan, pickle.HIGHEST_PROTOCOL),
                     lambda: pickle.loads(whole)):
            out = work()
            clock.append(time.perf_counter())
            data = out if len(clock) == 2 else data
            whole = out if len(clock) == 4 else None
        rows.append([len(data), *(1e6 * (b - a) for a, b in zip(clock, clock[1:])), len(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL))])
        engine.scheduler.update(plan, engine.runner.execute(plan))
    names = ("bytes", "encode_us", "decode_us", "pickle_us", "unpickle_us", "pickle_bytes")
    return {"running": num_running, **{name: statistics.median(column) for name, column in zip(names, zip(*rows[1:]))}}
