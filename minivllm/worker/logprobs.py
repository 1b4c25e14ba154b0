"""Log probabilities of tokens: of those that were sampled, and of a prompt's. They are the log_softmax of the raw logits, in float32.

Only the k best and the token itself leave the device. A prompt's logits are computed a few positions at a time, and dropped, so that
never more than LOGITS_BYTES of float32 logits exist at once, however long the prompt. Built in notebook 08.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.engine.options import TokenLogprobs
from minivllm.engine.step import PlanRow

LOGITS_BYTES = 32 << 20  # with what is computed from them, less than filters in torch take for a full batch, which is what profile_run reserves


def rows_at_once(vocab_size: int) -> int:
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def sampled_logprobs(rows: list[PlanRow], wanted: list[int], logits: Tensor, tokens: Tensor) -> dict[int, TokenLogprobs]:
    """For the rows numbered `wanted`: the log probabilities of their `tokens` [R] and of their best, from raw `logits` [R, V]. By seq_id."""
    most = max(rows[index].sampling.logprobs for index in wanted)
    index = torch.tensor(wanted, device=logits.device)
    found = [_top(logits[part].float(), tokens[part].clamp(min=0), most) for part in index.split(rows_at_once(logits.shape[-1]))]
    records = _on_the_host(found, [rows[index].sampling.logprobs for index in wanted])
    return {rows[index].seq_id: record for index, record in zip(wanted, records)}


def prompt_logprobs(rows: list[PlanRow], hidden: Tensor, compute_logits: Callable[[Tensor], Tensor],
                    vocab_size: int) -> dict[int, list[TokenLogprobs]]:
    """For the rows with `prompt_targets`: the log probability of each target, which follows the row's position of the same number.

    hidden [T, hidden]: of all rows, one after the other. By seq_id.
    """
    results, first = {}, 0
    for row in rows:
        if row.options is not None and (targets := row.options.prompt_targets):
            k, ids, at_once = row.sampling.prompt_logprobs, torch.tensor(targets, device=hidden.device), rows_at_once(vocab_size)
            parts = zip(hidden[first:first + len(targets)].split(at_once), ids.split(at_once))
            results[row.seq_id] = _on_the_host([_top(compute_logits(some).float(), wanted, k) for some, wanted in parts], [k] * len(targets))
        first += len(row.token_ids)
    return results


def _top(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [R, 1 + k], log probabilities [R, 1 + k], ranks [R]): the token itself, then the k most likely, the most likely first.

    A token's rank is 1 for the most likely; of equals each has the rank of the last (vLLM's count of those not less likely).
    """
    own = logits.gather(-1, tokens[:, None])  # [R, 1]
    best = logits.topk(k, dim=-1) if k else (own[:, :0], tokens[:, None][:, :0])
    values = torch.cat([own, best[0]], dim=-1) - logits.logsumexp(dim=-1, keepdim=True)
    return torch.cat([tokens[:, None], best[1]], dim=-1), values, (logits >= own).sum(dim=-1)


def _on_the_host(found: list[tuple[Tensor, Tensor, Tensor]], ks: list[int]) -> list[TokenLogprobs]:
    """The one place where the host waits for them."""
    ids, values, ranks = (torch.cat(column).tolist() for column in zip(*found))
    return [(ids[index][:1 + k], values[index][:1 + k], ranks[index]) for index, k in enumerate(ks)]
