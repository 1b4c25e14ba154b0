"""x W^T + b, by the order of operands that is fastest for few rows on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_FEW_ROWS = 128


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in], weight [out, in], bias [out] -> [T, out].

    For few rows the time is that of reading the weight once. torch's usual call splits the work over the rows, of which there are
    too few for several threads; W x^T splits it over the outputs. One row would be a matrix-vector product, which is slower than two
    rows at once.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dim() != 2 or len(x) > _FEW_ROWS or torch.get_num_threads() == 1:
        return F.linear(x, weight, bias)
    rows = x if len(x) > 1 else x.repeat(2, 1)
    out = torch.mm(weight, rows.t())[:, :len(x)].t().contiguous()
    return out if bias is None else out.add_(bias)
