"""torch.compile for the parts of a model that are plain torch: optional, and never under enforce_eager. Built in notebook 09.

Attention keeps its own kernels: what a backend does depends on the batch, and a compiler would have to guard on all of it. What is left
is the MLP: one graph for a single token and one for any other number.
"""

from __future__ import annotations

from torch import nn


def compile_parts(model: nn.Module) -> int:
    """Compile in place what `model` marks with `compiles = True`, for any number of tokens; returns how many. They compile on first use."""
    parts = [module for module in model.modules() if getattr(module, "compiles", False)]
    for part in parts:
        part.compile(dynamic=True)
    return len(parts)
