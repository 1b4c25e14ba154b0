"""What is slow to parse is parsed once: a GGUF file's tensors and tokenizer, kept as safetensors and tokenizer.json.

An entry is a model directory named after the source's SHA-256. It is written under a temporary name and renamed when it is
whole, so that readers see all of it or nothing, and of two writers at once the second finds the first one's. A manifest of
sizes tells an entry that was damaged later; it is then made again. Where nothing can be written, nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

from minivllm.weights.checkpoint import Checkpoint
from minivllm.weights.gguf import open_gguf
from minivllm.weights.directory import open_directory

_FORMAT = 1  # of what is written; a new number leaves old entries alone
_MANIFEST = "manifest.json"


def cache_root() -> Path:
    """MINIVLLM_CACHE, else minivllm under XDG_CACHE_HOME, else under ~/.cache."""
    if path := os.environ.get("MINIVLLM_CACHE"):
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minivllm"


def open_gguf_cached(file: Path, name: str | None = None) -> Checkpoint:
    """The checkpoint in `file`, from the cache, which is filled first where need be."""
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    entry = cache_root() / f"{_sha256(file)}-v{_FORMAT}"
    if is_whole(entry):
        return open_directory(entry, name=name or str(file))
    checkpoint = open_gguf(file, name)
    try:
        _write(checkpoint, entry)
    except OSError as error:
        warnings.warn(f"the converted model cannot be kept in {entry.parent} ({error}); it will be converted again next time. "
                      f"MINIVLLM_CACHE names another directory", stacklevel=2)
        return checkpoint
    return open_directory(entry, name=name or str(file))


def is_whole(entry: Path) -> bool:
    """Whether every file of `entry` is there in its full size."""
    try:
        sizes = json.loads((entry / _MANIFEST).read_text())
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _write(checkpoint: Checkpoint, entry: Path) -> None:
    from safetensors.torch import save_file

    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    temporary.chmod(0o755)  # mkdtemp's is for its owner alone, and a cache may be shared
    try:
        (temporary / "config.json").write_text(json.dumps(checkpoint.config, indent=2))
        checkpoint.make_tokenizer().hf.save_pretrained(temporary)
        _save_tensors(lambda path: save_file({name: tensor.contiguous() for name, tensor in checkpoint.tensors()}, path),
                      temporary / "model.safetensors")
        sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
        (temporary / _MANIFEST).write_text(json.dumps(sizes))
        _put_in_place(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _save_tensors(save, path: Path) -> None:
    from safetensors import SafetensorError

    try:
        save(path)
    except SafetensorError as error:  # its way to say that the disk is full
        raise OSError(str(error)) from error


def _put_in_place(temporary: Path, entry: Path) -> None:
    damaged = temporary.with_name(temporary.name + ".damaged")
    try:
        os.rename(temporary, entry)
    except OSError:
        if is_whole(entry):
            return  # another process was faster
        with contextlib.suppress(FileNotFoundError):
            os.rename(entry, damaged)  # out of the way in one stroke: a reader never meets half an entry
        os.rename(temporary, entry)
    finally:
        _remove(damaged)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
