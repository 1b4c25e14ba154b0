"""Diagnosis: run an exercise's cases through a learner's function and say the first thing that is wrong, with its likely cause.

A result that is wrong in the way of a listed mistake gets that mistake's hint. Never raises for what the learner's function does.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minivllm.teach.advice import advice_on
from minivllm.teach.compare import a_kind, as_tensor, number_problem, same, show, tensor_problem
from minivllm.teach.exercise import Case, Exercise, Outcome, one_line, run
from minivllm.teach.stub import NOT_ATTEMPTED, is_stub, not_attempted, returned_none

_WIDTH = 110
_MOST_LINES = 13
_kept: dict[tuple[str, Callable], list[Outcome]] = {}


@dataclass(frozen=True)
class Result:
    """`status` is "passed", "failed" or "not attempted"; `check` is the number of the first check that failed; `text` is what to print."""

    status: str
    text: str
    check: int | None = None
    cause: str = ""

    def __str__(self) -> str:
        return self.text


def diagnose(exercise: Exercise, function: Any) -> Result:
    """Check a learner's `function`. A stub (`...`, None, or one that raises NotImplementedError) counts as not attempted."""
    if function is None or function is ...:
        return Result("not attempted", NOT_ATTEMPTED)
    if exercise.adapt is not None:
        function = exercise.adapt(function)
    if not callable(function):
        text = f"give the function itself, not its result: check.{exercise.name}({exercise.name}); this is {a_kind(function)}"
        return Result("failed", text, cause=text)
    outcomes = [run(function, case) for case in exercise.cases]
    silent = all(_untouched(case, got) for case, got in zip(exercise.cases, outcomes))
    if silent and (is_stub(function) or all(got.raised for got in outcomes)):
        return Result("not attempted", not_attempted(function))
    wanted = _known_outcomes(exercise, exercise.reference)
    for index, (case, got, want) in enumerate(zip(exercise.cases, outcomes, wanted)):
        problem = find_problem(exercise, case, got, want)
        if problem:
            cause = _cause(exercise, function, outcomes, index, want) or _general(problem, got)
            return Result("failed", _report(exercise, index, got, want, cause), index + 1, cause)
    return Result("passed", f"{len(exercise.cases)} checks passed")


def _cause(exercise: Exercise, function: Any, outcomes: list[Outcome], index: int, want: Outcome) -> str:
    """What the learner's errors on purpose, the list of mistakes and a missing value tell; empty where they tell nothing."""
    got = outcomes[index]
    cause = _signature_problem(exercise, function)
    if not cause and got.raised is None and got.value is None and want.raised is None:
        cause = returned_none(function)
    if not cause and want.raised is not None and got.on_purpose and not isinstance(got.raised, type(want.raised)):
        cause = f"the exception must be {type(want.raised).__name__}, yours is {type(got.raised).__name__}"
    cause = cause or _known_mistake(exercise, outcomes, index)
    if not cause and want.raised is None and got.on_purpose and not isinstance(got.raised, NotImplementedError):
        cause = exercise.refusal
    if not cause and want.raised is not None and got.raised is not None and not isinstance(got.raised, (type(want.raised), NameError)):
        cause = (f"this call must be refused with {type(want.raised).__name__} before anything is written: the check is missing or comes "
                 f"too late, and the {type(got.raised).__name__} follows from that")
    return cause


def find_problem(exercise: Exercise, case: Case, got: Outcome, want: Outcome) -> str | None:
    """What is wrong with one outcome, or None."""
    if got.raised is not None:
        if want.raised is not None and isinstance(got.raised, type(want.raised)):
            return _arguments_problem(exercise, case, got, want)
        return f"raised {one_line(got.raised)}" + (f" (your {got.where})" if got.where else "")
    if want.raised is not None:
        return _not_refused(got, type(want.raised).__name__)
    changed = _changed_input(exercise, case, got)
    if changed:
        return changed
    problem = tensor_problem(got.value, want.value, exercise.shape) if exercise.kind == "tensor" else number_problem(got.value, want.value)
    return problem or _arguments_problem(exercise, case, got, want)


def _not_refused(got: Outcome, wanted: str) -> str:
    """What to say of a value, or of nothing, where an exception of the type `wanted` must come."""
    if isinstance(got.value, BaseException) or isinstance(got.value, type) and issubclass(got.value, BaseException):
        return f"your function hands the {wanted} back instead of raising it: write `raise`, not `return`"
    what = "it comes to its end, or to an empty `return`, and gives None" if got.value is None else "it does not"
    return f"it must raise {wanted} here: {what}"


def _untouched(case: Case, got: Outcome) -> bool:
    if isinstance(got.raised, NotImplementedError):
        return True
    nothing = got.raised is None and (got.value is None or got.value is ...)
    return nothing and all(same(got.after[name], case.args[name]) for name in case.args)


def _changed_input(exercise: Exercise, case: Case, got: Outcome) -> str | None:
    for name, before in case.args.items():
        if name not in exercise.changes and not same(got.after[name], before):
            return (f"your function changes its input {name} in place: work on a copy, and beware of operations that end in _ "
                    f"and of += and *= on an argument")
    return None


def _arguments_problem(exercise: Exercise, case: Case, got: Outcome, want: Outcome) -> str | None:
    changed = _changed_input(exercise, case, got)
    if changed:
        return changed
    for name in exercise.changes:
        if not same(got.after[name], want.after[name]):
            return f"{name} is changed although the call must fail" if want.raised else f"{name} does not hold what it should afterwards"
    return None


def _signature_problem(exercise: Exercise, function: Any) -> str:
    try:
        inspect.signature(function).bind(*exercise.cases[0].args)
    except TypeError:
        return f"the function must take these arguments, in this order: {exercise.signature}"
    except ValueError:  # a builtin that does not tell its signature
        pass
    return ""


def _alike(a: Outcome, b: Outcome, same_text: bool) -> bool:
    if a.raised is not None or b.raised is not None:
        if same_text and not a.on_purpose and str(a.raised) != str(b.raised):
            return False
        return type(a.raised) is type(b.raised) and all(same(a.after[name], b.after[name]) for name in a.after)
    values = same(_neutral(a.value), _neutral(b.value))
    return values and all(same(a.after[name], b.after[name]) for name in a.after)


def _neutral(value: Any) -> Any:
    tensor = as_tensor(value) if not isinstance(value, (int, float)) else None
    return value if tensor is None else tensor


def _known_mistake(exercise: Exercise, outcomes: list[Outcome], index: int) -> str:
    """The hint of the mistake that gives the same results: here and in every case, or here and in most cases. Empty where none does.

    Not of one that agrees here alone: small cases often agree by chance, and a wrong hint is worse than none.
    """
    best, hint = len(outcomes) // 2, ""
    for mistake in exercise.mistakes:
        results = [_alike(got, wrong, mistake.same_text) for got, wrong in zip(outcomes, _known_outcomes(exercise, mistake.function))]
        if results[index] and sum(results) > best and (all(results) or not mistake.everywhere):
            best, hint = sum(results), mistake.hint
    return hint


def _known_outcomes(exercise: Exercise, function: Callable) -> list[Outcome]:
    """What the exercise's reference, or one of its mistakes, does in every case. Kept: it is always the same, and kernels take a while."""
    key = exercise.name, function
    if key not in _kept:
        _kept[key] = outcomes = [run(function, case) for case in exercise.cases]
        for error in (outcome.raised for outcome in outcomes if outcome.raised is not None):  # its frames lead to the caller's, an LLM in them
            error.__traceback__ = error.__context__ = error.__cause__ = None
    return _kept[key]


def _general(problem: str, got: Outcome) -> str:
    if got.raised is None:
        return problem
    if isinstance(own := getattr(got.raised, "advice", None), str):  # the error knows best
        return own
    return advice_on(got.raised)


def _report(exercise: Exercise, index: int, got: Outcome, want: Outcome, cause: str) -> str:
    case = exercise.cases[index]
    head = f"check {index + 1} of {len(exercise.cases)} failed" + (f": {case.note}" if case.note else "")
    lines = [head, *labelled("input", ", ".join(f"{name} = {show(value)}" for name, value in case.args.items()).replace("\n ", ";"))]
    lines += labelled("got", _shown(exercise, got, want, True)) + labelled("want", _shown(exercise, want, got, False))
    ending = labelled("likely cause", cause)
    return "\n".join([*lines[:_MOST_LINES - len(ending)], *ending])


def _shown(exercise: Exercise, outcome: Outcome, other: Outcome, learners: bool) -> str:
    if outcome.raised is not None and not learners:
        text = f"raise {type(outcome.raised).__name__}"
    elif outcome.raised is not None:
        text = f"raised {one_line(outcome.raised, 120)}" + (f"\n(your {outcome.where})" if outcome.where else "")
    else:
        text = show(outcome.value, other.value if exercise.kind == "tensor" and other.raised is None else None)
    for name in exercise.changes:
        if not same(outcome.after[name], other.after[name]) and (outcome.raised is None or learners and other.raised is not None):
            text += f", {name} then {show(outcome.after[name], other.after[name])}"
    if exercise.adapt is not None and outcome.raised is None:  # a kernel returns nothing: what it leaves is all that counts
        return text.partition(", ")[2] or "no error"
    return text


def labelled(label: str, text: str) -> list[str]:
    """Wrapped lines, the first with the label; line breaks in `text` stay."""
    indent = " " * 9 if len(label) < 8 else "    "
    first = f"  {label}".ljust(9) if len(label) < 8 else f"  {label}: "
    lines = []
    for part in text.split("\n"):
        lines += textwrap.wrap(part, _WIDTH, initial_indent=indent if lines else first, subsequent_indent=indent) or [indent]
    return lines
