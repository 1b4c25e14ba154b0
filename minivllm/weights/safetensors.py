"""A model directory as Hugging Face lays it out: config.json, tokenizer files, *.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from minivllm.tokenizer import Tokenizer
from minivllm.weights.checkpoint import Checkpoint


def open_directory(directory: Path, name: str | None = None) -> Checkpoint:
    """Raises ValueError or FileNotFoundError that names what is missing or broken."""
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{directory} is not a model directory: it has no config.json")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors file")
    has_tokenizer = any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"))
    generation_file = directory / "generation_config.json"
    return Checkpoint(
        name=name or str(directory),
        config=_read_json(config_file),
        generation_config=_read_json(generation_file) if generation_file.is_file() else {},
        tensors=lambda: read_tensors(files),
        make_tokenizer=(lambda: Tokenizer.from_dir(directory)) if has_tokenizer else None,
    )


def read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of every file, mapped from disk and read as it is used. Raises ValueError for a file that is cut or broken."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():
                    yield name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read as safetensors ({error}): it may be cut short; fetch it again") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds a {type(content).__name__}")
    return content
