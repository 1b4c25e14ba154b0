"""trial: whether a backend runs on a device, found out by running it. An import that works proves nothing about a GPU."""

from __future__ import annotations

from typing import Any

import torch

from minivllm.attention.metadata import AttentionMetadata
from minivllm.worker.device import current

#: (tokens before, tokens now) of each row: a prompt, a decode, a chunk; and decodes, one of them long enough to be split.
_MIXES = (((0, 5), (9, 1), (3, 4)), ((300, 1), (2, 1)))
#: What was found out, by backend, device, dtype, shape and block size: each is tried once a process.
_FOUND: dict[tuple, str | None] = {}


def trial(backend: Any, device: torch.device, dtype: torch.dtype | None = None, shape: tuple[int, int, int] = (4, 2, 64),
          block_size: int | None = None) -> str | None:
    """None if `backend` attends like torch on `device`, with `shape` (H, K, D) and `block_size`; else what went wrong, in one line."""
    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    block_size = block_size or backend.default_block_size
    key = (backend.name, type(backend), device, dtype, shape, block_size)
    if key not in _FOUND:
        _FOUND[key] = _try(backend, device, dtype, shape, block_size)
    return _FOUND[key]


def _try(backend: Any, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], block_size: int) -> str | None:
    from minivllm.attention.torch_sdpa import TorchSDPABackend

    try:
        with torch.inference_mode(), current(device):
            got, want = (_attend(one, device, dtype, shape, block_size) for one in (backend, TorchSDPABackend()))
            error, allowed = (got - want).abs().max().item(), max(1e-4, 4 * torch.finfo(dtype).eps * want.abs().max().item())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return None if error < allowed else f"its result is off by {error:.2g}"  # a few roundings; `not <` catches NaN too


def _attend(backend: Any, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], block_size: int) -> torch.Tensor:
    """One small mixed step, and one of decodes alone. The numbers are the same for every backend."""
    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    blocks = -(-max(sum(row) for mix in _MIXES for row in mix) // block_size)  # of each row, which lie in reverse order
    k_cache, v_cache = (draw(3 * blocks * block_size, kv_heads, head_dim) for _ in range(2))
    results = []
    for mix in _MIXES:
        counts, contexts = [n for _, n in mix], [before + n for before, n in mix]
        tables = torch.tensor([[(row + 1) * blocks - 1 - i for i in range(blocks)] for row in range(len(mix))], dtype=torch.int32)
        slots = [int(tables[row, position // block_size]) * block_size + position % block_size
                 for row, (before, n) in enumerate(mix) for position in range(before, before + n)]
        starts = [sum(counts[:row]) for row in range(len(mix) + 1)]
        metadata = AttentionMetadata(torch.tensor(slots, device=device), tables.to(device), torch.tensor(contexts, dtype=torch.int32, device=device),
                                     torch.tensor(starts, dtype=torch.int32, device=device), block_size, True)
        metadata.plan = backend.prepare(metadata, counts, contexts)
        q, k, v = (draw(sum(counts), n, head_dim) for n in (heads, kv_heads, kv_heads))
        backend.store(k, v, k_cache, v_cache, metadata)
        results.append(backend.attend(q, k_cache, v_cache, metadata, head_dim ** -0.5))
    return torch.cat(results).float()
