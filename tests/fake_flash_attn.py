"""flash-attn's two functions in plain torch, with its published argument names and its refusals: what the backend is tried against on a CPU."""

import sys
import types

import torch

PAGE = 256


def _paged(cache, table, length):
    if cache.shape[1] % PAGE:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    return cache[table.long()].flatten(0, 1)[:length]  # [length, K, D]


def _attend(q, k, v, scale, causal):
    """Lower-right causal, and zeros for a row without keys, as flash-attn has it since 2.1."""
    if not len(k):
        return torch.zeros_like(q)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).double() for x in (k, v))
    scores = torch.einsum("thd,mhd->htm", q.double(), k) * scale
    if causal:
        scores.masked_fill_(torch.ones(len(q), len(k), dtype=torch.bool).triu_(len(k) - len(q) + 1), -torch.inf)
    return torch.einsum("htm,mhd->thd", scores.softmax(-1), v).to(q.dtype)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
                           window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    lengths, counts = cu_seqlens_k.diff().tolist(), cu_seqlens_q.diff().tolist()
    assert max_seqlen_q >= max(counts) and max_seqlen_k >= max(lengths)
    rows = zip(q.split(counts), block_table, lengths)
    return torch.cat([_attend(one, _paged(k, table, n), _paged(v, table, n), softmax_scale, causal) for one, table, n in rows])


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                            cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1)):
    assert q.dim() == 4 and cache_seqlens.dtype == block_table.dtype == torch.int32
    rows = zip(q, block_table, cache_seqlens.tolist())
    return torch.stack([_attend(one, _paged(k_cache, table, n), _paged(v_cache, table, n), softmax_scale, causal) for one, table, n in rows])


def install(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", module)
