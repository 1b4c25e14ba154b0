"""Qwen3, the dense models (Qwen team, 2025): Llama's decoder with an RMSNorm on every head of q and k."""

from __future__ import annotations

from minivllm.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    qk_norm = True
