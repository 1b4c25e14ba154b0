"""`minivllm bench kernels`: each kernel's time against the device's own limit, at Qwen3-0.6B's shape (H 16, K 8, D 128).

Memory-bound kernels: bytes that must move over the time, as a share of what a large copy reaches. Prefill: FLOPs of the causal half
over the time, as a share of a large matrix product. Timed as replays of a CUDA graph that walks over several layers, so that no call
finds its input in the cache where a real step would not. Kernels and limits alike are timed after a while of the same work: a GPU's
clock follows the power of what it just did.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minivllm.bench.limits import median_seconds
from minivllm.kernels.paged_decode import paged_decode
from minivllm.kernels.paged_prefill import paged_prefill
from minivllm.kernels.store_kvcache import store_kvcache

H, K, D, S, LAYERS = 16, 8, 128, 16, 14
BYTES_PER_TOKEN = 2 * K * D * 2  # of one layer, in bfloat16


def steady_seconds(run: Callable[[], object], settle: float = 0.1) -> float:
    """The median of 21 runs, after `settle` seconds of them."""
    end = time.perf_counter() + settle
    while time.perf_counter() < end:
        run()
        torch.cuda.synchronize()
    return median_seconds(run, torch.device("cuda"), repeats=21)


def graph_seconds(calls: list[Callable[[], object]]) -> float:
    """Seconds of one call: all of `calls` captured in one graph, replayed until it is worth timing."""
    for call in calls:  # compiles what must be compiled
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    replays = max(1, int(2e-3 / median_seconds(graph.replay, torch.device("cuda"))))
    return steady_seconds(lambda: [graph.replay() for _ in range(replays)]) / replays / len(calls)


class Pool:
    """LAYERS caches of `num_tokens` slots in blocks at random places."""

    def __init__(self, num_tokens: int):
        self.num_blocks = -(-num_tokens // S) + 1
        shape = (LAYERS, 2, self.num_blocks * S, K, D)
        self.cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def tables(self, lengths: list[int]) -> torch.Tensor:
        blocks = iter(torch.randperm(self.num_blocks).tolist())
        widest = -(-max(lengths) // S)
        rows = [list(itertools.islice(blocks, -(-n // S))) for n in lengths]
        return torch.tensor([row + [0] * (widest - len(row)) for row in rows], dtype=torch.int32, device="cuda")


def ragged(count: int, mean: int) -> list[int]:
    """`count` lengths between half of `mean` and one and a half times that."""
    return torch.randint(mean // 2, 3 * mean // 2, (count,)).tolist()


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / steady_seconds(lambda: target.copy_(source))


def matmul_rate() -> float:
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / steady_seconds(lambda: a @ b)


def store_case(num_tokens: int) -> float:
    pool = Pool(num_tokens)
    slots = torch.randperm(pool.num_blocks * S, device="cuda")[:num_tokens]
    qkv = torch.randn(num_tokens, (H + 2 * K) * D, dtype=torch.bfloat16, device="cuda").view(num_tokens, -1, D)
    k, v = qkv[:, H:H + K], qkv[:, H + K:]
    return graph_seconds([lambda i=i: store_kvcache(k, v, *pool.cache[i], slots) for i in range(LAYERS)])


def decode_case(lengths: list[int]) -> float:
    pool = Pool(sum(lengths) + S * len(lengths))
    tables, context = pool.tables(lengths), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    q = torch.randn(len(lengths), H, D, dtype=torch.bfloat16, device="cuda")
    return graph_seconds([lambda i=i: paged_decode(q, *pool.cache[i], tables, context, S, D**-0.5) for i in range(LAYERS)])


def prefill_case(count: int, length: int) -> float:
    lengths = [length] * count
    pool = Pool(sum(lengths) + S * count)
    tables, context = pool.tables(lengths), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, count * length + 1, length, dtype=torch.int32, device="cuda")
    rows = torch.arange(count, dtype=torch.int32, device="cuda")
    q = torch.randn(count * length, H, D, dtype=torch.bfloat16, device="cuda")
    return graph_seconds([lambda i=i: paged_prefill(q, *pool.cache[i], tables, context, starts, rows, length, S, D**-0.5) for i in range(LAYERS)])


def measure() -> dict[str, Any]:
    """Every case: seconds, what moved or was computed, the share of the limit."""
    copy, rate = copy_bandwidth(), matmul_rate()
    rows: list[dict[str, Any]] = []

    def add(name: str, seconds: float, amount: float, limit: float) -> None:
        rows.append({"case": name, "microseconds": 1e6 * seconds, "share": amount / seconds / limit})

    for tokens in (256, 8192):
        add(f"store {tokens:,} tokens", store_case(tokens), 2 * tokens * BYTES_PER_TOKEN, copy)
    for count, mean in ((256, 1000), (64, 1000), (8, 4000), (1, 8000)):
        lengths = ragged(count, mean) if count > 8 else [mean] * count
        add(f"decode {count} x {mean:,}", decode_case(lengths), sum(lengths) * BYTES_PER_TOKEN, copy)
    for count, length in ((8, 1024), (2, 8192)):
        add(f"prefill {count} x {length:,}", prefill_case(count, length), count * 4 * H * D * length * (length + 1) / 2, rate)
    return {"device": torch.cuda.get_device_name(), "copy_bandwidth": copy, "matmul_flops": rate, "cases": rows}


def show(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['device']}: a copy moves {result['copy_bandwidth'] / 1e12:.2f} TB/s, a matrix product {result['matmul_flops'] / 1e12:.0f} TFLOP/s"
    for row in result["cases"]:
        yield f"  {row['case']:<22}{row['microseconds']:9.1f} us   {100 * row['share']:5.1f}% of the limit"
