"""The two ends of a model: token id to vector, and vector to one logit per token. Ranks split the vocabulary."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from minivllm.kernels.linear import linear
from minivllm.layers.parallel import VocabParallel


class VocabParallelEmbedding(VocabParallel):
    """[T] int64 -> [T, hidden]; weight [V, hidden], or a rank's rows of it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight) if self.ranks.size == 1 else self.look_up(input_ids)


class ParallelLMHead(VocabParallel):
    """[R, hidden] -> logits [R, V]. `tied_to`: the embedding whose weight it shares; it then has none of its own."""

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: VocabParallelEmbedding | None = None):
        super().__init__(vocab_size, hidden_size, None if tied_to is None else tied_to.weight)
        self.tied = tied_to is not None

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight) if self.ranks.size == 1 else self.logits(hidden)
