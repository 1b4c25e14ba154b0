"""A model directory as Hugging Face lays it out: config.json, tokenizer files, weights as *.safetensors or pytorch_model*.bin."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.tokenizer import Tokenizer
from minivllm.weights.checkpoint import Checkpoint

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
#: Kinds of weight files, the preferred one first: the index that names a model's shards, the single file, any other name.
_KINDS = [("model.safetensors.index.json", "model.safetensors", "*.safetensors"),
          ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model*.bin")]


def open_directory(directory: Path, name: str | None = None) -> Checkpoint:
    """Raises ValueError or FileNotFoundError that names what is missing or broken."""
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{directory} is not a model directory: it has no config.json")
    has_tokenizer = any((directory / file).exists() for file in _TOKENIZER_FILES)
    generation_file = directory / "generation_config.json"
    return Checkpoint(
        name=name or str(directory),
        config=_read_json(config_file),
        generation_config=_read_json(generation_file) if generation_file.is_file() else {},
        tensors=lambda: read_tensors(weight_files(directory)),
        make_tokenizer=(lambda: Tokenizer.from_dir(directory)) if has_tokenizer else None,
    )


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights. Raises FileNotFoundError for none, and for shards that an index names and that are not there."""
    for index, single, pattern in _KINDS:
        if (directory / index).is_file():
            names = sorted(set(_read_json(directory / index).get("weight_map", {}).values()))
            missing = [name for name in names if not (directory / name).is_file()]
            if missing or not names:
                raise FileNotFoundError(f"{directory / index} names shards that are not there: {', '.join(missing) or 'none at all'}; "
                                        f"the download may not have finished")
            return [directory / name for name in names]
        if (directory / single).is_file():
            return [directory / single]
        if files := sorted(directory.glob(pattern)):
            return files
    raise FileNotFoundError(f"{directory} has no weights: neither *.safetensors nor pytorch_model*.bin")


def read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of every file, read as it is used. Raises ValueError for a file that is cut or broken."""
    for file in files:
        yield from (_read_safetensors if file.suffix == ".safetensors" else _read_pickle)(file)


def _read_safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                yield name, handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}): it may be cut short; fetch it again") from error


def _read_pickle(file: Path) -> Iterator[tuple[str, Tensor]]:
    """torch.save's format. Only tensors are unpickled: a pickle could run any code."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file} cannot be read as torch weights ({reason}): it may be cut short; fetch it again") from error
    yield from tensors.items()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds a {type(content).__name__}")
    return content
