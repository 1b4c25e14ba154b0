"""Fault: a planted fault with the right code beside it, and Experiment: how both are run on a learner's input and compared.

Knows no particular fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """What the right and the faulty code gave, in a few words each, and what a learner should try where they agree."""

    exposed: bool
    right: str
    faulty: str
    hint: str = ""


@dataclass(frozen=True)
class Fault:
    """name, title; story: where such a fault happened. faulty and right: a class or function each, of the same interface.

    compare(fault, **inputs) runs both, and raises BadInput for what cannot be run; `inputs` names what it needs, with the default
    of what may be left out (`...` where nothing may). exposing, harmless: an input each that does and does not show the fault.
    """

    name: str
    title: str
    story: str
    faulty: Any
    right: Any
    compare: Callable[..., Comparison]
    inputs: dict[str, Any]
    exposing: dict[str, Any]
    harmless: dict[str, Any]
    hint: Callable[..., str] = field(default=lambda *args: "")
