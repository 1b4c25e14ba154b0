"""Linear layers, under the names of tensor parallelism: what each splits when there are several ranks.

Built for one rank so far. `parts` says which rows of a merged weight come from which tensor of a checkpoint.
Built in notebooks 01 and 10. The column/row scheme is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.kernels.linear import linear


class Linear(nn.Module):
    """y = x W^T + b. x [T, in] -> [T, out]; weight [out, in]. Weights are left uninitialised: a checkpoint fills them."""

    #: For a merged layer: name of the part in a checkpoint -> how many output rows it takes, in order.
    parts: dict[str, int] | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """Ranks split the outputs: each computes its own columns of y."""


class RowParallelLinear(Linear):
    """Ranks split the inputs: each computes a summand of y, and an all-reduce adds them up."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers over the same input as one matrix: one read of x, one launch."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False):
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts


class QKVParallelLinear(MergedColumnParallelLinear):
    """q, k and v as one matrix; output [T, (H + 2 K) * D]."""

    def __init__(self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False):
        kv = num_kv_heads * head_dim
        super().__init__(in_features, {"q_proj": num_heads * head_dim, "k_proj": kv, "v_proj": kv}, bias)
