"""Planted faults, each after one that was found in practice: code that reads well and is wrong. FAULTS holds them by name.

A learner reads `source(name)` and looks for an input that exposes the fault (`check.break_it`). The faults themselves lie in bugs_blocks,
bugs_paging, bugs_scheduler, bugs_policy, bugs_attention, bugs_graphs, bugs_sampling and bugs_parallel; how they are run is told in break_it.
"""

from __future__ import annotations

import inspect

from minivllm.teach import bugs_attention, bugs_blocks, bugs_graphs, bugs_paging, bugs_parallel, bugs_policy, bugs_sampling, bugs_scheduler
from minivllm.teach.fault import Fault

FAULTS: dict[str, Fault] = {fault.name: fault for module in (bugs_blocks, bugs_paging, bugs_scheduler, bugs_policy, bugs_attention, bugs_graphs, bugs_sampling, bugs_parallel) for fault in module.FAULTS}


def get(name: str) -> Fault:
    """The fault called `name`. Raises KeyError with the names there are."""
    if name not in FAULTS:
        raise KeyError(f"no planted fault is called {name!r}; there are {', '.join(FAULTS)}")
    return FAULTS[name]


def source(name: str) -> str:
    """The faulty code, to be read by a learner."""
    return inspect.getsource(get(name).faulty)
