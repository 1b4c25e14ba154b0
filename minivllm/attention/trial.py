"""trial: whether a backend runs on a device, found out by running it. An import that works proves nothing about a GPU."""

from __future__ import annotations

import functools

import torch

from minivllm.attention.metadata import AttentionMetadata

_SHAPE = (4, 2, 64)  # query heads, kv heads, head dim
_MIX = ((0, 5), (9, 1), (3, 4))  # (tokens before, tokens now): a prompt, a decode, a chunk


@functools.cache
def _try(kind: type, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    from minivllm.attention.torch_sdpa import TorchSDPABackend

    backend = kind(dot=name == "triton") if name.startswith("triton") else kind()
    with torch.inference_mode():
        try:
            got, want = _attend(backend, device, dtype), _attend(TorchSDPABackend(), device, dtype)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    error = (got - want).abs().max().item()
    return None if error < 0.02 else f"its result is off by {error:.2g}"  # the rounding of 16 bit; `not <` catches NaN too


def trial(backend: object, device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """None if `backend` attends like torch on `device`; else what went wrong, in one line. Each kind is tried once a process."""
    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    return _try(type(backend), backend.name, device, dtype)


def _attend(backend: object, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """One small mixed step, and one of decodes alone. The numbers are the same for every backend."""
    block_size, (heads, kv_heads, head_dim) = 16, _SHAPE
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    k_cache, v_cache = draw(8 * block_size, kv_heads, head_dim), draw(8 * block_size, kv_heads, head_dim)
    results = []
    for mix in (_MIX, ((9, 1), (2, 1))):
        counts, contexts = [n for _, n in mix], [before + n for before, n in mix]
        tables = torch.tensor([[2 * row + 1, 2 * row] for row in range(len(mix))], dtype=torch.int32, device=device)
        slots = [(2 * row + 1) * block_size + position for row, (before, n) in enumerate(mix) for position in range(before, before + n)]
        starts = [sum(counts[:row]) for row in range(len(mix) + 1)]
        metadata = AttentionMetadata(torch.tensor(slots, device=device), tables, torch.tensor(contexts, dtype=torch.int32, device=device),
                                     torch.tensor(starts, dtype=torch.int32, device=device), block_size, True)
        metadata.plan = backend.prepare(metadata, counts, contexts)
        q, k, v = (draw(sum(counts), n, head_dim) for n in (heads, kv_heads, kv_heads))
        backend.store(k, v, k_cache, v_cache, metadata)
        results.append(backend.attend(q, k_cache, v_cache, metadata, head_dim ** -0.5))
    return torch.cat(results).float()
