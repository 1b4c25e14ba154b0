"""Stub or attempt: what a function that returned None, or raised NotImplementedError, says about how far its writer is.

Reads the function's source, and its bytecode where there is none. Calls nothing and knows no exercise.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from typing import Any

NOT_ATTEMPTED = "not attempted yet"
STILL_REACHED = f"{NOT_ATTEMPTED}: the line `raise NotImplementedError` is still reached, delete it"
RETURNED_NONE = "your function returned None: is a `return` missing?"


def is_stub(function: Any) -> bool:
    """Whether nothing is written yet: only a docstring, `...`, `pass`, an empty `return` or `raise NotImplementedError`."""
    if function is None or function is ...:
        return True
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return False
    body = _body(function)
    if body is not None:
        return all(_says_nothing(statement) for statement in body)
    return len(list(dis.get_instructions(code))) <= 3  # a constant and its return


def not_attempted(function: Any) -> str:
    """What to print for a function that raised NotImplementedError, or that is a stub."""
    return NOT_ATTEMPTED if is_stub(function) else STILL_REACHED


def returned_none(function: Any) -> str:
    """What to print for a function that is no stub and returned None."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    prints = code is not None and "print" in code.co_names
    return RETURNED_NONE + (" print() only shows a value, `return` hands it back" if prints else "")


def _body(function: Any) -> list[ast.stmt] | None:
    """The statements of a `def`; None for a lambda, and where there is no source."""
    if inspect.unwrap(function).__code__.co_name == "<lambda>":
        return None
    try:
        module = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    first = module.body[0] if module.body else None
    return first.body if isinstance(first, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def _says_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant) and statement.value.value in (None, ...)
    if isinstance(statement, ast.Raise) and statement.exc is not None:
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    return False
