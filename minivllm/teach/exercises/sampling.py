"""Exercises of notebook 08: the tokens that top_p keeps, and the repetition penalty."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.teach.exercise import Case, Exercise, Mistake


def top_p_keep(probabilities: Tensor, p: float) -> Tensor:
    """probabilities [V] float32 -> bool [V]: the smallest set of most likely tokens whose probabilities reach p. p = 1 keeps all.

    Of equally likely tokens those with the lower ids come first.
    """
    if p >= 1:
        return torch.ones_like(probabilities, dtype=torch.bool)
    ordered, order = probabilities.sort(descending=True, stable=True)
    kept = ordered.cumsum(0) - ordered < p  # what the more likely ones add up to
    kept[0] = True
    return torch.zeros_like(kept).scatter(0, order, kept)


def repetition_penalty(logits: Tensor, token_ids: list[int], penalty: float) -> Tensor:
    """logits [V] -> new logits [V]: those of tokens in token_ids are divided by the penalty if positive, else multiplied by it."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[torch.tensor(token_ids, dtype=torch.int64)] = True
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _sorted(probabilities: Tensor, descending: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    ordered, order = probabilities.sort(descending=descending, stable=True)
    return ordered, order, ordered.cumsum(0)


def _by(rule: Callable[[Tensor, Tensor, float], Tensor], one: bool = True, all_at_1: bool = True, descending: bool = True) -> Callable:
    """A wrong top_p_keep: `rule(sorted probabilities, their running sum, p)` says what is kept. one: at least the best token is."""
    def function(probabilities: Tensor, p: float) -> Tensor:
        if p >= 1 and all_at_1:
            return torch.ones_like(probabilities, dtype=torch.bool)
        ordered, order, total = _sorted(probabilities, descending)
        kept = rule(ordered, total, p)
        if one:
            kept[0] = True
        return torch.zeros_like(kept).scatter(0, order, kept)
    return function


def _still_sorted(probabilities: Tensor, p: float) -> Tensor:
    return top_p_keep(probabilities.sort(descending=True).values, p)


def _gathered(probabilities: Tensor, p: float) -> Tensor:
    """The way back by order itself instead of by its inverse."""
    return _still_sorted(probabilities, p)[_sorted(probabilities)[1]]


def _unsorted(probabilities: Tensor, p: float) -> Tensor:
    kept = probabilities.cumsum(0) - probabilities < p
    return kept | (p >= 1)


def _sorted_sum(probabilities: Tensor, p: float) -> Tensor:
    return _sorted(probabilities)[2] < p


def _ids(probabilities: Tensor, p: float) -> Tensor:
    return _sorted(probabilities)[1][:int(top_p_keep(probabilities, p).sum())]


def _all_equals(probabilities: Tensor, p: float) -> Tensor:
    return probabilities >= probabilities[top_p_keep(probabilities, p)].min()


def _higher_ids(probabilities: Tensor, p: float) -> Tensor:
    """Sorted from the least likely one: of equals the higher ids come last, and are kept."""
    ordered, order = probabilities.sort(stable=True)
    dropped = ordered.cumsum(0) <= 1 - p
    dropped[-1] = False
    return ~torch.zeros_like(dropped).scatter(0, order, dropped)


def _shifted_in_place(probabilities: Tensor, p: float) -> Tensor:
    ordered, order, total = _sorted(probabilities)
    dropped = total > p
    dropped[1:] = dropped[:-1]
    dropped[0] = False
    return ~torch.zeros_like(dropped).scatter(0, order, dropped)


def _probability_case(values: list[float], p: float, note: str = "") -> Case:
    return Case({"probabilities": torch.tensor(values), "p": p}, note)


def _drawn(seed: int, size: int, p: float, sharpness: float, note: str = "") -> Case:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * sharpness
    return Case({"probabilities": logits.softmax(0), "p": p}, note)


TOP_P_KEEP = Exercise("top_p_keep", [
    _probability_case([0.25, 0.125, 0.5, 0.125], 0.6, "0.5 does not reach 0.6; with 0.25 it does, and that token crosses p"),
    _probability_case([0.125, 0.5, 0.25, 0.125], 0.75, "0.5 and 0.25 reach 0.75 exactly"),
    _probability_case([0.25, 0.125, 0.5, 0.125], 0.01, "one token is enough, and one is always kept"),
    _probability_case([0.125, 0.125, 0.5, 0.125, 0.125], 0.7, "four equals, and two of them are wanted: those with the lower ids"),
    _probability_case([1e-9, 0.5, 2e-9, 0.5], 1.0, "p = 1 keeps all, though in float32 two tokens add up to 1"),
    _probability_case([1.0], 0.3, "a vocabulary of one"),
    _drawn(0, 12, 0.9, 2.0), _drawn(1, 300, 0.95, 1.0), _drawn(2, 1000, 0.5, 3.0), _drawn(3, 64, 0.8, 0.5),
], top_p_keep, kind="tensor", shape="V", mistakes=[
    Mistake(_by(lambda x, total, p: total <= p), "the token that crosses p is dropped: it belongs to the set, for without it the sum "
            "does not reach p. Ask what the tokens *before* it add up to, cumsum - probability"),
    Mistake(_by(lambda x, total, p: total <= p, one=False), "the token that crosses p is dropped, and where the best one crosses, "
            "nothing is left to draw from: compare the sum of the tokens before it, cumsum - probability, with p"),
    Mistake(_by(lambda x, total, p: total < p), "the token that crosses p is dropped, and so is the one that reaches it exactly: "
            "compare the sum of the tokens before it, cumsum - probability"),
    Mistake(_by(lambda x, total, p: total < p, one=False, all_at_1=False), "the running sum with the token itself is compared: "
            "whatever crosses p is dropped, even the only token, or the last one at p = 1. Compare cumsum - probability, what stands "
            "before it"),
    Mistake(_by(lambda x, total, p: total - x <= p), "one token too many where the sum reaches p exactly: reached is enough, so keep "
            "while the sum before is *less* than p"),
    Mistake(_by(lambda x, total, p: total - x < p, all_at_1=False), "at p = 1 the tail is dropped: in float32 a sum reaches 1 before "
            "the last token does. Keep all when p is 1"),
    Mistake(_still_sorted, "the mask is in sorted order: entry i must stand for token id i. `torch.zeros_like(kept).scatter(0, order, "
            "kept)`, or `mask[order] = kept`"),
    Mistake(_gathered, "the way back is taken twice in the same direction: order[i] is the id of the i-th best, so *assign* "
            "mask[order] = kept; kept[order] reads at the wrong places"),
    Mistake(_sorted_sum, "two things: the mask is in sorted order, but entry i must stand for token id i, so `mask[order] = kept`; "
            "and the token that crosses p is dropped, but belongs to the set"),
    Mistake(lambda q, p: q.cumsum(0) <= p, "two things: the sum runs over token ids, so sort by probability first; and the token that "
            "crosses p is dropped, but belongs to the set"),
    Mistake(_unsorted, "the sum runs over token ids: sort by probability first, the most likely first"),
    Mistake(_by(lambda x, total, p: total - x < p, one=False, descending=False), "the sum begins at the least likely token, so the "
            "tail is kept and the best is dropped: sort(descending=True)"),
    Mistake(_by(lambda x, total, p: total > p, one=False, descending=False), "sorted from the least likely one, a token is to be "
            "dropped while the sum up to it is at most 1 - p, not p"),
    Mistake(_higher_ids, "of equals the higher ids are kept: sorted from the least likely one, they come last. Sort with descending=True "
            "and stable=True, and drop what has p or more before it"),
    Mistake(_shifted_in_place, "the slice is written while it is read, and torch refuses: mask[1:] = mask[:-1].clone(). Or shift nothing, "
            "and compare cumsum - probability", same_text=True),
    Mistake(lambda q, p: top_p_keep(q.softmax(0), p), "these are probabilities already: a second softmax makes them more alike, so more "
            "tokens are kept"),
    Mistake(lambda q, p: q >= p, "each token's own probability is compared with p: it is the sum over the more likely tokens that "
            "counts"),
    Mistake(lambda q, p: q >= 1 - p, "each token's own probability is compared with 1 - p: it is the sum over the more likely tokens "
            "that counts"),
    Mistake(lambda q, p: q >= p * q.max(), "that is min_p: tokens at least p times as likely as the best. Here the sum of the most "
            "likely ones counts"),
    Mistake(lambda q, p: _sorted(q)[1] < max(1, int(p * len(q))), "that keeps a share p of the vocabulary: it is the probabilities "
            "that must add up to p, not the number of tokens"),
    Mistake(_all_equals, "everything as likely as the boundary token is kept: the set must be the smallest, so of equals only as many "
            "as are needed, the lower ids first"),
    Mistake(_ids, "those are the ids of the kept tokens: return a mask over the vocabulary, True where the token is kept"),
    Mistake(lambda q, p: q * top_p_keep(q, p), "those are probabilities, 0 where dropped: return the mask itself, True where the "
            "token is kept"),
    Mistake(lambda q, p: q * top_p_keep(q, p) / (q * top_p_keep(q, p)).sum(), "those are the new probabilities: return the mask, True "
            "where the token is kept"),
    Mistake(lambda q, p: ~top_p_keep(q, p), "the mask is turned round: True is for what is kept"),
    Mistake(lambda q, p: top_p_keep(q, p).float(), "the mask holds 0.0 and 1.0: make it of bools, by a comparison"),
])


def _on(logits: Tensor, token_ids: list[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """New logits, changed where a token was seen."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[torch.tensor(token_ids, dtype=torch.int64)] = True
    return torch.where(seen, change(logits), logits)


def _once_for_each(logits: Tensor, token_ids: list[int], penalty: float) -> Tensor:
    for token in token_ids:
        logits = repetition_penalty(logits, [token], penalty)
    return logits


def _log_softmax(logits: Tensor, token_ids: list[int], penalty: float) -> Tensor:
    return repetition_penalty(logits.log_softmax(0), token_ids, penalty)


def _probabilities(logits: Tensor, token_ids: list[int], penalty: float) -> Tensor:
    return _on(logits.softmax(0), token_ids, lambda x: x / penalty)


def _float_index(logits: Tensor, token_ids: list[int], penalty: float) -> Tensor:
    seen = torch.tensor(token_ids)
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits


def _each_time(logits: Tensor, token_ids: list[int], penalty: float) -> Tensor:
    return logits - penalty * torch.bincount(torch.tensor(token_ids, dtype=torch.int64), minlength=len(logits))


def _logits_case(values: list[float], token_ids: list[int], penalty: float, note: str = "") -> Case:
    return Case({"logits": torch.tensor(values), "token_ids": token_ids, "penalty": penalty}, note)


def _drawn_logits(seed: int, size: int, count: int, penalty: float) -> Case:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(size, (count,), generator=generator).tolist()
    return Case({"logits": 4 * torch.randn(size, generator=generator), "token_ids": ids, "penalty": penalty})


REPETITION_PENALTY = Exercise("repetition_penalty", [
    _logits_case([4.0, 1.0, -2.0, 3.0], [0], 2.0, "one token was seen, its logit is positive"),
    _logits_case([4.0, 1.0, -2.0, 3.0], [2], 2.0, "its logit is negative: it must fall, too"),
    _logits_case([4.0, 1.0, -2.0, 3.0], [0, 3, 0, 2, 0], 2.0, "token 0 was seen three times, and is penalised once"),
    _logits_case([0.0, 5.0, -1.0], [0, 1, 2], 1.25, "a logit of 0 stays"),
    _logits_case([2.0, -1.0, 6.0], [], 1.5, "nothing was seen"),
    _logits_case([2.0, -3.0, 6.0, -8.0], [0, 1, 2], 0.5, "below 1 it is a reward: what was seen rises"),
    _drawn_logits(0, 50, 20, 1.2), _drawn_logits(1, 1000, 400, 1.1),
], repetition_penalty, kind="tensor", shape="V", mistakes=[
    Mistake(lambda x, ids, f: _on(x, ids, lambda x: x / f), "negative logits are divided too, and -2 / 2 = -1 is *more* likely than "
            "before: multiply those"),
    Mistake(lambda x, ids, f: _on(x, ids, lambda x: x * f), "positive logits are multiplied too, so what was said becomes more "
            "likely: divide those"),
    Mistake(lambda x, ids, f: repetition_penalty(x, ids, 1 / f), "the two cases are swapped: divide positive logits, multiply "
            "negative ones"),
    Mistake(_once_for_each, "a token is penalised as often as it was seen: once is meant, whatever the count. The penalty that counts "
            "is frequency_penalty"),
    Mistake(lambda x, ids, f: _on(x, ids, lambda x: x - f), "the penalty is subtracted, as presence_penalty is: this one divides or "
            "multiplies"),
    Mistake(_each_time, "the penalty is subtracted once for each time, as frequency_penalty is: this one divides or multiplies, once"),
    Mistake(lambda x, ids, f: _float_index(x.clone(), ids, f), "an empty list becomes a float32 tensor, which cannot be an index: "
            "torch.tensor(token_ids, dtype=torch.int64)", same_text=True),
    Mistake(lambda x, ids, f: torch.where(x > 0, x / f, x * f), "every token is penalised: only those in token_ids are"),
    Mistake(lambda x, ids, f: repetition_penalty(x, ids[-1:], f), "only the last token is penalised: all of token_ids are"),
    Mistake(lambda x, ids, f: repetition_penalty(x, list(range(min(len(set(ids)), len(x)))), f), "the positions in token_ids are "
            "penalised instead of the ids that stand there"),
    Mistake(_log_softmax, "the penalty works on logits, not on log probabilities: these are all negative, and the result would depend "
            "on the whole vocabulary"),
    Mistake(_probabilities, "the penalty works on logits, not on probabilities: no softmax here"),
    Mistake(lambda x, ids, f: _on(x, ids, lambda x: torch.full_like(x, float("-inf"))), "what was seen is forbidden altogether: it is "
            "only to become less likely"),
    Mistake(lambda x, ids, f: _on(x, ids, lambda x: torch.where(x > 0, x / f, x)), "negative logits stay as they are: multiply those "
            "by the penalty"),
])

EXERCISES = [TOP_P_KEEP, REPETITION_PENALTY]
