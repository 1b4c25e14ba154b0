"""The two ends of a model: token id to vector, and vector to one logit per token. Ranks split the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.kernels.linear import linear
from minivllm.layers.parallel import logits, look_up, padded, ranks, share


class VocabParallelEmbedding(nn.Module):
    """[T] int64 -> [T, hidden]; weight [V, hidden], or a rank's rows of it."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.ranks, self.parts = ranks(), {"": share(vocab_size)}
        self.weight = nn.Parameter(torch.zeros(padded(self.parts[""]), hidden_size), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.ranks.size > 1:
            return look_up(input_ids, self.weight, self.parts[""], self.ranks)
        return F.embedding(input_ids, self.weight)


class ParallelLMHead(nn.Module):
    """[R, hidden] -> logits [R, V]. `tied_to`: the embedding whose weight it shares; it then has none of its own."""

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: VocabParallelEmbedding | None = None):
        super().__init__()
        self.tied = tied_to is not None
        self.ranks, self.parts = ranks(), {"": share(vocab_size)}
        self.weight = tied_to.weight if self.tied else nn.Parameter(torch.zeros(padded(self.parts[""]), hidden_size), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.ranks.size > 1:
            return logits(hidden, self.weight, self.parts[""], self.ranks)
        return linear(hidden, self.weight)
