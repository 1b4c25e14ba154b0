"""Exercise: what a learner is asked to write, the right answer, and the wrong answers that people give, each with its hint.

Owns how a function is run on a case so that nothing it does can reach the next case. Knows no exercise and prints nothing.
"""

from __future__ import annotations

import copy
import dis
import inspect
import linecache
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One call. `args` by name, in the function's order; `note` says what is special about it."""

    args: dict[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people give. A learner's function that gives the same results gets `hint` as the likely cause.

    same_text: an error of the same type is not enough to be alike, its text must agree too. everywhere: most cases are not enough.
    """

    function: Callable
    hint: str
    same_text: bool = False
    everywhere: bool = False


@dataclass(frozen=True)
class Exercise:
    """`changes`: arguments that the function is meant to change in place. `reference` decides what is right.

    kind: what it returns: "int", "float", "bool" or "tensor". shape: the letters of a returned tensor's dimensions.
    refusal: the hint for a function that raises on purpose where it must not.
    adapt: turns what a learner gives, such as a kernel, into a plain function of the cases' arguments.
    """

    name: str
    cases: list[Case]
    reference: Callable
    mistakes: list[Mistake]
    kind: str
    shape: str = ""
    changes: tuple[str, ...] = ()
    refusal: str = "your own `raise` or `assert` stops this call, which is a valid one: look at its condition"
    adapt: Callable[[Any], Any] | None = None

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.cases[0].args)})"


@dataclass
class Outcome:
    """What one call did: the value it returned or what it raised (with the place), and the arguments as it left them.

    on_purpose: a `raise` or `assert` of the function's own raised it.
    """

    value: Any = None
    raised: Exception | None = None
    where: str = ""
    on_purpose: bool = False
    after: dict[str, Any] = field(default_factory=dict)


def run(function: Callable, case: Case) -> Outcome:
    """Call `function` on a copy of the case's arguments. An Exception becomes part of the outcome."""
    args = copy.deepcopy(case.args)
    try:
        return Outcome(value=function(*args.values()), after=args)
    except Exception as error:
        return Outcome(raised=error, where=_where(function, error), on_purpose=_on_purpose(function, error), after=args)


def one_line(error: Exception, limit: int = 160) -> str:
    """The error's type and the first line of its message."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = re.sub(r"\b0x[0-9a-fA-F]+", "...", text)  # an address differs from run to run
    text = text if len(text) <= limit else text[:limit - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _on_purpose(function: Callable, error: Exception) -> bool:
    """Whether a raise or assert statement in the learner's code raised, and not an operation in it or below it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if code is None or trace is None or trace.tb_frame.f_code.co_filename != code.co_filename:
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _where(function: Callable, error: Exception) -> str:
    """Which line of the learner's function raised, counted from its `def`; empty where that cannot be told."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if code and frame.filename == code.co_filename]
    if not frames or frames[-1].lineno is None or frames[-1].lineno < code.co_firstlineno:
        return ""
    line = linecache.getline(frames[-1].filename, frames[-1].lineno).strip()
    number = frames[-1].lineno - code.co_firstlineno + 1
    return f"line {number}: {line[:100]}" if line else f"line {number}"
