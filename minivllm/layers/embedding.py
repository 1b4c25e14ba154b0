"""The two ends of a model: token id to vector, and vector to one logit per token. Ranks split the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.kernels.linear import linear


class VocabParallelEmbedding(nn.Module):
    """[T] int64 -> [T, hidden]; weight [V, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class ParallelLMHead(nn.Module):
    """[R, hidden] -> logits [R, V]. `tied_to`: the embedding whose weight it shares; it then has none of its own."""

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: VocabParallelEmbedding | None = None):
        super().__init__()
        self.tied = tied_to is not None
        self.weight = tied_to.weight if self.tied else nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight)
