"""Exercise 1 of notebook 10: a rank's rows of a merged qkv weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minivllm.layers.linear import QKVParallelLinear
from minivllm.layers.parallel import Ranks, building_for
from minivllm.teach.exercise import Case, Exercise, Mistake
from minivllm.weights.load import load_weights


def shard_qkv(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
    """The package's own layer, made for that rank and filled by the package's own loader. [(H + 2 K) * D, hidden] -> the rank's rows."""
    dim = len(weight) // (num_heads + 2 * num_kv_heads)
    ranks = Ranks()
    ranks.rank, ranks.size = rank, size
    with building_for(ranks):
        model = nn.ModuleDict({"qkv": QKVParallelLinear(weight.shape[1], num_heads, num_kv_heads, dim)})
    parts = weight.split([num_heads * dim, num_kv_heads * dim, num_kv_heads * dim])
    load_weights(model, zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), parts), "the exercise")
    return model["qkv"].weight.detach()


def _shards(q: Callable | None = None, kv: Callable | None = None, order: str = "qkv", scale: Callable = lambda dim: dim) -> Callable:
    """A wrong shard_qkv. q, kv: (number of heads, rank, size) -> the heads a rank takes; None: as it should be."""
    q = q or _own
    kv = kv or (lambda heads, rank, size: range(rank * heads // size, rank * heads // size + max(1, heads // size)))

    def function(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
        dim = len(weight) // (num_heads + 2 * num_kv_heads)
        parts = dict(zip("qkv", weight.split([num_heads * dim, num_kv_heads * dim, num_kv_heads * dim])))
        heads = {"q": q(num_heads, rank, size), "k": kv(num_kv_heads, rank, size), "v": kv(num_kv_heads, rank, size)}
        rows = lambda name: [parts[name][head * dim:head * dim + scale(dim)] for head in heads[name]]
        return torch.cat([piece for name in order for piece in rows(name)] or [weight[:0]])
    return function


def _of_dim(count: Callable, rows: Callable = lambda dim: dim, kv_rows: Callable = lambda dim: dim) -> Callable:
    """A wrong shard_qkv. count: (H, K) -> how many heads the matrix is thought to have. rows, kv_rows: of a head of q, of k and v, by D."""
    def function(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
        dim = len(weight) // count(num_heads, num_kv_heads)
        ends = num_heads * dim, (num_heads + num_kv_heads) * dim
        first, held = rank * num_kv_heads // size, max(1, num_kv_heads // size)
        mine = slice(first * kv_rows(dim), (first + held) * kv_rows(dim))
        q = weight[:ends[0]][rank * num_heads // size * rows(dim):(rank + 1) * num_heads // size * rows(dim)]
        return torch.cat((q, weight[ends[0]:ends[1]][mine], weight[ends[1]:][mine]))
    return function


def _from(first: Callable, count: Callable = lambda heads, size: max(1, heads // size)) -> Callable:
    """A wrong shard_qkv by slices of k and v: kv heads from first(H, K, rank, size) on, `count` of them, none past the last."""
    def function(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
        start, held = first(num_heads, num_kv_heads, rank, size), count(num_kv_heads, size)
        kv = lambda heads, *_: range(heads)[start:start + held]
        return _shards(kv=kv)(weight, num_heads, num_kv_heads, rank, size)
    return function


def _heads_of_queries(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
    return _shards(kv=lambda heads, *_: range(heads)[rank * num_heads // size:(rank + 1) * num_heads // size])(
        weight, num_heads, num_kv_heads, rank, size)


def _k_and_v_in_turn(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
    own = shard_qkv(weight, num_heads, num_kv_heads, rank, size).view(-1, len(weight) // (num_heads + 2 * num_kv_heads), weight.shape[1])
    q, k, v = own.split([num_heads // size, *2 * [max(1, num_kv_heads // size)]])
    return torch.cat((q, torch.stack((k, v), dim=1).flatten(0, 1))).flatten(0, 1)


def _by_division(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
    return _shards(kv=lambda heads, rank, size: [rank // (size // heads)])(weight, num_heads, num_kv_heads, rank, size)


def _equal_pieces(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
    dim = len(weight) // (num_heads + 2 * num_kv_heads)
    return torch.cat([part.chunk(size)[rank] for part in weight.split([num_heads * dim, num_kv_heads * dim, num_kv_heads * dim])])


def _kv_head_of_the_same_number(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
    heads, each = weight.view(num_heads + 2 * num_kv_heads, -1, weight.shape[1]), num_heads // size
    return heads[[*range(rank * each, (rank + 1) * each), num_heads + rank, num_heads + num_kv_heads + rank]].flatten(0, 1)


def _not_flattened(weight: Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Tensor:
    return shard_qkv(weight, num_heads, num_kv_heads, rank, size).view(-1, len(weight) // (num_heads + 2 * num_kv_heads), weight.shape[1])


def _own(heads: int, rank: int, size: int) -> range:
    return range(rank * heads // size, (rank + 1) * heads // size)


def _whole_of(heads: int, *_: int) -> range:
    return range(heads)


def _qkv(heads: int, kv: int, dim: int, hidden: int, rank: int, size: int, note: str = "", first: int = 0) -> Case:
    weight = first + torch.arange((heads + 2 * kv) * dim * hidden, dtype=torch.float32).view(-1, hidden)
    return Case({"weight": weight, "num_heads": heads, "num_kv_heads": kv, "rank": rank, "size": size}, note)


def _drawn() -> list[Case]:
    generator = torch.Generator().manual_seed(10)
    draw = lambda choices: choices[int(torch.randint(len(choices), (1,), generator=generator))]
    cases = []
    for heads, kv, size in ((16, 8, 4), (12, 4, 2), (16, 4, 8), (24, 8, 8)):
        cases.append(_qkv(heads, kv, draw([2, 3, 5]), draw([2, 3]), 1 + draw(range(size - 1)), size, first=100 * len(cases) + 7))
    return cases


SHARD_QKV = Exercise("shard_qkv", [
    _qkv(4, 2, 1, 2, 0, 2, "two ranks, a kv head each"),
    _qkv(4, 2, 1, 2, 1, 2, "the other rank"),
    _qkv(9, 3, 4, 2, 2, 3, "the embedded model's heads on three ranks"),
    _qkv(8, 2, 2, 3, 1, 4, "fewer kv heads than ranks: ranks 0 and 1 hold kv head 0"),
    _qkv(8, 2, 2, 3, 2, 4, "ranks 2 and 3 hold kv head 1"),
    _qkv(16, 4, 2, 2, 3, 8, "two ranks for a kv head: ranks 2 and 3 hold kv head 1"),
    _qkv(6, 6, 3, 2, 1, 2, "as many kv heads as query heads"),
    _qkv(8, 1, 2, 2, 5, 8, "one kv head: every rank holds it"),
    _qkv(3, 3, 2, 2, 0, 1, "one rank holds all"),
    *_drawn(),
], shard_qkv, kind="tensor", shape="rows, hidden", mistakes=[
    Mistake(lambda weight, num_heads, num_kv_heads, rank, size: weight.chunk(size)[rank],
            "this cuts the merged matrix as it lies: the first ranks get query rows only. Split it into q, k and v first, and take the "
            "rank's part of each"),
    Mistake(lambda weight, num_heads, num_kv_heads, rank, size: weight.chunk(size, dim=1)[rank],
            "this cuts the columns, which is the input: q, k and v are split by heads, and a head is D rows"),
    Mistake(_shards(kv=lambda heads, rank, size: range(rank * (heads // size), (rank + 1) * (heads // size))),
            "no kv head is left where there are fewer than ranks: num_kv_heads // size is 0 there. A rank holds at least one"),
    Mistake(_shards(kv=lambda heads, rank, size: _own(heads, rank, size) if size <= heads else [rank % heads]),
            "rank % num_kv_heads deals the kv heads out in turn: but neighbouring query heads share a kv head, so neighbouring ranks "
            "must. The first one is rank * num_kv_heads // size"),
    Mistake(_shards(kv=lambda heads, rank, size: _own(heads, rank, size) if size <= heads else [min(rank, heads - 1)]),
            "where ranks are more than kv heads, rank r does not hold kv head r: the ranks that share one are neighbours. The first one"
            " is rank * num_kv_heads // size"),
    Mistake(_by_division,
            "rank // (size // num_kv_heads) works where ranks are at least as many as kv heads; with fewer ranks a rank holds several. "
            "rank * num_kv_heads // size is right for both"),
    Mistake(_equal_pieces,
            "k and v are cut into as many pieces as there are ranks: with fewer kv heads than ranks that cuts through a head. A rank "
            "holds whole heads, at least one: from rank * num_kv_heads // size on"),
    Mistake(_kv_head_of_the_same_number,
            "one kv head, that of the rank's own number, is right only where there are as many kv heads as ranks. The first is rank * "
            "num_kv_heads // size, and there are max(1, num_kv_heads // size)"),
    Mistake(_not_flattened,
            "the rows are right, but heads are still a dimension of their own: .flatten(0, 1) makes rows of them"),
    Mistake(_shards(kv=_whole_of),
            "every rank holds all kv heads here: right answers would come out, but the cache would be as large as on one rank. Take the"
            " rank's own"),
    Mistake(_shards(kv=lambda heads, rank, size: [rank * heads // size]),
            "only one kv head is taken: with fewer ranks than kv heads a rank holds num_kv_heads // size of them"),
    Mistake(_shards(q=lambda heads, rank, size: range(rank, heads, size)),
            "query heads are dealt out in turn: a rank would hold heads whose kv head is elsewhere. Take neighbours, rank * H / N to "
            "(rank + 1) * H / N - 1"),
    Mistake(_shards(q=_whole_of),
            "every rank holds all query heads here: take the rank's own num_heads // size"),
    Mistake(_shards(order="qvk"),
            "v stands before k: the rows are the query heads, then k, then v"),
    Mistake(_shards(order="kqv"),
            "k stands before q: the rows are the query heads, then k, then v"),
    Mistake(_shards(order="qk"),
            "the rows of v are missing"),
    Mistake(_shards(order="q"),
            "the rows of k and v are missing: a rank needs them of the kv heads that its query heads read"),
    Mistake(_shards(order="qkk"),
            "k stands in v's place, too: the rows are the query heads, then k, then v"),
    Mistake(_k_and_v_in_turn,
            "k and v follow each other head by head: all of the rank's k heads come first, then all of its v heads"),
    Mistake(lambda weight, num_heads, num_kv_heads, rank, size: weight,
            "this is the whole matrix, on every rank: take the rank's part of q, of k and of v"),
    Mistake(lambda weight, num_heads, num_kv_heads, rank, size: torch.cat([part.chunk(size)[rank] for part in weight.chunk(3)]),
            "q, k and v are not a third each: q has num_heads heads, k and v have num_kv_heads"),
    Mistake(_shards(scale=lambda dim: 1),
            "one row a head is taken: a head is D rows, D = len(weight) // (num_heads + 2 * num_kv_heads)"),
    Mistake(_of_dim(lambda heads, kv: heads + 2 * kv, rows=lambda dim: 1, kv_rows=lambda dim: 1),
            "heads are counted as if they were rows: head h begins at row h * D"),
    Mistake(_of_dim(lambda heads, kv: heads + 2 * kv, kv_rows=lambda dim: 1),
            "of k and v, heads are counted as if they were rows: kv head h begins at row h * D"),
    Mistake(_of_dim(lambda heads, kv: heads),
            "D is too large: the merged weight has num_heads + 2 * num_kv_heads heads of D rows"),
    Mistake(_of_dim(lambda heads, kv: heads + kv),
            "D is too large: k and v have num_kv_heads heads each, so there are num_heads + 2 * num_kv_heads in the matrix"),
    Mistake(_of_dim(lambda heads, kv: 3 * heads),
            "D is too small: k and v have num_kv_heads heads each, not num_heads"),
    Mistake(_from(lambda heads, kv, rank, size: rank * (kv // size)),
            "with fewer kv heads than ranks, rank * (num_kv_heads // size) is 0 on every rank: multiply first, then divide"),
    Mistake(_from(lambda heads, kv, rank, size: rank * max(1, kv // size)),
            "with fewer kv heads than ranks, this runs past the last kv head: neighbouring ranks share one. The first one is rank * "
            "num_kv_heads // size"),
    Mistake(_from(lambda heads, kv, rank, size: min(kv - 1, round(rank * kv / size))),
            "round() goes up from a half, and so to the next kv head too soon: // always goes down"),
    Mistake(_from(lambda heads, kv, rank, size: rank * kv // size + 1),
            "the kv heads begin one too late: heads are counted from 0"),
    Mistake(_from(lambda heads, kv, rank, size: rank * kv // size, lambda kv, size: kv // size + 1),
            "one kv head too many where there are as many as ranks, or more: there are max(1, num_kv_heads // size)"),
    Mistake(_from(lambda heads, kv, rank, size: rank // (heads // kv)),
            "rank // (num_heads // num_kv_heads) takes a rank for a query head: the rank's first query head is rank * num_heads // size"),
    Mistake(_heads_of_queries,
            "k and v are cut by the numbers of the query heads: num_heads // num_kv_heads query heads share one kv head"),
    Mistake(lambda weight, num_heads, num_kv_heads, rank, size: shard_qkv(weight, num_heads, num_kv_heads, (rank - 1) % size, size),
            "this is the part of the rank before: ranks are counted from 0"),
    Mistake(lambda weight, num_heads, num_kv_heads, rank, size: _shards()(weight, num_heads, num_kv_heads, 0, size),
            "this is rank 0's part, whoever asks"),
])

EXERCISES = [SHARD_QKV]
