"""What fusing is worth, and what a capture forbids: three parts of a layer in plain torch, compiled, and as Triton kernels.

The measurements need a CUDA GPU; the list of operations does not. Shown by notebook 09.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.kernels.rms_norm import add_rms_norm_torch, add_rms_norm_triton
from minivllm.kernels.rope_store import norm_rope_store_triton, rotate
from minivllm.kernels.silu_and_mul import silu_and_mul_torch, silu_and_mul_triton
from minivllm.teach.gpu_trace import in_total, traced

ROWS = (8, 256, 2048)


def norm_rope_store_plain(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, positions: Tensor,
                          k_cache: Tensor, v_cache: Tensor, slots: Tensor, num_heads: int) -> Tensor:
    """The package's torch twin without its mask: every slot is real, so that nothing asks the device."""
    num_kv_heads, head_dim = k_cache.shape[1:]
    q, k, v = qkv.view(len(qkv), -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    qk = torch.cat((F.rms_norm(q, (head_dim,), q_weight, eps), F.rms_norm(k, (head_dim,), k_weight, eps)), dim=1)
    q, k = rotate(qk, cos, sin, positions).split((num_heads, num_kv_heads), dim=1)
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)
    return q


PARTS: dict[str, tuple[Callable, Callable]] = {"add_rms_norm": (add_rms_norm_torch, add_rms_norm_triton),
                                               "norm_rope_store": (norm_rope_store_plain, norm_rope_store_triton),
                                               "silu_and_mul": (silu_and_mul_torch, silu_and_mul_triton)}


def measure(model: dict[str, Any], rows: tuple[int, ...] = ROWS) -> dict[str, Any]:
    """For each of PARTS and each way: launches of a call, and microseconds for each count of rows, called from Python and in a graph."""
    return {name: {way: _of(run, name, model, rows) for way, run in
                   (("torch", plain), ("compiled", torch.compile(plain, dynamic=False)), ("triton", kernel))}
            for name, (plain, kernel) in PARTS.items()} | {"rows": list(rows)}


def _of(run: Callable, name: str, model: dict[str, Any], rows: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {"eager_us": [], "graph_us": []}
    begin = time.perf_counter()
    try:
        run(*arguments(name, model, rows[0], torch.device("cuda")))
        torch.cuda.synchronize()
        found["first_call_s"] = round(time.perf_counter() - begin, 2)
        for count in rows:
            _timed(lambda args=arguments(name, model, count, torch.device("cuda")): run(*args), found)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:200]
    return found


def _timed(call: Callable[[], object], found: dict[str, Any]) -> None:
    from minivllm.bench.kernels import graph_seconds
    from minivllm.teach.graph_bench import device_us

    for _ in range(3):
        call()
    found["eager_us"].append(device_us(call, calls=50))
    try:
        found["graph_us"].append(round(1e6 * graph_seconds([call] * 20), 2))
    except RuntimeError:  # a mask asks the device: no graph
        torch.cuda.synchronize()
        found["graph_us"].append(None)
    found["launches"] = in_total(traced(call))["launches"]


def arguments(name: str, model: dict[str, Any], rows: int, device: torch.device, dtype: torch.dtype | None = None) -> tuple:
    """What each of PARTS is called with, at the model's sizes; random, but for slots that are all different."""
    half = torch.bfloat16 if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    dtype = dtype or half
    H, K, D, hidden = (model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"))
    draw = lambda *shape: torch.randn(*shape, device=device).to(dtype)
    if name == "add_rms_norm":
        return draw(rows, hidden), draw(rows, hidden), draw(hidden), 1e-6
    if name == "silu_and_mul":
        return (draw(rows, 2 * model["intermediate_size"]),)
    angles = torch.randn(4096, D // 2, device=device)
    slots, positions = torch.randperm(4096, device=device)[:rows], torch.randint(4096, (rows,), device=device)
    return (draw(rows, (H + 2 * K) * D), draw(D), draw(D), 1e-6, angles.cos(), angles.sin(), positions, draw(4096, K, D), draw(4096, K, D),
            slots, H)


def _read_a_number(x: Tensor) -> None:
    x.sum().item()


def _branch(x: Tensor) -> None:
    if x.sum() > 0:
        x.add_(1)


def _select_by_mask(x: Tensor) -> None:
    x[x > 0].sum()


def _send_a_list(x: Tensor) -> None:
    x[:2] += torch.tensor([1.0, 2.0], device=x.device)


def _wait(x: Tensor) -> None:
    x.add_(1)
    torch.cuda.synchronize()


#: What a capture refuses, by what the notebook calls it.
FORBIDDEN: dict[str, Callable[[Tensor], None]] = {
    "x.sum().item()": _read_a_number, "if x.sum() > 0": _branch, "x[x > 0]": _select_by_mask,
    "torch.tensor([1.0, 2.0], device=...)": _send_a_list, "torch.cuda.synchronize()": _wait}


def forbidden() -> dict[str, str]:
    """What CUDA answers to each, the first line; "allowed" where it has no objection. May leave the device unusable: run it last."""
    found = {}
    for name, run in FORBIDDEN.items():
        x = torch.ones(8, device="cuda")
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                run(x)
            found[name] = "allowed"
        except Exception as error:
            while error.__context__ is not None:  # the end of a failed capture raises once more
                error = error.__context__
            found[name] = str(error).splitlines()[0][:160]
    return found


def errors_of_captures() -> dict[str, str]:
    """`forbidden` in a process of its own."""
    command = "import json; from minivllm.teach import fusion_bench; print(json.dumps(fusion_bench.forbidden()))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-250:])
    return json.loads(done.stdout.strip().splitlines()[-1])
