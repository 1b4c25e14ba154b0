"""Qwen2 and Qwen2.5, the dense models (Qwen team, 2024): Llama's decoder whose q, k and v have a bias and whose output has none."""

from __future__ import annotations

from minivllm.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    qkv_bias = True
