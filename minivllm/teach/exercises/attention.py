"""Exercises of notebook 01: the causal mask, and attention with fewer kv heads than query heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.teach.exercise import Case, Exercise, Mistake


def causal_mask(num_queries: int, num_keys: int) -> Tensor:
    """[Tq, Tk] bool, True where query i may read key j. The queries are the last `num_queries` of the `num_keys` positions."""
    positions = torch.arange(num_keys)
    return positions <= positions[num_keys - num_queries:, None]


def grouped_query_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [Tq, H, D]; k, v [Tk, K, D] -> [Tq, H, D], by torch's own function."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, D]
    mask = causal_mask(q.shape[2], k.shape[2]).to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def _ones(num_queries: int, num_keys: int) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool)


def _minus_infinity(num_queries: int, num_keys: int) -> Tensor:
    return torch.zeros(num_queries, num_keys).masked_fill(~causal_mask(num_queries, num_keys), float("-inf"))


CAUSAL_MASK = Exercise("causal_mask", [
    Case({"num_queries": 3, "num_keys": 3}, "a whole prompt"),
    Case({"num_queries": 2, "num_keys": 4}, "two new tokens behind two cached ones"),
    Case({"num_queries": 1, "num_keys": 5}, "one new token: a decode"),
    Case({"num_queries": 1, "num_keys": 1}, "the first token"),
    Case({"num_queries": 3, "num_keys": 7}, "a chunk of a longer prompt"),
    Case({"num_queries": 5, "num_keys": 64}),
], causal_mask, kind="tensor", shape="Tq, Tk", mistakes=[
    Mistake(lambda q, k: _ones(q, k).tril(), "the triangle starts at the upper left, so query 0 counts as position 0. The queries are the "
            "last num_queries positions: query i is position num_keys - num_queries + i"),
    Mistake(lambda q, k: _ones(q, k).tril(k - q - 1), "every query leaves out its own position: a token may read its own key, so use <=, "
            "not <"),
    Mistake(lambda q, k: ~causal_mask(q, k), "the mask is inverted: True has to say where a query may read, not where it may not"),
    Mistake(lambda q, k: _ones(q, k).triu(k - q), "this lets a query read itself and the future: it must be itself and the past (tril, or "
            "key <= query)"),
    Mistake(lambda q, k: causal_mask(q, k).T, "rows and columns are transposed: a row for each query, a column for each key, [Tq, Tk]"),
    Mistake(lambda q, k: causal_mask(q, k).flip(0), "the rows are upside down: row 0 is the first of the queries, which may read the "
            "fewest keys"),
    Mistake(lambda q, k: causal_mask(q, k).flip(1), "left and right are swapped: column 0 is position 0, which every query may read"),
    Mistake(_minus_infinity, "this is a mask to add to the scores (0 and -inf): wanted is a bool mask, True where a query may read"),
    Mistake(lambda q, k: _ones(q, k), "every query may read every key here, the future too: query i may read up to its own position only"),
    Mistake(lambda q, k: _ones(q, k).tril(k - q + 1), "every query may read one key too many, the next token's: it may read up to its own "
            "position"),
    Mistake(lambda q, k: causal_mask(q, k).float(), "zeros and ones as floats: the pattern is right, the dtype must be bool (compare, or "
            ".bool())"),
    Mistake(lambda q, k: causal_mask(q, k).long(), "zeros and ones as ints: the pattern is right, the dtype must be bool (compare, or "
            ".bool())"),
    Mistake(lambda q, k: causal_mask(k, k), "one row for every position: only the last num_queries positions ask, so the mask is [Tq, Tk]"),
])


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, mask: Callable | None = causal_mask, softmax_dim: int = -1,
            spread: Callable | None = None) -> Tensor:
    """The naive way, each of its decisions open: this is what the mistakes are made of."""
    groups = q.shape[1] // k.shape[1]
    k, v = ((spread or _interleave)(x, groups) for x in (k, v))  # [Tk, H, D]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask(q.shape[0], k.shape[0]), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(softmax_dim), v.float()).to(q.dtype)


def _interleave(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, dim=1)


def _wrong(**changes) -> Callable:
    return lambda q, k, v: _attend(q, k, v, **{name: change(q) if name == "scale" else change for name, change in changes.items()})


def _mask_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), _interleave(k, groups).float()) * q.shape[-1] ** -0.5
    weights = scores.softmax(-1) * causal_mask(q.shape[0], k.shape[0])
    return torch.einsum("hqk,khd->qhd", weights, _interleave(v, groups).float()).to(q.dtype)


def _spread_differently(for_k: Callable, for_v: Callable) -> Callable:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        return _attend(q, for_k(k, groups), for_v(v, groups))
    return function


def _in_turn(x: Tensor, groups: int) -> Tensor:
    return x.repeat(1, groups, 1)


def _zeros_for_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), _interleave(k, groups).float()) * q.shape[-1] ** -0.5
    weights = (scores * causal_mask(q.shape[0], k.shape[0])).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, _interleave(v, groups).float()).to(q.dtype)


def _no_grouping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(q, k, v, spread=lambda x, groups: x)


def _heads_in_the_middle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [T, H, K]: heads against heads
    return scores.softmax(-1) @ v


def _first_head_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(q, k, v, spread=lambda x, groups: x[:, :1].expand(-1, q.shape[1], -1))


def _case(seed: int, shape: tuple[int, int, int, int, int], note: str = "", dtype: torch.dtype = torch.float32) -> Case:
    num_queries, num_keys, num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*size, generator=generator).to(dtype)
               for size in ((num_queries, num_heads, head_dim), (num_keys, num_kv_heads, head_dim), (num_keys, num_kv_heads, head_dim)))
    return Case({"q": q, "k": k, "v": v}, note)


def _tiny() -> Case:
    q, k, v = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])
    return Case({"q": q, "k": k, "v": v}, "one query, two keys, one head: small enough to compute by hand")


GROUPED_QUERY_ATTENTION = Exercise("grouped_query_attention", [
    _tiny(),
    _case(1, (3, 3, 2, 2, 4), "a whole prompt, as many kv heads as query heads"),
    _case(2, (2, 5, 2, 2, 4), "the queries are the last two of five positions"),
    _case(3, (3, 3, 6, 2, 4), "three query heads share each kv head"),
    _case(4, (1, 9, 9, 3, 64), "a decode in the shape of the embedded model"),
    _case(5, (4, 11, 4, 1, 16), "all query heads share one kv head"),
    _case(6, (3, 6, 4, 2, 8), "in bfloat16: the result has q's dtype", torch.bfloat16),
], grouped_query_attention, kind="tensor", shape="Tq, H, D", mistakes=[
    Mistake(_wrong(scale=lambda q: 1.0), "the scores are not scaled: divide them by sqrt(D) before the softmax"),
    Mistake(_wrong(scale=lambda q: 1 / q.shape[-1]), "the scores are divided by D: the square root is missing, the scale is 1 / sqrt(D)"),
    Mistake(_wrong(scale=lambda q: q.shape[-1] ** 0.5), "the scores are multiplied by sqrt(D): divide by it"),
    Mistake(_wrong(softmax_dim=-2), "the softmax runs over the queries: each query's weights over the keys must sum to 1, so take the key "
                                    "dimension"),
    Mistake(_wrong(softmax_dim=0), "the softmax runs over the heads: each query's weights over the keys must sum to 1, so take the key "
                                   "dimension"),
    Mistake(_wrong(scale=lambda q: q.shape[1] ** -0.5), "the scores are divided by sqrt(H), the number of heads: divide by sqrt(D), the "
            "length of one head's vector (after a transpose, D is the last dimension still)"),
    Mistake(_spread_differently(_interleave, _in_turn), "k is repeated with repeat_interleave and v with repeat, so keys and values of "
            "different heads meet: repeat_interleave both"),
    Mistake(_spread_differently(_in_turn, _interleave), "v is repeated with repeat_interleave and k with repeat, so keys and values of "
            "different heads meet: repeat_interleave both"),
    Mistake(_wrong(spread=_in_turn), "the kv heads are repeated in turn (k.repeat: head h reads h % K). "
            "Query head h reads kv head h // (H // K), so neighbours share one: use repeat_interleave"),
    Mistake(_wrong(mask=None), "the mask is missing: a query reads keys of later positions"),
    Mistake(_mask_after, "the mask comes after the softmax, so the weights that are left do not sum to 1: put -inf into the scores before "
                         "it"),
    Mistake(_zeros_for_infinity, "forbidden scores are set to 0, and exp(0) is 1, not 0: set them to -inf before the softmax"),
    Mistake(_wrong(mask=lambda q, k: _ones(q, k).tril()), "the mask's triangle starts at the upper left. The queries are the last Tq of "
            "the Tk positions, so query i is position Tk - Tq + i"),
    Mistake(_wrong(mask=lambda q, k: _ones(q, k).tril(k - q - 1)), "a query must read its own position too; the first one of a prompt "
            "else has nothing to read, and a softmax over nothing is NaN"),
    Mistake(_wrong(mask=lambda q, k: ~causal_mask(q, k)), "the mask is inverted: each query attends to the future only, and the last one "
            "to nothing, whose softmax is NaN. Put -inf where key > query, and keep what is behind"),
    Mistake(_wrong(mask=lambda q, k: _ones(q, k).triu(k - q)), "the mask's triangle is the upper one: each query attends to itself and the "
            "future, it must be itself and the past"),
    Mistake(lambda q, k, v: _attend(q, v, k), "k and v are swapped: the scores are q times k, and the weights mix v"),
    Mistake(lambda q, k, v: grouped_query_attention(q, k, v).transpose(0, 1).reshape(q.shape), "the result [H, Tq, D] is brought to [Tq, "
            "H, D] by reshape or view, which only cuts the numbers anew and mixes heads and tokens: use transpose(0, 1)"),
    Mistake(lambda q, k, v: _attend(q, k, k), "the weights are multiplied with k: they must mix the values v"),
    Mistake(_no_grouping, "k and v have K heads and q has H: let each kv head serve H // K query heads, such as with repeat_interleave "
                          "over the dimension of the heads"),
    Mistake(_heads_in_the_middle,
            "the matrix product multiplies heads with heads, as they are the last but one dimension: move them to the "
            "front first, q.transpose(0, 1) is [H, Tq, D]"),
    Mistake(_first_head_only, "all query heads read kv head 0: head h reads kv head h // (H // K)"),
    Mistake(lambda q, k, v: grouped_query_attention(q, k, v).transpose(0, 1), "the result is [H, Tq, D]: transpose it back to [Tq, H, D]"),
    Mistake(lambda q, k, v: grouped_query_attention(q, k, v).flatten(1), "the heads are joined into one dimension: return [Tq, H, D]; the "
            "model joins them"),
    Mistake(lambda q, k, v: grouped_query_attention(q, k, v).float(), "the values are right, but the result must have the dtype of q: end "
            "with .to(q.dtype)"),
])

EXERCISES = [CAUSAL_MASK, GROUPED_QUERY_ATTENTION]
