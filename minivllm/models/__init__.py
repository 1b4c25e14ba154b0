"""The model registry: an architecture's name, as config.json gives it, to the class that computes it.

A model class takes a ModelConfig and offers `forward(input_ids, positions, attention_metadata)` -> hidden states and
`compute_logits(hidden)`; see `llama.py`, the one to read.
"""

from __future__ import annotations

from torch import nn

from minivllm.models.config import ModelConfig
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.mistral import MistralForCausalLM
from minivllm.models.qwen2 import Qwen2ForCausalLM
from minivllm.models.qwen3 import Qwen3ForCausalLM

__all__ = ["ModelConfig", "model_class", "register_model"]

_MODELS: dict[str, type[nn.Module]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def register_model(architecture: str, cls: type[nn.Module]) -> None:
    """Make `cls` the model for `architecture`, from outside the package too."""
    _MODELS[architecture] = cls


def model_class(architecture: str) -> type[nn.Module]:
    """The class for `architecture`. Raises ValueError with the known names."""
    if architecture not in _MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(_MODELS))}")
    return _MODELS[architecture]
