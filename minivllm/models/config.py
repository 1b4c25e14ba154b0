"""ModelConfig: what a model looks like, read from its config.json in any of the spellings that transformers has used.

Pure data. What the engine should do with the model is `minivllm/config.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's way to longer contexts: slow rotations are slowed down by `factor`, fast ones stay, between them it blends.

    A rotation is slow when it turns fewer than `low_freq_factor` times within the original context, fast above `high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer's shape. Sizes in elements; `dtype` is the one its checkpoint names, or None."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]
    dtype: str | None

    @classmethod
    def from_dict(cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
        """From config.json (and generation_config.json, which may name more end tokens).

        Raises ValueError that names the field: a missing one, or one whose value asks for what is not built.
        """
        try:
            heads = config["num_attention_heads"]
            model = cls(
                architecture=_architecture(config),
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                rms_norm_eps=config.get("rms_norm_eps", 1e-6),
                rope_theta=_rope_theta(config),
                rope_scaling=_rope_scaling(config),
                max_positions=config.get("max_position_embeddings", 2048),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                eos_token_ids=_ids(config.get("eos_token_id")) | _ids((generation_config or {}).get("eos_token_id")),
                dtype=_dtype(config),
            )
        except KeyError as missing:
            raise ValueError(f"the model's config.json lacks {missing}") from None
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"the model's config.json holds a value of the wrong kind: {error}") from None
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions"):
            value = getattr(model, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"the model's config.json gives {field} = {value!r}; it must be an int of at least 1")
        _refuse_what_is_not_built(config, model)
        return model


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if len(names) != 1:
        raise ValueError(f"the model's config.json must name one architecture, it names {names or 'none'}")
    return names[0]


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}  # transformers 5; before, rope_theta stood by itself
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _rope_scaling(config: dict[str, Any]) -> RopeScaling | None:
    """From `rope_parameters` (transformers 5) or `rope_scaling` (before it). Raises ValueError for a type that is not built."""
    found = None
    for rope in (config.get("rope_scaling") or {}, config.get("rope_parameters") or {}):
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type == "llama3":
            found = RopeScaling(float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]),
                                rope["original_max_position_embeddings"])
        elif rope_type != "default":
            raise ValueError(f"rope type {rope_type!r} is not supported: only 'default' and 'llama3' are")
    return found


def _dtype(config: dict[str, Any]) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")


def _ids(value: int | list[int] | None) -> frozenset[int]:
    return frozenset(() if value is None else [value] if isinstance(value, int) else value)


def _refuse_what_is_not_built(config: dict[str, Any], model: ModelConfig) -> None:
    for place in (config, config.get("rope_parameters") or {}):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor {place['partial_rotary_factor']} is not supported: only 1 is")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported: only 'silu' is")
    # Qwen2 names a window and says beside it whether it is used; Mistral only names it. One as long as the context hides nothing.
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and window < model.max_positions:
        raise ValueError(f"sliding_window {window} is not supported: every token attends to all before it")
    if model.num_heads % model.num_kv_heads:
        raise ValueError(f"num_attention_heads {model.num_heads} is not a multiple of num_key_value_heads {model.num_kv_heads}")
