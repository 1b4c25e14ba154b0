"""What the notebooks show and check. Reads events and stats of the engine; no other part of the package imports it."""

import importlib
from typing import Any

_WHERE = {  # name -> module; imported when first asked for, so that nothing but torch is needed to import the package
    "BlockView": "views.blocks",
    "TimelineView": "views.timeline",
    "MemoryView": "views.memory_view",
    "BatchView": "views.batch",
    "RecomputeView": "views.recompute",
    "SlotView": "views.slots",
    "GraphView": "views.graph_view",
    "RankView": "views.rank_view",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"minivllm.teach has no {name!r}; it has {', '.join(_WHERE)}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
