"""Exercises of notebook 02: append to a contiguous KV cache, and what reserving the longest length wastes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.teach.exercise import Case, Exercise, Mistake


def append(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    """Write k and v [T, K, D] behind the first `length` tokens of cache [2, C, K, D], in place. Returns the new length.

    Raises ValueError when they do not fit.
    """
    end = length + k.shape[0]
    if end > cache.shape[1]:
        raise ValueError(f"{end} tokens do not fit into {cache.shape[1]} slots")
    cache[0, length:end] = k
    cache[1, length:end] = v
    return end


def wasted_share(lengths: list[int], max_model_len: int) -> float:
    """Share of reserved slots that never hold a token, when each sequence reserves `max_model_len`."""
    reserved = len(lengths) * max_model_len
    return (reserved - sum(lengths)) / reserved


def _writes(begin: Callable, returns: Callable | None = None, swap: tuple[int | None, ...] = (0, 1), fits: Callable | None = None,
            ) -> Callable:
    """A wrong append: where it begins, what it returns, which of (k, v) goes where (None: neither), when it thinks that they fit."""
    def function(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
        num_tokens, capacity = k.shape[0], cache.shape[1]
        if not (fits(length, num_tokens, capacity) if fits else length + num_tokens <= capacity):
            raise ValueError("full")
        start = begin(length)
        end = min(start + num_tokens, capacity)
        for half, source in enumerate(swap):
            if source is not None:
                cache[half, start:end] = (k, v)[source][:end - start]
        return returns(length, num_tokens) if returns else length + num_tokens
    return function


def _at_length_minus_1(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    return _writes(lambda n: max(n - 1, 0))(cache, length, k, v)


def _new_tensor(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    copy = cache.clone()
    return append(copy, length, k, v)


def _no_check(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    end = length + k.shape[0]
    cache[0, length:end] = k
    cache[1, length:end] = v
    return end


def _last_token_only(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    end = length + k.shape[0]
    if end > cache.shape[1]:
        raise ValueError("full")
    cache[0, length], cache[1, length] = k[-1], v[-1]
    return end


def _check_too_late(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    for token in range(k.shape[0]):
        if length + token >= cache.shape[1]:
            raise ValueError("full")
        cache[0, length + token], cache[1, length + token] = k[token], v[token]
    return length + k.shape[0]


def _part(part: Callable) -> Callable:
    """An append that writes only the tokens part(T) of the T, each to its place."""
    def function(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
        end = append(cache.clone(), length, k, v)  # checks
        tokens = part(k.shape[0])
        cache[0, length:end][tokens], cache[1, length:end][tokens] = k[tokens], v[tokens]
        return end
    return function


def _capacity(dimension: int) -> Callable:
    """An append that takes another dimension of the cache for the capacity."""
    def function(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
        if length + k.shape[0] > cache.shape[dimension]:
            raise ValueError("full")
        return append(cache, length, k, v)
    return function


def _one_token(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    cache[0, length], cache[1, length] = k[0], v[0]
    return length + 1


def _loop_without_check(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    for token in range(k.shape[0]):
        cache[0, length + token] = k[token]
        cache[1, length + token] = v[token]
    return length + k.shape[0]


def _at_the_end(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    end = append(cache.clone(), length, k, v)  # checks
    cache[0, -k.shape[0]:], cache[1, -k.shape[0]:] = k, v
    return end


def _clears_the_tail(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    end = append(cache, length, k, v)
    cache[:, end:] = 0
    return end


def _concatenates(cache: Tensor, length: int, k: Tensor, v: Tensor) -> int:
    end = append(cache.clone(), length, k, v)  # checks
    cache[:, length:end] = torch.cat((k, v))
    return end


def _case(seed: int, capacity: int, length: int, num_tokens: int, num_kv_heads: int = 1, head_dim: int = 1, note: str = "") -> Case:
    generator = torch.Generator().manual_seed(seed)
    cache = -torch.randint(1, 10, (2, capacity, num_kv_heads, head_dim), generator=generator).float()  # rubbish, below zero
    cache[:, :length] = torch.randint(1, 10, (2, length, num_kv_heads, head_dim), generator=generator).float()
    k, v = torch.randint(10, 100, (2, num_tokens, num_kv_heads, head_dim), generator=generator).float()
    return Case({"cache": cache, "length": length, "k": k, "v": v}, note)


APPEND = Exercise("append", [
    _case(0, 4, 0, 2, note="a prompt of two tokens into four slots that hold none (only rubbish, below 0)"),
    _case(1, 4, 2, 1, note="one token behind two others"),
    _case(2, 4, 1, 3, note="it fits exactly"),
    _case(3, 4, 3, 2, note="two tokens, and one slot is left: ValueError, and the cache stays as it was"),
    _case(4, 4, 4, 1, note="the cache is full: ValueError"),
    _case(5, 16, 5, 4, 12, 8),
    _case(6, 32, 20, 7, 2, 32),
], append, kind="int", changes=("cache",),
    refusal="you refuse although it fits: the capacity is cache.shape[1], and length + T may equal it", mistakes=[
    Mistake(_at_length_minus_1, "it begins one slot too early and overwrites the last token: `length` tokens fill slots 0 to length - 1, "
                                "so slot `length` is the first free one"),
    Mistake(_writes(lambda n: n + 1), "it begins one slot too late and leaves a gap: slots count from 0, so slot `length` is the first "
                                      "free one"),
    Mistake(_writes(lambda n: 0), "it writes from slot 0 and so over the tokens already there: begin at `length`"),
    Mistake(_writes(lambda n: 0, lambda n, t: t), "`length` is not used: begin to write at slot `length`, and return length + T"),
    Mistake(_at_the_end, "it writes to the end of the buffer: the new tokens come right behind the others, from slot `length` on"),
    Mistake(_clears_the_tail, "the slots behind the new tokens are changed too: write slots length to length + T - 1 only"),
    Mistake(_concatenates, "torch.cat joins k and v into one row of 2 T tokens: torch.stack((k, v)) is [2, T, K, D], or write each into "
            "its half", same_text=True),
    Mistake(_writes(lambda n: n, lambda n, t: n), "the cache is right, but the returned length is the old one: return length + T"),
    Mistake(_writes(lambda n: n, lambda n, t: n + 1), "the returned length grows by one: several tokens may come at once, return length + "
            "k.shape[0]"),
    Mistake(_writes(lambda n: n, lambda n, t: t), "that is how many tokens came: return how many the cache holds now, length + T"),
    Mistake(_writes(lambda n: n, swap=(0, 0)), "k went into both halves: cache[0] holds keys, cache[1] holds values"),
    Mistake(_writes(lambda n: n, swap=(1, 1)), "v went into both halves: cache[0] holds keys, cache[1] holds values"),
    Mistake(_writes(lambda n: n, swap=(1, 0)), "keys and values are swapped: cache[0] holds keys, cache[1] holds values"),
    Mistake(_writes(lambda n: n, swap=(0, None)), "only k is written: v belongs into cache[1], to the same slots"),
    Mistake(_writes(lambda n: n, swap=(None, 1)), "only v is written: k belongs into cache[0], to the same slots"),
    Mistake(_new_tensor, "the caller's cache is unchanged: a clone or a torch.cat makes a new tensor. Write into the slice, cache[0, "
                         "begin:end] = k"),
    Mistake(_no_check, "nothing is checked: a slice beyond the end is cut short, so torch gives its own error or writes nothing. Compare "
                       "length + T with the capacity cache.shape[1] first, and raise ValueError"),
    Mistake(_writes(lambda n: n, fits=lambda n, t, c: True), "tokens that do not fit are dropped in silence: raise ValueError"),
    Mistake(_writes(lambda n: n, fits=lambda n, t, c: n + t < c), "it refuses what fits exactly: length + T may equal the capacity, only "
            "more is too much"),
    Mistake(_capacity(0), "the capacity is taken from cache.shape[0], which is 2 (K and V): it is cache.shape[1]",
            everywhere=True),
    Mistake(_capacity(2), "the capacity is taken from cache.shape[2], the number of kv heads: it is cache.shape[1]",
            everywhere=True),
    Mistake(_capacity(-1), "the capacity is taken from cache.shape[-1], the head dimension: it is cache.shape[1]",
            everywhere=True),
    Mistake(_writes(lambda n: n, fits=lambda n, t, c: False), "it refuses every call: raise only if length + T is more than the capacity "
            "cache.shape[1]", everywhere=True),
    Mistake(_writes(lambda n: n, fits=lambda n, t, c: n < c), "the check asks whether one slot is free, and T tokens come: compare length "
            "+ T"),
    Mistake(_last_token_only, "only the last of the T tokens is written: write all of them, cache[0, length:length + T] = k"),
    Mistake(_part(lambda t: slice(0, 1)), "only the first of the T tokens is written: they need T slots, cache[0, length:length + T] = k"),
    Mistake(_part(lambda t: slice(0, t - 1)), "the last of the T tokens is dropped: a slice leaves out its end, so it must be length + T"),
    Mistake(_one_token, "this is an append for one token: T = k.shape[0] of them come, write cache[0, length:length + T] = k and return "
            "length + T"),
    Mistake(_loop_without_check, "nothing is checked before the loop, so it runs over the end of the buffer with half of the tokens "
            "written: compare length + T with cache.shape[1] first, and raise ValueError"),
    Mistake(_check_too_late, "it raises only after it has written some of the tokens: check first, then write, so that a refused call "
                             "changes nothing"),
])


def _waste_cases() -> list[Case]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(1, 2049, (n,), generator=generator).tolist() for n in (3, 5, 40)]
    shown = [([25], 100, "one sequence"), ([10, 30], 40, "two sequences"), ([64, 64, 64], 64, "nothing is wasted"),
             ([0, 8], 8, "one holds no token yet")]
    every = shown + [(lengths, 2048, "") for lengths in drawn]
    return [Case({"lengths": lengths, "max_model_len": limit}, note) for lengths, limit, note in every]


WASTED_SHARE = Exercise("wasted_share", _waste_cases(), wasted_share, kind="float", mistakes=[
    Mistake(lambda n, m: sum(n) / (len(n) * m), "that is the share in use: the wasted one is 1 minus it"),
    Mistake(lambda n, m: 100 * wasted_share(n, m), "that is in percent: the share is a number from 0 to 1"),
    Mistake(lambda n, m: (len(n) * m - sum(n)) / sum(n), "the empty slots are divided by the used ones: divide by all reserved ones, "
            "len(lengths) * max_model_len"),
    Mistake(lambda n, m: 1 - max(n) / m, "only the longest sequence counts here: each one reserves max_model_len slots, so sum over all"),
    Mistake(lambda n, m: 1 - sum(n) / m, "there is one reservation in all here: each sequence has its own, len(lengths) * max_model_len "
            "slots together"),
    Mistake(lambda n, m: len(n) * m - sum(n), "that is the number of empty slots: divide it by the number of reserved ones"),
    Mistake(lambda n, m: 1 - sum(n) / (len(n) * max(n)), "the longest sequence sets the reservation here: each reserves max_model_len "
            "slots, whatever comes"),
    Mistake(lambda n, m: wasted_share(n, m) // 1, "// throws the fraction away: divide with /"),
    Mistake(lambda n, m: (len(n) * m - sum(n)) // (len(n) * m), "// divides whole numbers and drops the fraction, so nearly every share is "
            "0: divide with /"),
    Mistake(lambda n, m: 1 - sum(n) // (len(n) * m), "// makes the used share 0 unless all is full, and 1 - 0 is 1: divide with /"),
    *(Mistake(lambda n, m, digits=digits: round(wasted_share(n, m), digits), f"rounded to {digits} digits: do not round, return the share "
              "as it is") for digits in (0, 1, 2, 3, 4)),
    Mistake(lambda n, m: round(wasted_share(n, m)), "rounded to a whole number: do not round, a share lies between 0 and 1"),
    Mistake(lambda n, m: sum(m - x for x in n) / m, "the empty slots of all sequences are divided by one reservation: divide by all of "
            "them"),
])

EXERCISES = [APPEND, WASTED_SHARE]
