"""The Llama decoder (Touvron et al., 2023), as in the paper: nothing here knows of a cache, a backend or a device.

Checkpoint names are Hugging Face's: a parameter's path below is its name in the file, but for the merged layers, which
name their parts. Families that differ in a detail derive from this class. Built in notebooks 01 and 02.
"""

from __future__ import annotations

from torch import Tensor, nn

from minivllm.attention.metadata import AttentionMetadata
from minivllm.kernels.silu_and_mul import silu_and_mul
from minivllm.layers.attention import Attention
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.models.config import ModelConfig


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, qk_norm: bool, qkv_bias: bool):
        super().__init__()
        shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.qkv_proj = QKVParallelLinear(config.hidden_size, *shape, bias=qkv_bias or config.attention_bias)
        self.o_proj = RowParallelLinear(config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.attn = Attention(*shape, rotary, self.q_norm, self.k_norm)

    def forward(self, x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x), positions, metadata))


class LlamaMLP(nn.Module):
    compiles = True  # nothing in it but arithmetic: torch.compile may have it

    def __init__(self, config: ModelConfig):
        super().__init__()
        sizes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, sizes, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, **variant: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, rotary, **variant)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, residual: Tensor | None, positions: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """x is what the layer before adds to `residual`; None before the first. Each norm takes in the sum that its input is."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, positions, metadata), residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, **variant: bool):
        super().__init__()
        rotary = RotaryEmbedding(config.head_dim, config.max_positions, config.rope_theta, config.rope_scaling)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, rotary, **variant) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None  # [T, hidden]
        for layer in self.layers:
            x, residual = layer(x, residual, positions, metadata)
        return self.norm(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    """input_ids [T] int64, positions [T] int64 -> hidden states [T, hidden]; `compute_logits` [R, hidden] -> [R, V]."""

    qk_norm = False   # whether every head of q and k is normalised before it is rotated
    qkv_bias = False  # whether q, k and v have a bias although the config's attention_bias does not say so

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.model = LlamaModel(config, qk_norm=self.qk_norm, qkv_bias=self.qkv_bias)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size,
                                      tied_to=self.model.embed_tokens if config.tie_word_embeddings else None)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.model(input_ids, positions, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
