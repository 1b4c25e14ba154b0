"""The product for few rows against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from minivllm.kernels.linear import linear


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 128, 129])
def test_linear_equals_torch(rows, with_bias, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(rows)
        x, weight = torch.randn(rows, 48, generator=generator).to(dtype), torch.randn(80, 48, generator=generator).to(dtype)
        bias = torch.randn(80, generator=generator).to(dtype) if with_bias else None
        got, expected = linear(x, weight, bias), F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert got.shape == (rows, 80) and got.dtype == dtype and got.is_contiguous()
        # The classical bound: n additions, each rounded to half an eps, of products whose absolute values sum to this.
        size = x.abs().double() @ weight.abs().double().T + 1 + (0 if bias is None else bias.abs().double())
        assert ((got.double() - expected).abs() <= torch.finfo(dtype).eps / 2 * 50 * size).all()
    finally:
        torch.set_num_threads(before)


def test_the_input_is_left_as_it_was():
    x = torch.randn(1, 8)
    before = x.clone()
    linear(x, torch.randn(4, 8), torch.ones(4))
    assert torch.equal(x, before)
