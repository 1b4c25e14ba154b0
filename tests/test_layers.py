"""Layers against transformers' and torch's own."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_equals_transformers(dtype):
    ours, theirs = RMSNorm(64, 1e-5), LlamaRMSNorm(64, 1e-5)
    weight = torch.rand(64) + 0.5
    ours.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    x = (torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    eps = torch.finfo(dtype).eps
    got, expected = ours.to(dtype)(x), theirs.to(dtype)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("head_dim, theta", [(16, 1e4), (64, 1e5), (20, 500.0)])
def test_rotary_equals_transformers(head_dim, theta):
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=512,
                         rope_parameters={"rope_type": "default", "rope_theta": theta})
    positions = torch.tensor([0, 1, 5, 511, 300])
    q, k = torch.randn(5, 4, head_dim), torch.randn(5, 2, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotary = RotaryEmbedding(head_dim, 512, theta)
    torch.testing.assert_close(rotary(q, positions), expected_q[0].transpose(0, 1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(rotary(k, positions), expected_k[0].transpose(0, 1), atol=1e-4, rtol=1e-5)
    assert torch.equal(rotary(q, torch.zeros(5, dtype=torch.int64)), q)  # position 0 turns nothing
