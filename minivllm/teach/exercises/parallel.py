"""Exercise 2 of notebook 10: a row-parallel layer whose bias is added once. Its checker runs it on ranks that are threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.teach.compare import a_kind
from minivllm.teach.diagnose import Result, diagnose
from minivllm.teach.exercise import Case, Exercise, Mistake
from minivllm.teach.stub import is_stub, returned_none
from minivllm.teach.thread_ranks import ThreadRank, on_ranks


def row_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, all_reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, in / N], weight [out, in / N]: this rank's; bias [out] or None: the whole. Returns y [T, out], the same on every rank."""
    return all_reduce(F.linear(x, weight, bias if rank == 0 else None))


class WrongForm(TypeError):
    """The function cannot be called as ranks call it."""


def on_all_ranks(function: Any) -> Any:
    """A learner's row_parallel as a plain function (x [T, in], weight [out, in], bias, size) -> what each rank has, [N, T, out]."""
    if not callable(function):
        return function

    def adapted(x: Tensor, weight: Tensor, bias: Tensor | None, size: int) -> Tensor:
        _check_form(function)

        def work(rank: ThreadRank) -> tuple[Tensor, list[Tensor | None]]:
            own = [part.chunk(size, dim=1)[rank.rank].clone() for part in (x, weight)] + [None if bias is None else bias.clone()]
            return _checked(function, function(*own, rank.rank, _strict(rank.all_reduce)), rank.rank), own

        results = on_ranks(size, work)
        for rank, (_, own) in enumerate(results):  # what a rank did to its parts shows in the whole
            for whole, part in zip((x.chunk(size, dim=1)[rank], weight.chunk(size, dim=1)[rank], bias), own):
                if whole is not None and not torch.equal(whole, part):
                    whole.copy_(part)
        return _together([y for y, _ in results])

    adapted.__wrapped__ = function  # so that a diagnosis finds the learner's own lines
    adapted.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                                               for name in ("x", "weight", "bias", "size")])
    return adapted


def _strict(all_reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def strict(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise _advised(WrongForm(f"all_reduce was given {a_kind(tensor)}"), "all_reduce takes one tensor: this rank's summand [T, out]")
        return all_reduce(tensor)
    return strict


def _checked(function: Callable, y: Any, rank: int) -> Any:
    """What one rank returned, if it is a tensor, or if nothing is written yet."""
    if isinstance(y, Tensor) or (y is None or y is ...) and is_stub(function):
        return y
    advice = f"your function returns {a_kind(y)} where a tensor [T, out] is wanted"
    if y is None:
        advice = f"rank {rank} returns None: every rank must return the whole result" if rank else returned_none(function)
    raise _advised(WrongForm(f"rank {rank} returned {a_kind(y)}"), advice)


def _together(results: list[Any]) -> Any:
    """[N, T, out] of every rank's result."""
    if not all(isinstance(y, Tensor) for y in results):
        return results[0]
    if len({y.shape for y in results}) > 1:
        raise _advised(WrongForm(f"the ranks returned different shapes: {', '.join(str(list(y.shape)) for y in results)}"),
                       "every rank must return the same [T, out]: nothing in its shape may depend on rank")
    return torch.stack(results)


def _check_form(function: Callable) -> None:
    try:
        inspect.signature(function).bind(*range(5))
    except TypeError:
        raise _advised(WrongForm("it cannot be called with five arguments"),
                       "the function must take these arguments, in this order: row_parallel(x, weight, bias, rank, all_reduce)") from None
    except ValueError:  # a builtin that does not tell its signature
        pass


def _advised(error: Exception, advice: str) -> Exception:
    error.advice = advice
    return error


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None, size: int) -> Tensor:
    y = x @ weight.T if bias is None else x @ weight.T + bias
    return y.expand(size, *y.shape).clone()


def _rows(seed: int, tokens: int, inputs: int, outputs: int, size: int, bias: bool, note: str = "") -> Case:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-3, 4, shape, generator=generator).float()
    return Case({"x": draw(tokens, inputs), "weight": draw(outputs, inputs),
                 "bias": 10 * torch.arange(1, outputs + 1).float() if bias else None, "size": size}, note)


def _wrong(function: Callable, hint: str, **options: bool) -> Mistake:
    return Mistake(on_all_ranks(function), hint, **options)


def _for_rank_0_alone(x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, all_reduce: Callable) -> Tensor:
    y = F.linear(x, weight, bias if rank == 0 else None)
    return all_reduce(y) if rank == 0 else y


def _bias_of_rank_0_alone(x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, all_reduce: Callable) -> Tensor:
    y = all_reduce(F.linear(x, weight))
    return y + bias if rank == 0 and bias is not None else y


def _twice(x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, all_reduce: Callable) -> Tensor:
    return all_reduce(all_reduce(F.linear(x, weight, bias if rank == 0 else None)))


def _twice_then_bias(x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, all_reduce: Callable) -> Tensor:
    y = all_reduce(all_reduce(F.linear(x, weight)))
    return y if bias is None else y + bias


def _bias_twice(x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, all_reduce: Callable) -> Tensor:
    y = all_reduce(F.linear(x, weight, bias if rank == 0 else None))
    return y if bias is None else y + bias


def _mean(x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, all_reduce: Callable) -> Tensor:
    return all_reduce(F.linear(x, weight, bias)) / all_reduce(torch.ones(1))


def _others_keep_their_summand(x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, all_reduce: Callable) -> Tensor:
    y = F.linear(x, weight, bias if rank == 0 else None)
    total = all_reduce(y)
    return total if rank == 0 else y


def _asks_the_bias(x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, all_reduce: Callable) -> Tensor:
    y = all_reduce(F.linear(x, weight))
    return y + bias if bias else y


ROW_PARALLEL = Exercise("row_parallel", [
    _rows(12, 1, 2, 2, 2, True, "two ranks, an input each; below, what both return"),
    _rows(1, 2, 6, 3, 3, True, "three ranks: the bias must be in the sum once"),
    _rows(2, 3, 4, 2, 2, False, "no bias: None"),
    _rows(3, 1, 5, 2, 1, True, "one rank"),
    _rows(4, 4, 8, 5, 4, True), _rows(5, 2, 12, 7, 6, True), _rows(6, 5, 9, 4, 3, False), _rows(7, 3, 16, 6, 4, True),
], _whole, kind="tensor", shape="ranks, T, out", mistakes=[
    _wrong(lambda x, weight, bias, rank, all_reduce: F.linear(x, weight, bias if rank == 0 else None),
           "each rank has its own summand only: all_reduce is missing, or what it returns is not used"),
    _wrong(lambda x, weight, bias, rank, all_reduce: all_reduce(F.linear(x, weight, bias)),
           "every rank adds the bias, so the sum holds it N times: only one rank may add it before the all-reduce"),
    _wrong(lambda x, weight, bias, rank, all_reduce: all_reduce(F.linear(x, weight)),
           "the bias is missing"),
    _wrong(lambda x, weight, bias, rank, all_reduce: F.linear(x, weight),
           "each rank has its own summand only, and nobody adds the bias: both all_reduce and the bias are missing"),
    _wrong(lambda x, weight, bias, rank, all_reduce: F.linear(x, weight, bias),
           "each rank has its own summand only, and every rank adds the bias: all_reduce is missing, or what it returns is not used"),
    _wrong(_bias_twice,
           "the bias is in it twice: added before the all-reduce and again after it"),
    _wrong(_mean,
           "this is the mean over the ranks: an all-reduce adds up, and its sum is the product; nothing is left to divide"),
    _wrong(_others_keep_their_summand,
           "rank 0 returns the sum, the others their own summand: every rank must return what all_reduce returned"),
    _wrong(_bias_of_rank_0_alone,
           "the bias is added after the all-reduce, and on rank 0 alone: the other ranks never see it. Before it, one rank is enough"),
    _wrong(lambda x, weight, bias, rank, all_reduce: all_reduce(F.linear(x, weight, bias if rank else None)),
           "every rank but the first adds the bias: `if rank` is true for 1, 2, 3. One rank must add it: rank == 0"),
    _wrong(lambda x, weight, bias, rank, all_reduce: all_reduce(F.linear(x, weight, bias if rank == 1 else None)),
           "where there is one rank alone, no rank is number 1, and nobody adds the bias. Rank 0 is always there"),
    _wrong(lambda x, weight, bias, rank, all_reduce: F.linear(all_reduce(x), weight, bias),
           "x is summed over the ranks: its pieces lie side by side. What must be summed is the product"),
    _wrong(lambda x, weight, bias, rank, all_reduce: F.linear(all_reduce(x), weight, bias if rank == 0 else None),
           "x is summed over the ranks, though its pieces lie side by side, and rank 0 alone adds the bias. Sum the product"),
    _wrong(lambda x, weight, bias, rank, all_reduce: F.linear(all_reduce(x), all_reduce(weight), bias),
           "x and the weights are summed over the ranks: their pieces lie side by side. What must be summed is their product"),
    _wrong(lambda x, weight, bias, rank, all_reduce: F.linear(x, all_reduce(weight), bias),
           "the weights are summed over the ranks: their columns belong to different inputs. What must be summed is the product"),
    _wrong(_for_rank_0_alone,
           "rank 0 waits in an all-reduce that the others never call: real ranks would hang here. Every rank must call it", same_text=True),
    _wrong(_twice,
           "two all-reduces: the second one sums N equal sums, so everything is N times too large"),
    _wrong(_twice_then_bias,
           "two all-reduces: the second one sums N equal sums, so the product is N times too large"),
    _wrong(_asks_the_bias,
           "`if bias` asks a tensor of several numbers whether it is true: write `if bias is not None`", same_text=True),
    _wrong(lambda x, weight, bias, rank, all_reduce: all_reduce(x @ weight.T + (bias if rank == 0 else 0)),
           "bias may be None, which cannot be added: F.linear(x, weight, bias) takes None", same_text=True),
    _wrong(lambda x, weight, bias, rank, all_reduce: all_reduce(F.linear(x, weight, bias if rank == 0 else torch.zeros_like(bias))),
           "bias may be None, of which there are no zeros: give F.linear a None on the other ranks", same_text=True),
])


def judge(function: Any) -> Result:
    """What `check.row_parallel` finds: the learner's function runs on as many threads as there are ranks."""
    return diagnose(ROW_PARALLEL, on_all_ranks(function))


CHECKERS: dict[str, Callable[[Any], Result]] = {"row_parallel": judge}
