"""Linear layers, under the names of tensor parallelism: what each splits when there are several ranks (see parallel.py).

`parts` says which part of which tensor of a checkpoint a weight is made of, along dimension `split_dim`; None: of one, whole.
Built in notebooks 01 and 10. The column/row scheme is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.kernels.linear import linear
from minivllm.layers.parallel import Part, ranks, share, share_kv


class Linear(nn.Module):
    """y = x W^T + b. x [T, in] -> [T, out]; weight [out, in]. Weights are left uninitialised: a checkpoint fills them."""

    #: Name of the part in a checkpoint ("": the layer's own) -> this rank's share of it, in order.
    parts: dict[str, Part] | None = None
    split_dim = 0

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """Ranks split the outputs: each computes its own columns of y."""

    def __init__(self, in_features: int, out_features: int | dict[str, Part], bias: bool = False):
        parts = out_features if isinstance(out_features, dict) else {"": share(out_features)}
        super().__init__(in_features, sum(part.size for part in parts.values()), bias)
        self.parts = parts


class RowParallelLinear(Linear):
    """Ranks split the inputs: each computes a summand of y, and an all-reduce adds them up. One of them adds the bias."""

    split_dim = 1

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        part = share(in_features)
        super().__init__(part.size, out_features, bias)
        self.parts, self.ranks = {"": part}, ranks()

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.all_reduce(linear(x, self.weight, self.bias if self.ranks.rank == 0 else None))


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers over the same input as one matrix: one read of x, one launch."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False):
        super().__init__(in_features, {name: share(size) for name, size in parts.items()}, bias)


class QKVParallelLinear(ColumnParallelLinear):
    """q, k and v as one matrix; output [T, (H + 2 K) * D], of the rank's own heads."""

    def __init__(self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False):
        kv = share_kv(num_kv_heads, head_dim)
        super().__init__(in_features, {"q_proj": share(num_heads * head_dim), "k_proj": kv, "v_proj": kv}, bias)
