"""Filters: temperature, then top_k, top_p and min_p, as transformers orders them. What they leave out gets -inf.

They work on a few rows at a time and on all of these alike: a row that does not ask for a filter has the value that keeps everything.
On a GPU a kernel finds what they leave to all rows at once, and nothing is written out. Knows no request. Built in notebook 08.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.kernels.floors import row_floors
from minivllm.kernels.jit import uses_triton

if TYPE_CHECKING:
    from minivllm.worker.sampler import SamplingBatch

by_kernel = uses_triton  # whether a kernel tells what the filters leave of these logits


def processed(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The logits that are drawn from, float32 [R, V]: divided by the temperature, and -inf for what the filters leave out."""
    scores = logits.float()
    if batch.top_ks is not None:  # first: what is largest is so at any temperature, but rounding may make neighbours equal
        scores = _keep_top_k(scores, batch.top_ks, batch.max_top_k)
    scores = scores - scores.amax(dim=-1, keepdim=True)  # so that no temperature, however small, makes an infinity of the best
    scores = scores / torch.where(batch.temperatures == 0, 1.0, batch.temperatures)[:, None]
    if batch.top_ps is not None:
        scores = _keep_top_p(scores, batch.top_ps)
    if batch.min_ps is not None:
        scores = _keep_min_p(scores, batch.min_ps)
    return scores


def floors_of(logits: Tensor, batch: SamplingBatch) -> Tensor | None:
    """Below which logit nothing is drawn, float32 [R], for each row; None where nothing is filtered, or no kernel can tell."""
    filters = batch.top_ks, batch.top_ps, batch.min_ps
    return row_floors(logits, batch.temperatures, *filters) if by_kernel(logits) and any(values is not None for values in filters) else None


@contextmanager
def filters_in_torch() -> Iterator[None]:
    """While this lasts every filter is applied to the logits in plain torch, also on a GPU."""
    global by_kernel
    before, by_kernel = by_kernel, lambda logits: False
    try:
        yield
    finally:
        by_kernel = before


def _keep_top_k(scores: Tensor, top_ks: Tensor, max_top_k: int) -> Tensor:
    """Keep each row's k largest, and what equals the k-th; k = 0 keeps all."""
    largest = scores.topk(min(max_top_k, scores.shape[-1]), dim=-1).values  # [R, largest k]
    threshold = largest.gather(-1, top_ks.clamp(1, largest.shape[-1])[:, None] - 1)
    return scores.masked_fill((scores < threshold) & (top_ks > 0)[:, None], float("-inf"))


def _keep_top_p(scores: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the most likely tokens whose probabilities reach p, the one that crosses p included, and what equals it."""
    ordered = scores.sort(dim=-1, descending=True).values
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # what the more likely ones add up to
    dropped = (before >= top_ps[:, None]) & (top_ps < 1)[:, None]  # rounded sums may reach 1 before the last token
    dropped[:, 0] = False
    return scores.masked_fill(scores < ordered.masked_fill(dropped, float("inf")).amin(dim=-1, keepdim=True), float("-inf"))


def _keep_min_p(scores: Tensor, min_ps: Tensor) -> Tensor:
    """Keep tokens at least min_p times as likely as the most likely one; probabilities compare as their logarithms do."""
    threshold = scores.amax(dim=-1, keepdim=True) + min_ps.log()[:, None]  # min_p = 0: -inf
    return scores.masked_fill(scores < threshold, float("-inf"))
