"""Sampler: one token from each row of logits. Edits (worker/logits.py), then filters (worker/filters.py), then a draw.

A token is drawn by the Gumbel trick: add noise to the logits, take the largest. It needs no softmax and no running sum, and a
row's noise depends on its request's seed, its number among siblings and its position alone. Built in notebook 08.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minivllm.engine.step import PlanRow
from minivllm.kernels.sample import sample_tokens
from minivllm.worker.filters import floors_of, processed
from minivllm.worker.logits import Edits, History

_SIGN = 1 << 63
_ROWS_AT_ONCE = 32


@dataclass(slots=True)
class SamplingBatch:
    """The sampling parameters of R rows as tensors [R]. None where no row of the batch needs them.

    temperatures, top_ps, min_ps float32; top_ks, seeds, positions int64 (a seed's 64 bits; the position that the token will take, and above
    its 32 bits the sibling's number, which `siblings` holds alone). max_top_k: the largest of top_ks, known on the host.
    special [M] int64: the rows for which one pass over the logits is not enough; edits: what changes their logits, if anything.
    penalised, logprob_rows: the rows that have penalties, and those whose log probabilities are wanted, known on the host.
    """

    temperatures: Tensor | None
    top_ks: Tensor | None
    top_ps: Tensor | None
    min_ps: Tensor | None
    seeds: Tensor | None
    positions: Tensor | None
    siblings: Tensor | None
    max_top_k: int
    special: Tensor | None = None
    edits: Edits | None = None
    penalised: list[int] = field(default_factory=list)
    logprob_rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rows: list[PlanRow], device: torch.device) -> SamplingBatch:
        params = [row.sampling for row in rows]

        def column(values: list, needed: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device) if needed else None

        drawn = [p for p in params if not p.greedy]
        optional = [index for index, row in enumerate(rows) if row.options is not None]  # most batches have none
        edited = {index for index in optional if params[index].edits_logits}
        some_k, some_p, some_min = any(p.top_k for p in drawn), any(p.top_p < 1 for p in drawn), any(p.min_p for p in drawn)
        asked = edited or some_k or some_p or some_min
        special = [index for index, p in enumerate(params) if index in edited or p.filters] if asked else []
        siblings = [row.options.sibling << 32 if row.options is not None else 0 for row in rows] if optional else []
        positions = [row.context_len for row in rows]
        return cls(
            temperatures=column([p.temperature for p in params], bool(drawn), torch.float32),
            top_ks=column([p.top_k for p in params], some_k, torch.int64),
            top_ps=column([p.top_p for p in params], some_p, torch.float32),
            min_ps=column([p.min_p for p in params], some_min, torch.float32),
            seeds=column([(row.seed ^ _SIGN) - _SIGN for row in rows], bool(drawn), torch.int64),  # unsigned to signed
            positions=column([a + b for a, b in zip(positions, siblings)] if any(siblings) else positions, bool(drawn or edited), torch.int64),
            siblings=column(siblings, any(siblings), torch.int64),
            max_top_k=max(p.top_k for p in drawn) if some_k else 0,
            special=column(special, bool(special), torch.int64),
            edits=Edits([rows[index] for index in special], _ROWS_AT_ONCE, device) if edited else None,
            penalised=[index for index in optional if params[index].needs_history],
            logprob_rows=[index for index in optional if params[index].logprobs is not None],
        )

    def rows(self, part: Tensor) -> SamplingBatch:
        """The parameters of some rows; what concerns the whole batch is left out."""
        take = lambda column: None if column is None else column[part]
        return SamplingBatch(take(self.temperatures), take(self.top_ks), take(self.top_ps), take(self.min_ps), take(self.seeds),
                             take(self.positions), take(self.siblings), self.max_top_k)


def sample(logits: Tensor, batch: SamplingBatch, history: History | None = None) -> Tensor:
    """logits [R, V], any float dtype -> token ids [R] int64. Rows with temperature 0 take the largest logit; -1 for rows that are not finite.

    Temperature alone is one pass over the logits, and so are filters once a kernel has found what they leave. Other special rows go a few
    at a time: they need more room than the logits themselves.
    history: the tokens before, where a row has penalties.
    """
    floors = floors_of(logits, batch) if batch.edits is None else None
    tokens = sample_tokens(logits, batch.temperatures, batch.seeds, batch.positions, floors)
    if batch.special is not None and floors is None:
        for number, part in enumerate(batch.special.split(_ROWS_AT_ONCE)):
            some, own = logits[part].float(), batch.rows(part)
            if batch.edits is not None:
                some = batch.edits.apply(some, number, own.positions, history)
            tokens[part] = torch.where(tokens[part] < 0, -1, _draw(some, own))
    return tokens


def _draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    floors = floors_of(logits, batch)
    if batch.temperatures is None or floors is not None:
        return sample_tokens(logits, batch.temperatures, batch.seeds, batch.positions, floors)
    greedy = batch.temperatures == 0
    return sample_tokens(torch.where(greedy[:, None], logits, processed(logits, batch)), torch.where(greedy, 0.0, 1.0), batch.seeds, batch.positions)
