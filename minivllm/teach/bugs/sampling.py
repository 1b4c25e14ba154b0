"""A planted fault of the sampler: the noise of a request is counted from the place where its logits lie in the batch.

The model is a toy whose logits follow from the tokens so far; the noise is Philox's. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.kernels.philox import philox_4x32
from minivllm.teach.views.captions import count
from minivllm.teach.bugs.fault import Comparison, Fault
from minivllm.teach.trial import BadInput, require_int

_VOCAB, _MOST_REQUESTS, _MOST_TOKENS = 50, 6, 16
Request = tuple[int, int]  # seed, max_tokens
Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A token for each row. logits [R, V]; seeds, positions [R] -> [R]. Gumbel noise of the seed, the position and a counter."""
    offsets = torch.arange(logits.numel()).view(logits.shape)  # [R, V], of each logit
    zero = torch.zeros_like(positions)[:, None]
    words = philox_4x32((offsets, positions[:, None], zero, zero), (seeds[:, None], zero))
    uniforms = (words[0] + 0.5) * 2.0**-32
    return (logits - (-uniforms.log()).log()).argmax(dim=-1)


def by_column(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The same with a counter that begins anew in every row."""
    return torch.cat([draw(row[None], seeds[index:index + 1], positions[index:index + 1]) for index, row in enumerate(logits)])


def _logits(tokens: list[int]) -> Tensor:
    """[V], float64: a toy's, from its last two tokens and how many there are."""
    return 2 * (torch.arange(_VOCAB, dtype=torch.float64) * (1 + tokens[-1]) + 3 * tokens[-2] + len(tokens)).sin()


def run_batch(draw: Draw, requests: list[Request]) -> tuple[list[list[int]], list[list[int]]]:
    """(the tokens of each request, the row that it had in each step). All begin together; when one ends, those below it move up."""
    tokens = [[1, 2] for _ in requests]  # one prompt for all
    places: list[list[int]] = [[] for _ in requests]
    while rows := [index for index, (_, limit) in enumerate(requests) if len(tokens[index]) - 2 < limit]:
        chosen = draw(torch.stack([_logits(tokens[index]) for index in rows]), torch.tensor([requests[index][0] for index in rows]),
                      torch.tensor([len(tokens[index]) for index in rows]))
        for row, (index, token) in enumerate(zip(rows, chosen.tolist())):
            tokens[index].append(token)
            places[index].append(row)
    return [answer[2:] for answer in tokens], places


def _compare(fault: Fault, first: Any, second: Any) -> Comparison:
    batches = [_read(name, batch) for name, batch in (("first", first), ("second", second))]
    shared = [(a, b) for a, (seed, _) in enumerate(batches[0]) for b, (other, _) in enumerate(batches[1]) if seed == other]
    runs = [[run_batch(draw, batch) for batch in batches] for draw in (fault.right, fault.faulty)]
    for a, b in shared:
        one, two = runs[1][0][0][a], runs[1][1][0][b]
        at = next((i for i, (x, y) in enumerate(zip(one, two)) if x != y), None)
        if at is not None and runs[0][0][0][a][:at + 1] == runs[0][1][0][b][:at + 1]:
            return Comparison(True, f"the right sampler gives the request with seed {batches[0][a][0]} the same tokens in both batches,",
                              f"the faulty one gives {one[at]} and {two[at]} for its token {at + 1}")
    same = f"the {count(len(shared), 'request')} that the two batches share the same tokens in both"
    return Comparison(False, same if shared else "nothing that could be compared", "", _hint(shared, runs[1]))


def _hint(shared: list[tuple[int, int]], faulty: list) -> str:
    if not shared:
        return "no seed stands in both batches: a request must be the same in both for its tokens to be compared"
    moved = any(x != y for a, b in shared for x, y in zip(faulty[0][1][a], faulty[1][1][b]))
    if not moved:
        return ("whoever is in both batches had the same row in every step that can be compared: other company alone changes nothing here. "
                "What in the counter depends on the batch, and when does it change for a request?")
    return "somebody had another row in some step, and drew the same token by chance: let it draw more tokens there"


def _read(name: str, batch: Any) -> list[Request]:
    if not isinstance(batch, list) or not 1 <= len(batch) <= _MOST_REQUESTS:
        raise BadInput(f"{name} must be a list of 1 to {_MOST_REQUESTS} requests (seed, max_tokens), got {batch!r:.60}")
    for request in batch:
        if not isinstance(request, tuple) or len(request) != 2:
            raise BadInput(f"a request is (seed, max_tokens), such as (7, 5), got {request!r:.60}")
    seeds = [require_int("a seed", seed, 0, 2**31) for seed, _ in batch]
    if len(set(seeds)) < len(seeds):
        raise BadInput(f"the seeds of {name} must differ from each other: a seed stands for a request, got {seeds}")
    return [(seed, require_int("max_tokens", limit, 1, _MOST_TOKENS)) for seed, limit in batch]


FAULTS = [
    Fault("noise_by_place", "the neighbours change the noise",
          "A kernel computes an offset for each element that it loads, and the same offset is at hand as a counter for random numbers: "
          "kernels for dropout count so. In a sampler it holds the row, too; a seed then fixes an answer for one place in the batch only.",
          draw, by_column, _compare, {"first": ..., "second": ...},
          exposing={"first": [(7, 6)], "second": [(3, 6), (7, 6)]}, harmless={"first": [(7, 6)], "second": [(7, 6), (3, 6)]}),
]
