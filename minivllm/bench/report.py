"""Where and with what a measurement was made, and saving it as raw JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from minivllm.llm import LLM


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device, as they belong into every raw file."""
    versions = {}
    for name in ("minivllm", "torch", "triton", "transformers", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    return {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "versions": versions, "cpu": cpu, "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}


def engine_settings(llm: LLM) -> dict[str, Any]:
    config = llm.config
    return {"model": config.model, "architecture": llm.model_config.architecture, "dtype": str(llm.runner.dtype).removeprefix("torch."),
            "attention": llm.runner.backend.name, "block_size": config.block_size, "kv_tokens": config.block_size * config.num_kv_blocks,
            "max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens, "enforce_eager": config.enforce_eager}


def save(result: dict[str, Any], path: str | Path | None) -> None:
    """Write `result` as JSON, and say where. Without a path: nothing."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"raw figures: {path}")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
