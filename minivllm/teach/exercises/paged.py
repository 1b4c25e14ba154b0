"""Exercises of notebook 04: the slots of a run of positions, and a decode that walks the block table page by page."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.teach.exercise import Case, Exercise, Mistake


def slot_mapping(block_table: list[int], start: int, count: int, block_size: int) -> list[int]:
    """The slots of positions start, ..., start + count - 1: block_table[pos // S] * S + pos % S."""
    return [block_table[pos // block_size] * block_size + pos % block_size for pos in range(start, start + count)]


def _slots_reference(block_table: list[int], start: int, count: int, block_size: int) -> Tensor:
    """Every slot of the table in a row, then the part that is asked for."""
    pages = torch.tensor(block_table)[:, None] * block_size + torch.arange(block_size)
    return pages.flatten()[start:start + count]


def _slots(at: Callable) -> Callable:
    """A wrong slot_mapping: at(block_table, pos, S, index in the run) -> slot."""
    return lambda table, start, count, size: [at(table, pos, size, index) for index, pos in enumerate(range(start, start + count))]


def _by_whole_pages(table: list[int], start: int, count: int, size: int) -> list[int]:
    first, last = start // size, (start + count - 1) // size
    return [slot for block in table[first:last + 1] for slot in range(block * size, (block + 1) * size)]


SLOT_MAPPING = Exercise("slot_mapping", [Case(dict(zip(("block_table", "start", "count", "block_size"), args)), note) for *args, note in (
    ([7, 2, 5], 0, 10, 4, "a prompt of ten tokens"),
    ([7, 2, 5], 8, 1, 4, "a decode: its token is the first of a block"),
    ([7, 2, 5], 7, 1, 4, "a decode: its token is the last of a block"),
    ([7, 2, 5], 3, 3, 4, "a chunk that crosses the end of a block"),
    ([3, 0, 9, 1], 0, 4, 1, "blocks of one token"),
    ([6], 0, 5, 16, "fewer tokens than a block holds"),
    ([31, 4, 17, 8, 22, 5], 40, 50, 16, "a long chunk, from the middle of a block to the middle of another"),
)], _slots_reference, kind="tensor", shape="count", mistakes=[
    Mistake(_slots(lambda t, p, s, i: p), "these are positions: a slot lies in the block that the table names, block_table[pos // "
            "block_size]"),
    Mistake(_slots(lambda t, p, s, i: t[p // s]), "these are block numbers: a block has block_size slots, so multiply by it and add the "
            "place in the block, pos % block_size"),
    Mistake(_slots(lambda t, p, s, i: t[p // s] + p % s), "the block number is not multiplied: block b begins at slot b * block_size"),
    Mistake(_slots(lambda t, p, s, i: t[p // s] * s), "every token of a block gets its first slot: add the place in the block, pos % "
            "block_size"),
    Mistake(_slots(lambda t, p, s, i: t[p // s] * s + p), "the whole position is added: the place in the block is pos % block_size"),
    Mistake(_slots(lambda t, p, s, i: t[0] * s + p), "the run is taken to lie in a row from the first block on: ask the table for each "
            "position, block_table[pos // block_size]"),
    Mistake(_slots(lambda t, p, s, i: t[i // s] * s + i % s), "`start` is not used: the first position is start, not 0", everywhere=True),
    Mistake(_slots(lambda t, p, s, i: t[p // s] * s + i % s), "the block is right, but the place in it counts from the first token of "
            "the run: it is pos % block_size with pos = start + i"),
    Mistake(_slots(lambda t, p, s, i: t[(p - i) // s] * s + p % s), "all tokens are put into the block of the first one: look at the "
            "table for each position"),
    Mistake(_slots(lambda t, p, s, i: t[i // s] * s + p % s), "the place in the block is right, but the block counts from the first "
            "token of the run: it is block_table[pos // block_size] with pos = start + i"),
    Mistake(_slots(lambda t, p, s, i: t[p % len(t)] * s + p % s), "the table is asked with pos % ...: the index of the block is pos // "
            "block_size, rounded down"),
    Mistake(_slots(lambda t, p, s, i: t[p % s] * s + p // s), "// and % are swapped: pos // block_size is the index in the table, pos % "
            "block_size the place in the block", everywhere=True),
    Mistake(lambda t, a, n, s: slot_mapping(t, a + 1, n, s), "it begins one position too late: `start` itself is the first",
            everywhere=True),
    Mistake(_slots(lambda t, p, s, i: t[p // 16] * 16 + p % 16), "the block size is fixed at 16 here: use the argument block_size",
            same_text=True),
    Mistake(_slots(lambda t, p, s, i: t[p // 4] * 4 + p % 4), "the block size is fixed at 4 here: use the argument block_size",
            same_text=True),
    Mistake(lambda t, a, n, s: slot_mapping(t, 0, a + n, s), "it begins at position 0: wanted are the `count` positions from `start` on"),
    Mistake(lambda t, a, n, s: slot_mapping(t, a, max(0, n - a), s), "it ends at position `count`: count is how many there are, so the "
            "last is start + count - 1", everywhere=True),
    Mistake(lambda t, a, n, s: slot_mapping(t, a, n - 1, s), "the last one is missing: range leaves out its end, so it must be start + "
            "count"),
    Mistake(lambda t, a, n, s: slot_mapping([*t, 0], a, n + 1, s), "one too many: range(start, start + count) has count numbers"),
    Mistake(_slots(lambda t, p, s, i: t[p / s] * s + p % s), "a table's index must be a whole number: pos // block_size rounds down, / "
            "gives a fraction", same_text=True),
    Mistake(_by_whole_pages, "these are all slots of the blocks that are touched: only the positions start to start + count - 1 are "
            "wanted"),
    Mistake(lambda t, a, n, s: sorted(slot_mapping(t, a, n, s)), "the slots are right, but sorted: slot i belongs to position start + i"),
])


def paged_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: list[int], context_len: int) -> Tensor:
    """q [H, D]; k_cache, v_cache [N, S, K, D] -> [H, D]: one page after the other, with a running maximum and sum."""
    return _walk(q, k_cache, v_cache, block_table, context_len)


def _oracle(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: list[int], context_len: int) -> Tensor:
    """Gather, then torch's own attention in float64."""
    keys, values = (cache[block_table].flatten(0, 1)[:context_len].double().transpose(0, 1)[None] for cache in (k_cache, v_cache))
    return F.scaled_dot_product_attention(q.double()[None, :, None], keys, values, enable_gqa=True)[0, :, 0].to(q.dtype)


def _interleave(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, dim=1)


def _walk(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: list[int], context: int, *, page: Callable | None = None,
          count: Callable | None = None, pages: Callable | None = None, scale: float | None = None, first: float = -torch.inf,
          fade: Callable | None = None, fade_mixed: bool = True, fade_total: bool = True, spread: Callable = _interleave,
          finish: Callable | None = None, swap: bool = False, best_of: Callable | None = None) -> Tensor:
    """The walk, each of its decisions open: this is what the mistakes are made of."""
    size, groups = k_cache.shape[1], q.shape[0] // k_cache.shape[2]
    best = torch.full((len(q), 1), first)
    total, mixed = torch.zeros(len(q), 1), torch.zeros(q.shape)
    for index in range((pages or (lambda n, s, t: -(-n // s)))(context, size, table)):
        block = (page or (lambda t, i: t[i]))(table, index)
        tokens = (count or (lambda n, i, s: min(s, n - i * s)))(context, index, size)
        keys, values = (spread(cache[block, :tokens].float(), groups) for cache in (k_cache, v_cache))  # [tokens, H, D]
        scores = torch.einsum("hd,thd->ht", q.float(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
        higher = (best_of or torch.maximum)(best, scores.amax(1, keepdim=True)) if tokens else best
        faded, weights = (fade or (lambda old, new: torch.exp(old - new)))(best, higher), torch.exp(scores - higher)
        total = (total * faded if fade_total else total) + weights.sum(1, keepdim=True)
        mixed = (mixed * faded if fade_mixed else mixed) + torch.einsum("ht,thd->hd", weights, keys if swap else values)
        best = higher
    return (finish or (lambda mixed, total: mixed / total))(mixed, total).to(q.dtype)


def _wrong(**changes) -> Callable:
    return lambda q, k, v, table, n: _walk(q, k, v, table, n, **{name: change(q) if name == "scale" else change
                                                                 for name, change in changes.items()})


def _of_each_page(join: Callable) -> Callable:
    """A softmax for each page by itself, the pages' results joined as if each counted alike."""
    def function(q: Tensor, k: Tensor, v: Tensor, table: list[int], context: int) -> Tensor:
        size = k.shape[1]
        parts = [_walk(q, k, v, [table[i]], min(size, context - i * size)) for i in range(-(-context // size))]
        return join(torch.stack(parts))
    return function


def _in_turn(split: bool) -> Callable:
    """Right for each head, but the rows come out as [H / K, K] where [K, H / K] is meant; split: q was also taken apart wrongly."""
    def function(q: Tensor, k: Tensor, v: Tensor, table: list[int], context: int) -> Tensor:
        count = k.shape[2]
        if split:
            return _walk(q.view(-1, count, q.shape[1]).transpose(0, 1).flatten(0, 1), k, v, table, context)
        return _walk(q, k, v, table, context).view(count, -1, q.shape[1]).transpose(0, 1).flatten(0, 1)
    return function


def _no_maximum(q: Tensor, k: Tensor, v: Tensor, table: list[int], context: int) -> Tensor:
    return _walk(q, k, v, table, context, first=0.0, best_of=lambda old, new: old)


def _case(seed: int, shape: tuple[int, int, int, int], context: int, note: str = "", spare: int = 0, times: float = 1.0,
          dtype: torch.dtype = torch.float32) -> Case:
    """shape: S, H, K, D. What is no part of the context is rubbish; `spare` blocks of the table are not needed, and are block 0."""
    size, num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    needed = -(-context // size)
    k_cache, v_cache = 100 * torch.randn(2, needed + 3, size, num_kv_heads, head_dim, generator=generator)
    table = (torch.randperm(needed + 2, generator=generator)[:needed] + 1).tolist()
    for position in range(context):
        at = table[position // size], position % size
        k_cache[at], v_cache[at] = torch.randn(2, num_kv_heads, head_dim, generator=generator)
    q = times * torch.randn(num_heads, head_dim, generator=generator)
    if times < 0:  # all scores far below zero
        q, k_cache = 500 * q.abs(), -k_cache.abs()
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    return Case({name: x.to(dtype) for name, x in tensors.items()} | {"block_table": table + [0] * spare, "context_len": context}, note)


PAGED_DECODE = Exercise("paged_decode", [
    _case(1, (4, 2, 2, 8), 3, "one page, partly filled"),
    _case(2, (4, 2, 2, 8), 8, "two full pages"),
    _case(3, (4, 2, 2, 8), 10, "three pages, the last partly filled"),
    _case(4, (4, 6, 2, 8), 13, "three query heads share each kv head"),
    _case(5, (4, 4, 2, 8), 9, "one token in the last page"),
    _case(6, (16, 9, 3, 64), 70, "the shape of the embedded model; the table is longer than the context needs, as in a batch", spare=3),
    _case(7, (4, 4, 2, 8), 11, "large scores: exp() of them overflows", times=200.0),
    _case(8, (4, 4, 2, 8), 11, "scores far below zero", times=-1.0),
    _case(9, (8, 4, 1, 16), 37, "in bfloat16: the result has q's dtype", dtype=torch.bfloat16),
], _oracle, kind="tensor", shape="H, D", mistakes=[
    Mistake(_wrong(count=lambda n, i, s: s), "the last page is read to its end, past context_len: what lies there belongs to nobody, or to "
            "somebody else. Page i holds min(block_size, context_len - i * block_size) tokens"),
    Mistake(_wrong(count=lambda n, i, s: s if (i + 1) * s < n else n % s), "a last page that is full is read as empty: context_len % "
            "block_size is 0 there. Use min(block_size, context_len - i * block_size)"),
    Mistake(_wrong(pages=lambda n, s, t: max(1, n // s)), "the partly filled last page is left out: the number of pages is context_len / "
            "block_size, rounded up"),
    Mistake(_wrong(pages=lambda n, s, t: n // s), "context_len // block_size rounds down: the partly filled last page is left out, and a "
            "context shorter than a page has none at all, so 0 / 0. Round up"),
    Mistake(_wrong(page=lambda t, i: i), "the pages are taken in the order of the pool, 0, 1, 2: page i is k_cache[block_table[i]]"),
    Mistake(_wrong(pages=lambda n, s, t: len(t), count=lambda n, i, s: s), "every page of the table is read to its end: the table may be "
            "longer than the context, and its last page partly filled; context_len says how far to read"),
    Mistake(_wrong(pages=lambda n, s, t: len(t)), "the table may be longer than the context: for the pages behind it no tokens are left, "
            "and context_len - i * block_size is negative. Stop after context_len / block_size pages, rounded up", everywhere=True),
    Mistake(_wrong(scale=lambda q: 1.0), "the scores are not scaled: divide them by sqrt(D)"),
    Mistake(_wrong(scale=lambda q: 1 / q.shape[-1]), "the scores are divided by D: the scale is 1 / sqrt(D)"),
    Mistake(_wrong(scale=lambda q: q.shape[0] ** -0.5), "the scores are divided by sqrt(H): divide by sqrt(D), the length of one head's "
            "vector"),
    Mistake(_wrong(fade=lambda old, new: torch.ones_like(old)), "when a later page brings a higher maximum, what was added up before is "
            "too large: multiply the sum and the mixture by exp(old maximum - new maximum)"),
    Mistake(_wrong(fade_mixed=False), "the sum is rescaled when the maximum rises, the mixture of values is not: both are in units of "
            "the old one"),
    Mistake(_wrong(fade_total=False), "the mixture of values is rescaled when the maximum rises, the sum is not: both are in units of "
            "the old one"),
    Mistake(_wrong(fade=lambda old, new: torch.exp(new - old).nan_to_num(posinf=0.0)), "the factor is the wrong way round: a higher "
            "maximum makes the old part smaller, exp(old maximum - new maximum)"),
    Mistake(_wrong(fade=lambda old, new: torch.exp(new - old)), "the factor is upside down, and at the first page it is exp(inf) = inf, "
            "times 0: take exp(old maximum - new maximum)"),
    Mistake(_wrong(best_of=lambda old, new: torch.maximum(old, new).amax().expand_as(new)), "one maximum for all heads: where a head's own "
            "scores lie far below it, every weight becomes 0 and the result 0 / 0. Each head has a maximum of its own"),
    Mistake(_wrong(best_of=lambda old, new: new), "the maximum is that of the newest page, but it must never fall: take the larger of "
            "the old one and this page's, else exp() can overflow"),
    Mistake(_no_maximum, "exp() of the plain scores overflows when they are large (and gives 0 / 0 when all are far below zero): "
            "subtract the running maximum first"),
    Mistake(_wrong(first=0.0), "the running maximum starts at 0: where all scores lie far below, every weight becomes 0 and the result 0 "
            "/ 0. Start at minus infinity"),
    Mistake(_wrong(finish=lambda mixed, total: mixed), "the mixture is not divided by the sum of the weights at the end"),
    Mistake(_of_each_page(lambda parts: parts.mean(0)), "each page has a softmax of its own, and the results are averaged: pages count "
            "by the sum of their exponentials, so keep a running sum"),
    Mistake(_of_each_page(lambda parts: parts.sum(0)), "each page has a softmax of its own, and the results are added: its weights sum "
            "to 1 in every page. Keep one running sum over all pages, and divide at the end"),
    Mistake(_of_each_page(lambda parts: parts[-1]), "only the last page counts: sum and mixture are set anew for each page. Make them "
            "before the loop"),
    Mistake(_wrong(spread=lambda x, g: x.repeat(1, g, 1)), "the kv heads are repeated in turn (head h reads h % K): query head h reads "
            "kv head h // (H // K), so use repeat_interleave"),
    Mistake(_in_turn(False), "the values are right, the heads stand in another order: row h of the result belongs to query head h. Heads "
            "were split as [K, H // K]: join them in that order"),
    Mistake(_in_turn(True), "q is split as [H // K, K] and the result joined as [K, H // K]: split q with view(K, H // K, D)"),
    Mistake(_wrong(spread=lambda x, g: x[:, :1].expand(-1, x.shape[1] * g, -1)), "all query heads read kv head 0: head h reads kv head h "
            "// (H // K)"),
    Mistake(_wrong(spread=lambda x, g: x), "q has H heads and the cache K: each kv head serves H // K query heads, such as with "
            "repeat_interleave over the dimension of the heads"),
    Mistake(_wrong(swap=True), "the weights are multiplied with the keys: they must mix the values"),
    Mistake(lambda q, k, v, t, n: _walk(q, v, k, t, n), "k_cache and v_cache are swapped: the scores are q times k, and the weights mix v"),
    Mistake(lambda q, k, v, t, n: _oracle(q, k, v, t, n - 1) if n > 1 else v[t[0], 0].repeat_interleave(len(q) // v.shape[2], 0) * 0,
            "the newest token is left out: its K/V is in the cache already, and it reads itself. context_len counts it"),
    Mistake(lambda q, k, v, t, n: _oracle(q, k, v, t, n).float(), "the values are right, but the result must have the dtype of q: end with "
            ".to(q.dtype)"),
    Mistake(lambda q, k, v, t, n: _oracle(q, k, v, t, n)[None], "there is one dimension too many: return [H, D]"),
])

EXERCISES = [SLOT_MAPPING, PAGED_DECODE]
