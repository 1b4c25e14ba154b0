"""Attention in plain torch: gather a sequence's pages into one tensor, then torch's scaled_dot_product_attention.

Right on every device and the reference for the faster ones; it copies every K and V it reads. Built in notebook 04.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.attention.metadata import AttentionMetadata

#: Decodes are gathered together only while they are at least half as long as the longest, so that padding never doubles the
#: work, and only up to this many tokens, so that the copy stays small beside the pool.
MOST_GATHERED_TOKENS = 131_072


@dataclass(slots=True)
class Group:
    """Rows that one SDPA call serves: either one row with several tokens (G = 1), or G decodes of similar length.

    tokens: the rows' places in the batch: a slice where they lie in a row, else an index [G].
    slots [G, M]: where their K/V lies, M the longest context. decodes: one token a row.
    mask: bool, True where a token may look: [n, M] for one row, [G, 1, 1, M] for decodes; None where all may.
    causal: the row is a whole prompt, so torch's own (upper-left) causal mask is the right one.
    """

    tokens: slice | Tensor
    slots: Tensor
    mask: Tensor | None
    decodes: bool
    causal: bool = False


class TorchSDPABackend:
    name = "torch_sdpa"
    default_block_size = 16

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> list[Group]:
        """Which calls this step needs. One for each row of several tokens, and a few for all the decodes together."""
        groups, decodes, begin = [], [], 0
        for row, (num_tokens, context) in enumerate(zip(query_lens, context_lens)):
            if num_tokens == 1:
                decodes.append((context, row, begin))
            else:
                groups.append(_prefill_group(metadata, row, begin, num_tokens, context))
            begin += num_tokens
        decodes.sort(reverse=True)
        while decodes:
            longest = decodes[0][0]
            fitting = max(1, MOST_GATHERED_TOKENS // longest)
            chosen = [item for item in decodes[:fitting] if 2 * item[0] >= longest]
            del decodes[:len(chosen)]
            groups.append(_decode_group(metadata, chosen))
        return groups

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> None:
        slots = metadata.slot_mapping
        if not metadata.writes_all:
            kept = slots >= 0
            slots, k, v = slots[kept], k[kept], v[kept]
        k_cache.index_copy_(0, slots, k)
        v_cache.index_copy_(0, slots, v)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        if len(metadata.plan) == 1:  # it covers all tokens, in order
            return _attend(q, k_cache, v_cache, metadata.plan[0], scale)
        out = torch.empty_like(q)  # [T, H, D]
        for group in metadata.plan:
            out[group.tokens] = _attend(q[group.tokens], k_cache, v_cache, group, scale)
        return out


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: Group, scale: float) -> Tensor:
    keys, values = k_cache[group.slots], v_cache[group.slots]  # [G, M, K, D]: the copy that a paged kernel avoids
    return (_attend_decodes if group.decodes else _attend_prefill)(q, keys, values, group, scale)


def _attend_decodes(q: Tensor, keys: Tensor, values: Tensor, group: Group, scale: float) -> Tensor:
    """q [G, H, D]. The H / K query heads that share a kv head are handed over as if they were H / K tokens of one head."""
    num_rows, num_heads, head_dim = q.shape
    packed = q.reshape(num_rows, keys.shape[2], -1, head_dim)  # [G, K, H / K, D]
    out = F.scaled_dot_product_attention(packed, keys.transpose(1, 2), values.transpose(1, 2), group.mask, scale=scale)
    return out.reshape(num_rows, num_heads, head_dim)


def _attend_prefill(q: Tensor, keys: Tensor, values: Tensor, group: Group, scale: float) -> Tensor:
    """q [n, H, D]. The kv heads become the batch, and each is looked at, not copied, by its H / K query heads."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    shape = (num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    packed = q.transpose(0, 1).unflatten(0, shape[:2])  # [K, H / K, n, D]
    keys, values = (x[0].transpose(0, 1).unsqueeze(1).expand(shape) for x in (keys, values))  # [K, H / K, M, D]
    out = F.scaled_dot_product_attention(packed, keys, values, group.mask, is_causal=group.causal, scale=scale)
    return out.flatten(0, 1).transpose(0, 1)  # [n, H, D]


def _prefill_group(metadata: AttentionMetadata, row: int, begin: int, num_tokens: int, context: int) -> Group:
    table = metadata.block_tables[row]
    positions = torch.arange(context, device=table.device)
    whole = num_tokens == context
    # Lower-right causal: the row's tokens are the last ones of its context.
    mask = None if whole else positions <= positions[context - num_tokens:, None]
    return Group(slice(begin, begin + num_tokens), slots_of(table, positions, metadata.block_size)[None], mask, decodes=False, causal=whole)


def _decode_group(metadata: AttentionMetadata, decodes: list[tuple[int, int, int]]) -> Group:
    """Decodes as (context, row, place in the batch), the longest first."""
    device = metadata.block_tables.device
    longest, shortest = decodes[0][0], decodes[-1][0]
    decodes.sort(key=lambda item: item[2])  # in the batch's order again
    contexts, rows, begins = torch.tensor(list(zip(*decodes)), device=device)
    first, last = decodes[0][2], decodes[-1][2]
    tokens = slice(first, last + 1) if last - first == len(decodes) - 1 else begins
    positions = torch.arange(longest, device=device)
    # A short row's padding points at its own last slot, never at memory that holds somebody else's NaN.
    padded = torch.minimum(positions, contexts[:, None] - 1)  # [G, M]
    mask = None if shortest == longest else (positions < contexts[:, None])[:, None, None]
    return Group(tokens, slots_of(metadata.block_tables[rows], padded, metadata.block_size), mask, decodes=True)


def slots_of(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slots of `positions` [..., M] through `block_table` [..., blocks]: block_table[pos // S] * S + pos % S. int64."""
    blocks = block_table.long().gather(-1, positions // block_size)
    return blocks * block_size + positions % block_size
