"""`minivllm bench attention`: one prompt's attention in one layer, naive against paged and flash-style, at Qwen3-0.6B's shape.

naive: all scores at once, from the definition. The others are the attention backends that run here. Time of the prefill; memory that it
takes beside q, k and v; and the longest prompt that fits into a given amount of memory, K/V cache included. Naive's is found by trying,
since its scores grow with the square; the others' follows from the bytes a token that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from minivllm import attention
from minivllm.attention.metadata import AttentionMetadata
from minivllm.bench.limits import median_seconds
from minivllm.worker.device import GIB, gpu_memory, has_bfloat16
from minivllm.worker.gpu_memory import MemoryLimit

H, K, D = 16, 8, 128
GPU_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
CPU_LENGTHS = (128, 256, 512, 1024)


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [T, H, D]; k, v [T, K, D] -> [T, H, D]. The scores of all heads, [H, T, T], exist at once."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * scale  # [H, T, T]
    scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(0, 1)


class Case:
    """One prompt of `length` tokens: q, k, v, and, for the paged ways, a cache that holds k and v already."""

    def __init__(self, length: int, device: torch.device, dtype: torch.dtype, block_size: int | None = None):
        self.length, self.scale = length, D**-0.5
        self.q, self.k, self.v = (torch.randn(length, n, D, device=device, dtype=dtype) for n in (H, K, K))
        if block_size is None:
            return
        blocks = -(-length // block_size)
        self.cache = [torch.zeros(blocks * block_size, K, D, device=device, dtype=dtype) for _ in range(2)]
        for cache, new in zip(self.cache, (self.k, self.v)):
            cache[:length] = new
        int32 = {"dtype": torch.int32, "device": device}
        self.metadata = AttentionMetadata(torch.arange(length, device=device), torch.arange(blocks, **int32)[None], torch.tensor([length], **int32),
                                          torch.tensor([0, length], **int32), block_size, writes_all=True)

    def paged(self, backend: attention.AttentionBackend) -> Tensor:
        self.metadata.plan = backend.prepare(self.metadata, [self.length], [self.length])
        return backend.attend(self.q, *self.cache, self.metadata, self.scale)

    def naive(self) -> Tensor:
        return naive(self.q, self.k, self.v, self.scale)


def ways(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[int], Callable[[], Tensor]]]:
    """Name -> a function of the prompt's length that gives the call to be measured."""
    found: dict[str, Callable[[int], Callable[[], Tensor]]] = {"naive": lambda length: Case(length, device, dtype).naive}
    for name in ("torch_sdpa", "triton", "triton_t4", "flash_attn"):
        if device.type == "cpu" and name.startswith("triton"):
            continue  # the interpreter's time says nothing
        try:
            backend, _ = attention.select(name, device, dtype, (H, K, D))
        except ValueError:
            continue
        found[name] = lambda length, backend=backend: (lambda case=Case(length, device, dtype, backend.default_block_size): case.paged(backend))
    return found


def measure(device: torch.device, memory_gib: float | None = None) -> dict[str, Any]:
    """Every way at every length: seconds, and on a GPU extra bytes; the longest prompt that fits into `memory_gib` of the GPU's memory."""
    on_gpu = device.type == "cuda"
    dtype = torch.float32 if not on_gpu else torch.bfloat16 if has_bfloat16(device) else torch.float16
    rows = []
    for name, make in ways(device, dtype).items():
        for length in GPU_LENGTHS if on_gpu else CPU_LENGTHS:
            try:
                rows.append({"way": name, "length": length, **_one(make(length), device)})
            except torch.OutOfMemoryError:
                rows.append({"way": name, "length": length, "seconds": None, "extra_bytes": None})
            _forget(device)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if on_gpu else "cpu", "dtype": str(dtype).removeprefix("torch."), "rows": rows}
    if on_gpu:
        result["memory_gib"] = memory_gib or gpu_memory(device)[1] / GIB
        result["longest"] = _longest(result, ways(device, dtype)["naive"], device, dtype.itemsize)
    return result


def _one(call: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
    call()  # compiles
    extra = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        extra = torch.cuda.max_memory_allocated(device) - before
    return {"seconds": median_seconds(call, device, repeats=5), "extra_bytes": extra}


def _forget(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _longest(result: dict[str, Any], make_naive: Callable[[int], Callable[[], Tensor]], device: torch.device, itemsize: int) -> dict[str, int]:
    """Tokens of the longest prompt, one layer: naive's by halving the interval until it is known to 2%, the others' from their bytes a token."""
    memory = int(result["memory_gib"] * GIB)
    inputs = (H + 4 * K) * D * itemsize  # a token's q, k and v, and its K and V in the cache
    longest = {}
    for name in dict.fromkeys(row["way"] for row in result["rows"]):
        measured = [row for row in result["rows"] if row["way"] == name and row["extra_bytes"] is not None]
        if name == "naive" or not measured:
            continue
        longest[name] = int(memory / (inputs + measured[-1]["extra_bytes"] / measured[-1]["length"]))
    limit = MemoryLimit(device, memory / gpu_memory(device)[1])
    try:
        low, high = 256, int((memory / (2 * H * itemsize)) ** 0.5) + 256  # two copies of the scores cannot fit above
        while high - low > 0.02 * high:
            length = (low + high) // 2
            low, high = (length, high) if _fits(make_naive, length, device) else (low, length)
    finally:
        limit.restore()
    return {"naive": low, **longest}


def _fits(make: Callable[[int], Callable[[], Tensor]], length: int, device: torch.device) -> bool:
    try:
        make(length)()
        torch.cuda.synchronize(device)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()


def show(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['device']}, {result['dtype']}: one prompt's attention in one layer of Qwen3-0.6B's shape"
    names = list(dict.fromkeys(row["way"] for row in result["rows"]))
    by = {(row["way"], row["length"]): row for row in result["rows"]}
    yield f"  {'tokens':>8}" + "".join(f"{name:>26}" for name in names)
    for length in dict.fromkeys(row["length"] for row in result["rows"]):
        yield f"  {length:8,}" + "".join(f"{_cell(by[name, length], by['naive', length]):>26}" for name in names)
    for name, tokens in result.get("longest", {}).items():
        yield f"  longest prompt in {result['memory_gib']:.0f} GiB, {name}: {tokens:,} tokens" + ("" if name == "naive" else " (from its bytes a token)")


def _cell(row: dict[str, Any], base: dict[str, Any]) -> str:
    if row["seconds"] is None:
        return "out of memory"
    times = f" {base['seconds'] / row['seconds']:.1f}x" if base["seconds"] and row is not base else ""
    extra = "" if row["extra_bytes"] is None else f" +{row['extra_bytes'] / 2**20:,.0f} MiB"
    return f"{1e3 * row['seconds']:.2f} ms{times}{extra}"
