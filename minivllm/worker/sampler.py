"""Sampler: one token from each row of logits. Temperature, then top_k, then top_p, as transformers orders them.

A token is drawn by the Gumbel trick: add noise to the logits, take the largest. It needs no softmax and no running sum, and a
row's noise depends on its request's seed and position alone. Built in notebook 08.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.engine.step import PlanRow
from minivllm.kernels.philox import uniform
from minivllm.kernels.sample import sample_tokens

_SIGN = 1 << 63
_ROWS_AT_ONCE = 32


@dataclass(slots=True)
class SamplingBatch:
    """The sampling parameters of R rows as tensors [R]. None where no row of the batch needs them.

    temperatures, top_ps float32; top_ks, seeds, positions int64 (a seed's 64 bits; the position that the token will take).
    max_top_k: the largest of top_ks, known on the host.
    """

    temperatures: Tensor | None
    top_ks: Tensor | None
    top_ps: Tensor | None
    seeds: Tensor | None
    positions: Tensor | None
    max_top_k: int

    @classmethod
    def of(cls, rows: list[PlanRow], device: torch.device) -> SamplingBatch:
        params = [row.sampling for row in rows]

        def column(values: list, needed: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device) if needed else None

        drawn = [p for p in params if not p.greedy]
        return cls(
            temperatures=column([p.temperature for p in params], bool(drawn), torch.float32),
            top_ks=column([p.top_k for p in params], any(p.top_k for p in drawn), torch.int64),
            top_ps=column([p.top_p for p in params], any(p.top_p < 1 for p in drawn), torch.float32),
            seeds=column([(row.seed ^ _SIGN) - _SIGN for row in rows], bool(drawn), torch.int64),  # unsigned to signed
            positions=column([row.context_len for row in rows], bool(drawn), torch.int64),
            max_top_k=max((p.top_k for p in drawn), default=0),
        )

    def rows(self, part: slice) -> SamplingBatch:
        take = lambda column: None if column is None else column[part]
        return SamplingBatch(take(self.temperatures), take(self.top_ks), take(self.top_ps), take(self.seeds), take(self.positions), self.max_top_k)


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [R, V], any float dtype -> token ids [R] int64. Rows with temperature 0 take the largest logit; -1 for rows that are not finite.

    Temperature alone is one pass over the logits. top_k and top_p need more room than the logits themselves, so they go a few rows at a time.
    """
    if batch.temperatures is None or (batch.top_ks is None and batch.top_ps is None):
        return sample_tokens(logits, batch.temperatures, batch.seeds, batch.positions)
    greedy = sample_tokens(logits)
    parts = [slice(first, first + _ROWS_AT_ONCE) for first in range(0, len(logits), _ROWS_AT_ONCE)]
    drawn = torch.cat([_draw(logits[part], batch.rows(part)) for part in parts])
    return torch.where((batch.temperatures == 0) | (greedy < 0), greedy, drawn)


def _draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    scores = processed(logits, batch)
    noise = -torch.log1p(-uniform(batch.seeds, batch.positions, logits.shape[-1]))  # exponential, [R, V]
    return (scores - noise.log()).argmax(dim=-1)  # -log of an exponential is Gumbel noise


def processed(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The logits that are drawn from, float32 [R, V]: divided by the temperature, and -inf for what top_k and top_p leave out."""
    scores = logits.float()
    scores = scores - scores.amax(dim=-1, keepdim=True)  # so that no temperature, however small, makes an infinity of the best
    scores = scores / torch.where(batch.temperatures == 0, 1.0, batch.temperatures)[:, None]
    if batch.top_ks is not None:
        scores = _keep_top_k(scores, batch.top_ks, batch.max_top_k)
    if batch.top_ps is not None:
        scores = _keep_top_p(scores, batch.top_ps)
    return scores


def _keep_top_k(scores: Tensor, top_ks: Tensor, max_top_k: int) -> Tensor:
    """Keep each row's k largest, and what equals the k-th; k = 0 keeps all."""
    largest = scores.topk(min(max_top_k, scores.shape[-1]), dim=-1).values  # [R, largest k]
    threshold = largest.gather(-1, top_ks.clamp(1, largest.shape[-1])[:, None] - 1)
    return scores.masked_fill((scores < threshold) & (top_ks > 0)[:, None], float("-inf"))


def _keep_top_p(scores: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the most likely tokens whose probabilities reach p, the one that crosses p included."""
    ordered, order = scores.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # what the more likely ones add up to
    dropped = (before >= top_ps[:, None]) & (top_ps < 1)[:, None]  # rounded sums may reach 1 before the last token
    dropped[:, 0] = False
    return scores.masked_fill(dropped.scatter(-1, order, dropped), float("-inf"))
