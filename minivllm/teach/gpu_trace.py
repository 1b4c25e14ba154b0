"""A torch.profiler trace of the device, as plain numbers: what ran, when, for how long. Only to take one needs a GPU."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

Activity = tuple[str, float, float]  # name, start and duration in microseconds


def traced(run: Callable[[], object]) -> list[Activity]:
    """What the CUDA GPU does when `run` is called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it may say that one cycle is kept, and there is one
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        return activities(profile.events())


def activities(events: Iterable[Any]) -> list[Activity]:
    """What the device did, in order of start: kernels, copies and fills."""
    done = [(short(event.name), float(event.time_range.start), float(event.time_range.elapsed_us()))
            for event in events if event.device_type.name == "CUDA" and not event.name.startswith(("ProfilerStep", "aten::", "## "))]
    return sorted(done, key=lambda item: item[1])


def short(name: str) -> str:
    """A kernel's name without its template arguments and namespaces."""
    name = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "")
    if name.startswith(("Memcpy", "Memset")):
        return " ".join(name.split()[:2])
    functor = re.search(r"(\w+?)(?:_kernel_cuda|_kernel_impl|Functor|_cuda)\b", name.partition("<")[2])
    base = re.split(r"[<(]", name)[0].split("::")[-1]
    general = functor is not None and base.startswith(("vectorized", "unrolled", "elementwise", "reduce"))
    return (f"{base}: {functor.group(1)}" if general else base)[:64]


def is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))


def in_total(done: list[Activity]) -> dict[str, float]:
    """launches, copies, and the time in which the device did anything at all: kernels that overlap are not counted twice."""
    busy, end = 0.0, float("-inf")
    for _, start, duration in done:
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    copies = sum(is_copy(name) for name, _, _ in done)
    return {"gpu_us": round(busy, 1), "launches": len(done) - copies, "copies": copies}


def by_name(done: list[Activity]) -> list[list[Any]]:
    """[name, how often, microseconds in all], the most time first."""
    counts, times = Counter(), Counter()
    for name, _, duration in done:
        counts[name] += 1
        times[name] += duration
    return [[name, counts[name], round(times[name], 1)] for name, _ in times.most_common()]


def one_layer(done: list[Activity], layers: int) -> list[list[Any]]:
    """A layer from the middle: from one run of the rarest kernel that comes once a layer to the next. Starts count from its first."""
    counts = Counter(name for name, _, _ in done)
    once = [index for index, (name, _, _) in enumerate(done) if counts[name] == layers and not is_copy(name)]
    if not once:
        return []
    marker = done[once[0]][0]
    places = [index for index in once if done[index][0] == marker]
    first, last = places[layers // 2 - 1], places[layers // 2]
    begin = done[first][1]
    return [[name, round(start - begin, 2), round(duration, 2)] for name, start, duration in done[first:last]]
