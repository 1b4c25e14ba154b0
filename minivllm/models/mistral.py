"""Mistral (Jiang et al., 2023) without its sliding window, as from version 0.2 of the 7B on: then it is Llama's decoder."""

from __future__ import annotations

from minivllm.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
