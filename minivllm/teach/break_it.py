"""The "break it" exercises: run a planted fault and the right code on a learner's input, and say whether the input tells them apart.

Knows how to word the answer; the faults know how to run and what to hint.
"""

from __future__ import annotations

import difflib
from typing import Any

from minivllm.teach.bugs import FAULTS, get
from minivllm.teach.trial import BadInput


def attempt(name: str, **inputs: Any) -> str:
    """What `check.break_it(name, ...)` prints. Never raises for a wrong input."""
    if name not in FAULTS:
        return f"no planted fault is called {name!r}; there are {', '.join(FAULTS)}"
    fault = get(name)
    unknown = [key for key in inputs if key not in fault.inputs]
    if unknown:
        near = difflib.get_close_matches(unknown[0], fault.inputs, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        return f"{name} has no input {unknown[0]!r}{meant}; it takes {', '.join(fault.inputs)}"
    given = {**fault.inputs, **inputs}
    if any(_missing(value, fault.inputs[key]) for key, value in given.items()):
        return "not attempted yet"
    try:
        found = fault.compare(fault, **given)
    except BadInput as error:
        return f"this input cannot be run: {error}"
    if found.exposed:
        return f"exposed: {found.right}\n         {found.faulty}"
    return f"not exposed: both give {found.right}\n  hint: {found.hint}"


def _missing(value: Any, default: Any) -> bool:
    """Whether something is still to be filled in, at any depth of lists and tuples. An empty list is an attempt.

    A None where the fault has a value of its own is one too: what the learner wrote, and a wrong input.
    """
    if isinstance(value, (list, tuple)):
        return any(_missing(item, ...) for item in value)
    return value is ... or value is None and default is ...
