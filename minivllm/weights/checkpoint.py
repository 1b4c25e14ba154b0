"""Checkpoint: a model as it comes from files, whatever their format. Configuration, tokenizer, and tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from minivllm.tokenizer import Tokenizer


@dataclass
class Checkpoint:
    """`config` and `generation_config` as transformers writes them; tensors under Hugging Face's names, made when asked for.

    name: where it came from, for messages. make_tokenizer: None for a model without one (then prompts are token ids).
    """

    name: str
    config: dict[str, Any]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    make_tokenizer: Callable[[], Tokenizer] | None
    generation_config: dict[str, Any] = field(default_factory=dict)
