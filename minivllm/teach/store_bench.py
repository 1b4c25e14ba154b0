"""What a cache write costs: torch's indexed copy against the Triton kernel, launch included (eager) and on the device alone (graph).

Owns the candidates and the pool that they write to. Knows no notebook: 03 shows what `measure` returns, live or from saved/h200_store.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.kernels.jit import jit, next_power_of_2, tl, triton
from minivllm.kernels.store_kvcache import store_kvcache_torch, store_kvcache_triton

if TYPE_CHECKING:
    from matplotlib.figure import Figure

H, K, D, SLOTS, LAYERS = 16, 8, 128, 16_384, 16  # Qwen3-0.6B's layer; K and V of all slots and layers: 1 GiB in 16 bit
TOKENS = (1, 16, 256, 2048, 8192)
Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


@jit
def _one_token_kernel(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The kernel as notebook 03 builds it: one program, one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    wanted = (columns < WIDTH) & (slot >= 0)
    tl.store(k_cache + slot * WIDTH + columns, tl.load(k + token * k_stride + columns, mask=wanted), mask=wanted)
    tl.store(v_cache + slot * WIDTH + columns, tl.load(v + token * v_stride + columns, mask=wanted), mask=wanted)


def one_token_a_program(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    width = k.shape[1] * k.shape[2]
    _one_token_kernel[(len(k),)](k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), WIDTH=width, COLUMNS=next_power_of_2(width))


def indexed(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Two launches; a slot of -1 would write the last slot."""
    k_cache[slots] = k
    v_cache[slots] = v


def spare_slot(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Padding goes to the last slot, which nobody may use: more launches, but none that asks the device."""
    slots = torch.where(slots < 0, len(k_cache) - 1, slots)
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def index_copy(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def candidates(device: torch.device) -> dict[str, Store]:
    """By name; the kernels only where they run at full speed."""
    torchs: dict[str, Store] = {"torch": indexed, "torch_index_copy": index_copy, "torch_masked": store_kvcache_torch,
                                "torch_spare": spare_slot}
    kernels: dict[str, Store] = {"triton": store_kvcache_triton, "triton_one_token": one_token_a_program}
    return {**torchs, **(kernels if device.type == "cuda" and triton is not None else {})}


def measure(device: str | torch.device | None = None, tokens: tuple[int, ...] = TOKENS, layers: int = LAYERS) -> dict[str, Any]:
    """Microseconds of one layer's write by every candidate at every count of tokens.

    eager: call after call, launch included. graph: replayed, so the device's time alone; None for what cannot be captured, and {} on a CPU.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if place.type == "cuda" and torch.cuda.get_device_capability(place) >= (8, 0) else torch.float16
    pool = torch.zeros(layers, 2, SLOTS, K, D, dtype=dtype, device=place)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu", "torch": torch.__version__,
        "triton": triton.__version__ if triton is not None else None, "dtype": str(dtype).removeprefix("torch."),
        "num_kv_heads": K, "head_dim": D, "pool_bytes": pool.nbytes, "bytes_per_token": 2 * 2 * K * D * dtype.itemsize,
        "copy_bandwidth": copy_bandwidth(place), "tokens": list(tokens), "eager": {}, "graph": {}}
    for name, store in candidates(place).items():
        cases = [_calls(store, pool, count) for count in tokens]
        found["eager"][name] = [_microseconds(eager_seconds(calls, place)) for calls in cases]
        if place.type == "cuda":
            found["graph"][name] = None if name == "torch_masked" else [_microseconds(_graph_seconds(calls)) for calls in cases]
    return found


def saved() -> dict[str, Any] | None:
    """What `measure` printed on an H200; None where the file is not there."""
    file = resources.files("minivllm.teach").joinpath("saved", "h200_store.json")
    return json.loads(file.read_text()) if file.is_file() else None


NAMES = {"torch": "torch: cache[slots] = k", "torch_index_copy": "torch: index_copy_", "torch_masked": "torch, -1 by a mask",
         "torch_spare": "torch, -1 to a spare slot", "triton_one_token": "Triton, a token a program", "triton": "Triton, the package's"}


def table(found: dict[str, Any] | None) -> Iterator[str]:
    """The figures as lines; without any, a line that says so."""
    if found is None:
        yield "no saved figures: run this notebook on a GPU to measure them"
        return
    yield f"{found['device']}: a large copy moves {found['copy_bandwidth'] / 1e12:.2f} TB/s; microseconds a layer, at so many tokens"
    yield f"{'':34}" + "".join(f"{count:>9,}" for count in found["tokens"])
    for kind, said in (("eager", "launch included"), ("graph", "in a CUDA graph")):
        yield said
        for name in NAMES:
            if row := found[kind].get(name):
                yield f"  {NAMES[name]:32}" + "".join(f"{value:9.1f}" for value in row)
    limit = [1e6 * found["bytes_per_token"] * count / found["copy_bandwidth"] for count in found["tokens"]]
    yield f"{'bytes / copy bandwidth':34}" + "".join(f"{value:9.1f}" for value in limit)


def figure(found: dict[str, Any] | None) -> Figure | None:
    """Microseconds over tokens: torch and the kernel, both ways, with the limit that the bytes set."""
    from minivllm.teach import sketch

    if found is None:
        return None
    shown = {"torch, launch included": found["eager"]["torch"], "torch, in a graph": found["graph"]["torch"],
             "Triton, launch included": found["eager"]["triton"], "Triton, in a graph": found["graph"]["triton"],
             "bytes / copy bandwidth": [1e6 * found["bytes_per_token"] * count / found["copy_bandwidth"] for count in found["tokens"]]}
    drawn = sketch.lines(found["tokens"], shown, x="tokens written", y="microseconds a layer", log=True)
    drawn.axes[0].set_ylim(bottom=0.5)  # below that the limit is no limit: nothing starts so fast
    drawn.axes[0].set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    drawn.axes[0].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=12, frameon=False)
    drawn.set_size_inches(10.5, 4)
    return drawn


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / eager_seconds([lambda: target.copy_(source)], device)


def eager_seconds(calls: list[Callable[[], object]], device: torch.device, enough: float = 0.02) -> float:
    """Seconds of one call when all of them are made again and again: the median of five runs of `enough` seconds each."""
    _run(calls, 1, device)
    rounds = max(1, int(enough / max(_run(calls, 1, device), 1e-9)))
    return statistics.median(_run(calls, rounds, device) for _ in range(5)) / rounds / len(calls)


def _run(calls: list[Callable[[], object]], rounds: int, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        return time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(rounds):
        for call in calls:
            call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _graph_seconds(calls: list[Callable[[], object]]) -> float:
    from minivllm.bench.kernels import graph_seconds

    return graph_seconds(calls)


def _calls(store: Store, pool: Tensor, count: int) -> list[Callable[[], object]]:
    """One call for each layer, so that none writes what the one before left in a cache of the device; k and v as the projection leaves them."""
    slots = torch.randperm(SLOTS - 1, device=pool.device)[:count]
    qkv = torch.randn(count, (H + 2 * K) * D, device=pool.device).to(pool.dtype).view(count, -1, D)
    k, v = qkv[:, H:H + K], qkv[:, H + K:]
    return [lambda layer=layer: store(k, v, *layer, slots) for layer in pool]


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
