"""Linear layers, under the names of tensor parallelism: what each splits when there are several ranks (see parallel.py).

`parts` says which part of which tensor of a checkpoint a weight is made of, in order: by the part's name there ("": the layer's own).
Built in notebooks 01 and 10. The column/row scheme is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.kernels.linear import linear
from minivllm.layers.parallel import Part, ranks, share, share_kv, shares


class Linear(nn.Module):
    """y = x W^T + b. x [T, in] -> [T, out]; weight [out, in]. Weights are left uninitialised: a checkpoint fills them."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, parts: dict[str, Part] | None = None):
        super().__init__()
        self.ranks, self.parts = ranks(), parts
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """Ranks split the outputs: each computes its own columns of y. Several outputs, by name, are one matrix."""

    def __init__(self, in_features: int, out_features: int | dict[str, int | Part], bias: bool = False):
        parts = shares(out_features)
        super().__init__(in_features, sum(part.size for part in parts.values()), bias, parts)


class RowParallelLinear(Linear):
    """Ranks split the inputs: each computes a summand of y, and an all-reduce adds them up. One of them adds the bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        part = share(in_features, dim=1)
        super().__init__(part.size, out_features, bias, {"": part})

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.sum_of(lambda rows: linear(rows, self.weight, self.bias if self.ranks.rank == 0 else None), x)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers over the same input as one matrix: one read of x, one launch. `out_features`: of each, by name."""


class QKVParallelLinear(MergedColumnParallelLinear):
    """q, k and v as one matrix; output [T, (H + 2 K) * D], of the rank's own heads."""

    def __init__(self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False):
        q, kv = num_heads * head_dim, share_kv(num_kv_heads, head_dim)
        super().__init__(in_features, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias)
