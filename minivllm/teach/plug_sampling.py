"""The real engine with a learner's `top_p_keep` in its sampler instead of the package's. As `plug`, for notebook 08."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minivllm.llm import LLM
from minivllm.prompts import Prompt
from minivllm.sampling_params import SamplingParams
from minivllm.teach.compare import a_kind
from minivllm.teach.plug import PlugError, _call, _compared
from minivllm.teach.stub import is_stub, not_attempted
from minivllm.worker import filters


def top_p_keep(function: Any, llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Print what `llm` says with the learner's top_p, and with the package's, and whether they agree.

    The same seed gives both the same noise.
    """
    if is_stub(function):
        print(not_attempted(function))
        return
    try:
        with _plugged(function) as calls:
            [yours] = llm.generate([prompt], params, use_tqdm=False)
    except NotImplementedError:
        print(not_attempted(function))
        return
    except PlugError as error:
        print(error)
        return
    [package] = llm.generate([prompt], params, use_tqdm=False)
    print(f"your function chose what to keep {len(calls)} times\n{_compared(llm, yours['token_ids'], package['token_ids'])}")


@contextmanager
def _plugged(function: Callable) -> Iterator[list[int]]:
    """The filter replaced while the block runs; yields how many tokens each call kept."""
    kept, own = [], filters._keep_top_p
    try:
        filters._keep_top_p = lambda scores, top_ps: _filtered(function, scores, top_ps, kept)
        with filters.filters_in_torch():
            yield kept
    finally:
        filters._keep_top_p = own


def _filtered(function: Callable, scores: Tensor, top_ps: Tensor, kept: list[int]) -> Tensor:
    """scores [R, V]: -inf for what the learner's function leaves out of each row."""
    masks = []
    for row, p in zip(scores.softmax(dim=-1), top_ps.tolist()):
        given = f"(it was given probabilities {list(row.shape)} and p = {p:.3g})"
        mask = _call(function, given, row.clone(), p)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != row.shape:
            got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else a_kind(mask)
            raise PlugError(f"your function returned {got}, the sampler needs bool {list(row.shape)} {given}")
        if not mask.any():
            raise PlugError(f"your function keeps no token at all, so there is nothing to draw from {given}")
        kept.append(int(mask.sum()))
        masks.append(mask)
    return scores.masked_fill(~torch.stack(masks), float("-inf"))
