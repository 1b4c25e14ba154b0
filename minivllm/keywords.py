"""Unknown keywords answered with the nearest valid one; shared by every public constructor."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable


def unknown_keyword(owner: str, name: str, valid: Iterable[str]) -> TypeError:
    """The error for `owner(name=...)`, which has no such keyword. It names the closest one that exists."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"valid keywords: {', '.join(valid)}"
    return TypeError(f"{owner} has no keyword {name!r}: {hint}")


def helpful_keywords(owner: str) -> Callable[[type], type]:
    """Class decorator: a misspelt keyword raises `unknown_keyword` for `owner`, what the user called, not Python's bare TypeError."""

    def decorate(cls: type) -> type:
        plain_init = cls.__init__
        valid = [name for name in inspect.signature(plain_init).parameters if name != "self"]

        @functools.wraps(plain_init)
        def init(self, *args, **kwargs):
            for name in kwargs:
                if name not in valid:
                    raise unknown_keyword(owner, name, valid)
            plain_init(self, *args, **kwargs)

        cls.__init__ = init
        return cls

    return decorate


def require_int(owner: str, name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int in `[low, high]`, else a TypeError or ValueError that names `owner.name` and the value."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = value.__index__()  # int and numpy integers, not 3.0 and not "3"
    except (AttributeError, TypeError):
        raise TypeError(f"{owner}.{name} must be an int, got {value!r}") from None
    if number < low or (high is not None and number > high):
        span = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{owner}.{name} must be {span}, got {number}")
    return number


def require_number(owner: str, name: str, value: object) -> float:
    """`value` as a finite float, else a TypeError or ValueError that names `owner.name` and the value."""
    is_bool = isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", None) == "b"
    if is_bool or isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{owner}.{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        raise ValueError(f"{owner}.{name} must be a finite number, got {type(value).__name__} {value!r:.40}") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{owner}.{name} must be a finite number, got {number}")
    return number


def require_range(owner: str, name: str, value: object, low: float, high: float) -> float:
    """`value` as a float in `[low, high]`, else a TypeError or ValueError that names `owner.name` and the value."""
    number = require_number(owner, name, value)
    if not low <= number <= high:
        raise ValueError(f"{owner}.{name} must be between {low} and {high}, got {number}")
    return number
