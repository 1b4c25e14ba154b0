"""Checkers that diagnose: `check.causal_mask(causal_mask)` prints "not attempted yet", what is wrong and why, or "6 checks passed".

Each exercise of `minivllm.teach.exercises` is a checker here under its name; `break_it` checks an input that is to expose a planted
fault. `result(name, function)` returns what a checker would print, for tests. Used in every notebook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.teach.diagnose import Result, diagnose
from minivllm.teach.exercises import CHECKERS, EXERCISES

__all__ = ["break_it", "result", *EXERCISES, *CHECKERS]


def result(name: str, function: Any) -> Result:
    """What `check.<name>(function)` finds. Raises KeyError for an unknown exercise, with those there are."""
    if name in CHECKERS:
        return CHECKERS[name](function)
    if name not in EXERCISES:
        raise KeyError(f"no exercise is called {name!r}; there are {', '.join([*EXERCISES, *CHECKERS])}")
    return diagnose(EXERCISES[name], function)


def break_it(name: str, **inputs: Any) -> None:
    """Run the planted fault `name` and the right code on the learner's inputs, and print whether they differ."""
    from minivllm.teach.break_it import attempt

    print(attempt(name, **inputs))


def _checker(name: str) -> Callable[[Any], None]:
    def checker(function: Any) -> None:
        print(result(name, function))

    checker.__name__ = checker.__qualname__ = name
    signature = EXERCISES[name].signature if name in EXERCISES else name
    checker.__doc__ = f"Check your own {signature}: print the first wrong result and its likely cause, if any."
    return checker


globals().update({name: _checker(name) for name in [*EXERCISES, *CHECKERS]})


def __getattr__(name: str) -> Any:
    raise AttributeError(f"there is no checker called {name!r}; there are {', '.join(__all__)}")
