"""Planted faults where K/V is stored and read: an offset, a mask, and a buffer that is used again.

Each stands beside the right code of the same interface. Knows no engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.teach.bugs.fault import Comparison, Fault
from minivllm.teach.trial import BadInput, require_int

_NUM_SLOTS = 16


def store_kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: list[int]) -> None:
    """k, v [T, K, D] into k_cache, v_cache [N * S, K, D], as a kernel does it: a program for each token, offsets into flat memory."""
    num_kv_heads, head_dim = k.shape[1:]
    size = num_kv_heads * head_dim
    flat_k, flat_v = k_cache.view(-1), v_cache.view(-1)
    for token, slot in enumerate(slot_mapping):
        if slot == -1:
            continue
        offset = slot * head_dim
        flat_k[offset:offset + size] = k[token].flatten()
        flat_v[offset:offset + size] = v[token].flatten()


def _store_by_index(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: list[int]) -> None:
    for token, slot in enumerate(slot_mapping):
        if slot != -1:
            k_cache[slot], v_cache[slot] = k[token], v[token]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [H, Tq, D]; k, v [H, Tk, D] -> [H, Tq, D]; the queries are the last Tq of the Tk positions."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _lower_right_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(k.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=positions <= positions[k.shape[1] - q.shape[1]:, None])


class KVBuffer:
    """A contiguous KV cache [2, C, K, D], allocated once and used by one sequence after the other."""

    def __init__(self, capacity: int, num_kv_heads: int, head_dim: int):
        self.cache = torch.zeros(2, capacity, num_kv_heads, head_dim)
        self.position = self.length = 0

    def start(self) -> None:
        """Begin a new sequence: what it writes goes to the front again."""
        self.position = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v [T, K, D] behind what the sequence has."""
        end = self.position + k.shape[0]
        self.cache[0, self.position:end], self.cache[1, self.position:end] = k, v
        self.position = end
        self.length = max(self.length, end)

    def read(self) -> Tensor:
        """What attention reads: [2, length, K, D]."""
        return self.cache[:, :self.length]


class _RightBuffer(KVBuffer):
    def start(self) -> None:
        self.position = self.length = 0


def _compare_stores(fault: Fault, num_kv_heads: Any, slot_mapping: Any, head_dim: Any) -> Comparison:
    heads, dim = require_int("num_kv_heads", num_kv_heads, 1, 8), require_int("head_dim", head_dim, 1, 16)
    if not isinstance(slot_mapping, (list, tuple)) or not slot_mapping:
        raise BadInput(f"slot_mapping must be a list of at least one slot, got {slot_mapping!r:.60}")
    slots = [require_int("a slot", slot, -1, _NUM_SLOTS - 1) for slot in slot_mapping]
    written = [slot for slot in slots if slot >= 0]
    if len(set(written)) < len(written):
        raise BadInput("two tokens may not go to the same slot")
    k = torch.arange(1.0, len(slots) * heads + 1).view(-1, heads, 1).expand(-1, -1, dim)  # [T, K, D]: a number for each token and head
    caches = [torch.zeros(2, _NUM_SLOTS, heads, dim) for _ in range(2)]
    for store, cache in zip((fault.right, fault.faulty), caches):
        store(k, -k, cache[0], cache[1], slots)
    right, faulty = (cache[0, :, :, 0].int() for cache in caches)  # [slots, K]
    differs = (caches[0] != caches[1]).flatten(2).any(dim=2).any(dim=0).nonzero()
    if not len(differs):
        hint = ("only slot 0 is written, and its offset is 0 either way: write to a later slot" if heads > 1 else
                "with one kv head a slot is head_dim numbers long, and both offsets are the same: take more heads")
        return Comparison(False, "the same cache", "the same cache", "nothing is written at all: -1 means no slot" if not written else hint)
    slot = int(differs[0])
    return Comparison(True, f"the right store leaves {right[slot].tolist()} in slot {slot} (the first number of each kv head's key),",
                      f"the faulty one leaves {faulty[slot].tolist()} there")


def _compare_masks(fault: Fault, num_queries: Any, num_keys: Any) -> Comparison:
    queries, keys = require_int("num_queries", num_queries, 1, 256), require_int("num_keys", num_keys, 1, 256)
    if queries > keys:
        raise BadInput(f"{queries} queries and {keys} keys: the queries are the last of the keys' positions, so there are no more of them "
                       "than keys")
    # Equal scores and one-hot values: the result tells which keys were read.
    q, k, v = torch.zeros(1, queries, keys), torch.zeros(1, keys, keys), torch.eye(keys)[None]
    right, faulty = ((attend(q, k, v)[0] > 0).sum(dim=1).tolist() for attend in (fault.right, fault.faulty))
    said = [f"query 0 reads {counts[0]} key{'s' if counts[0] > 1 else ''}" for counts in (right, faulty)]
    if right == faulty:
        return Comparison(False, f"the same result ({said[0]} of {keys})", "",
                          "with equal lengths both triangles are the same: let some keys be in the cache already, so that there are more "
                          "keys than queries")
    return Comparison(True, f"with the right mask {said[0]} of {keys},", f"with the faulty one {said[1]}")


def _compare_buffers(fault: Fault, first_tokens: Any, second_tokens: Any) -> Comparison:
    first, second = require_int("first_tokens", first_tokens, 1, 256), require_int("second_tokens", second_tokens, 1, 256)
    reads = []
    for make in (fault.right, fault.faulty):
        buffer = make(256, 1, 1)
        for value, num_tokens in ((1.0, first), (2.0, second)):
            buffer.start()
            buffer.append(*torch.full((2, num_tokens, 1, 1), value))
        reads.append(buffer.read().flatten(1)[0].tolist())
    if reads[0] == reads[1]:
        why = "is as long as" if first == second else "is longer than"
        return Comparison(False, f"{second} keys to read, all of the second sequence", "", f"the second sequence {why} the first and "
            "overwrites all that it "
                          f"left: what is left over shows only behind a shorter one")
    return Comparison(True, f"for the second sequence the right buffer gives {len(reads[0])} keys to read,",
                      f"the faulty one {len(reads[1])}, {reads[1].count(1.0)} of them the first sequence's")


FAULTS = [
    Fault("slots_by_head_dim", "a slot that is as long as one head",
          "A store kernel takes slot * head_dim for the place of a slot, where each slot is num_kv_heads * head_dim numbers long. "
          "Published articles on nano-vLLM's kernel show this offset in their explanation; with one kv head it is even right.",
          store_kvcache, _store_by_index, _compare_stores, {"num_kv_heads": ..., "slot_mapping": ..., "head_dim": 4},
          exposing={"num_kv_heads": 2, "slot_mapping": [3, 4]}, harmless={"num_kv_heads": 1, "slot_mapping": [3, 4]}),
    Fault("upper_left_mask", "a triangle in the wrong corner",
          "torch's is_causal puts the triangle into the upper left corner, as if the first query were position 0. It is right for a whole "
          "prompt, so it passed the tests of engines whose chunks and prefix hits then read too little.",
          causal_attention, _lower_right_attention, _compare_masks, {"num_queries": ..., "num_keys": ...},
          exposing={"num_queries": 2, "num_keys": 5}, harmless={"num_queries": 4, "num_keys": 4}),
    Fault("stale_buffer", "a buffer that remembers the last sequence",
          "A KV buffer is allocated once and used for one sequence after the other, and its length is not set back. The next, shorter "
          "sequence attends to what the longer one left behind: answers that depend on who came before.",
          KVBuffer, _RightBuffer, _compare_buffers, {"first_tokens": ..., "second_tokens": ...},
          exposing={"first_tokens": 5, "second_tokens": 3}, harmless={"first_tokens": 3, "second_tokens": 5}),
]
