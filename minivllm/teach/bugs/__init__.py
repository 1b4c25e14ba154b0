"""Planted faults, each after one that was found in practice: code that reads well and is wrong. FAULTS holds them by name.

A learner reads `source(name)` and looks for an input that exposes the fault (`check.break_it`). The faults themselves lie in this folder's
modules, each with a list FAULTS; how they are run is told in break_it.
"""

from __future__ import annotations

import inspect

from minivllm.teach.bugs import attention, blocks, graphs, paging, parallel, policy, sampling, scheduler
from minivllm.teach.bugs.fault import Fault

_MODULES = (blocks, paging, scheduler, policy, attention, graphs, sampling, parallel)  # in the order in which their faults are listed
FAULTS: dict[str, Fault] = {fault.name: fault for module in _MODULES for fault in module.FAULTS}


def get(name: str) -> Fault:
    """The fault called `name`. Raises KeyError with the names there are."""
    if name not in FAULTS:
        raise KeyError(f"no planted fault is called {name!r}; there are {', '.join(FAULTS)}")
    return FAULTS[name]


def source(name: str) -> str:
    """The faulty code, to be read by a learner."""
    return inspect.getsource(get(name).faulty)
