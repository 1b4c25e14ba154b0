"""store_kvcache: write each token's key and value to its slot of the paged cache. Taught in notebook 03.

The slot is all that the kernel knows of blocks and sequences: slot_mapping[t] says where token t goes, -1 that it goes nowhere.
"""

from __future__ import annotations

from torch import Tensor

from minivllm.kernels.jit import cdiv, gdc_launch_dependents, gdc_wait, has_early_launch, jit, next_power_of_2, tl, uses_triton

_TOKENS = 4  # for one program: with 1024 numbers a token in 16 bit, 16 KB of keys and values in flight


@jit(changing=("num_tokens",))
def _store_kernel(k, v, k_cache, v_cache, slot_mapping, num_tokens, k_stride, v_stride,
                  WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr):
    """One program copies TOKENS rows of WIDTH = K * D numbers, of k and of v. COLUMNS is WIDTH rounded up to a power of two.

    EARLY: the kernel comes up while the one before it ends, and lets the next one do so (from sm90 on).
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()  # until what came before has written k and v
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    wanted = (slots >= 0)[:, None] & (columns < WIDTH)[None, :]  # [TOKENS, COLUMNS]
    to = slots[:, None] * WIDTH + columns[None, :]
    keys = tl.load(k + tokens.to(tl.int64)[:, None] * k_stride + columns[None, :], mask=wanted)
    values = tl.load(v + tokens.to(tl.int64)[:, None] * v_stride + columns[None, :], mask=wanted)
    tl.store(k_cache + to, keys, mask=wanted, cache_modifier=".cs")  # written once, and not worth a place in the cache
    tl.store(v_cache + to, values, mask=wanted, cache_modifier=".cs")


def store_kvcache_triton(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `store_kvcache`, by the kernel. k and v may be parts of a wider row, as the qkv projection leaves them."""
    num_tokens, width = k.shape[0], k.shape[1] * k.shape[2]
    early = has_early_launch(k.device)
    options = {"launch_pdl": True} if early else {}
    if num_tokens:
        _store_kernel[(cdiv(num_tokens, _TOKENS),)](k, v, k_cache, v_cache, slot_mapping, num_tokens, k.stride(0), v.stride(0),
                                                    WIDTH=width, COLUMNS=next_power_of_2(width), TOKENS=_TOKENS, EARLY=early,
                                                    num_warps=max(2, min(8, width // 512)), **options)  # 2 to 8, and all in registers


def store_kvcache_torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `store_kvcache`, in plain torch. Asks the device which slots are wanted, so it cannot be captured in a graph."""
    wanted = slot_mapping >= 0
    k_cache[slot_mapping[wanted]] = k[wanted]
    v_cache[slot_mapping[wanted]] = v[wanted]


def store_kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v [T, K, D], each token's K * D numbers in a row; k_cache, v_cache [N * S, K, D], contiguous; slot_mapping [T] int, -1: write nothing.

    Slots outside the cache are not checked here: whoever makes the mapping must.
    """
    (store_kvcache_triton if uses_triton(k) else store_kvcache_torch)(k, v, k_cache, v_cache, slot_mapping)
