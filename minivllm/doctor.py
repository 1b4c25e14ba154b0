"""What `minivllm doctor` says: the device and what is used on it and why, where memory goes, what is missing."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

import torch

from minivllm import attention
from minivllm.config import DEFAULT_MAX_NUM_SEQS
from minivllm.memory import predicted_activation_bytes
from minivllm.models import ModelConfig, model_class
from minivllm.troubles import TROUBLES
from minivllm.weights.hub import EMBEDDED_INSTALL, EMBEDDED_NAME, embedded_model_file, open_model
from minivllm.worker.device import (GIB, PROFILE_VARIABLE, capability, default_gpu_memory_utilization, default_max_num_batched_tokens,
                                    device_profile, gpu_memory, has_bfloat16, select_device, select_dtype)
from minivllm.worker.kv_cache import CPU_POOL_BYTES, GPU_SLACK_BYTES, KVCacheSpec

#: Bytes a second that a device's memory gives, from its data sheet: what bounds a decode step.
BANDWIDTH = {"T4": 320e9, "L4": 300e9, "A100 40 GB": 1555e9, "H200": 4800e9}
#: Package -> what it is for, and how to get it; shown when it is missing.
_OPTIONAL = {
    "transformers": ("tokenizers and chat templates", "pip install transformers"),
    "safetensors": ("reading model directories", "pip install safetensors"),
    "gguf": ("reading .gguf files", "pip install gguf"),
    "tqdm": ("the progress bar", "pip install tqdm"),
    "triton": ("the GPU kernels", "it comes with CUDA builds of torch"),
    "flash-attn": ("another attention backend on sm80 and newer", "pip install flash-attn, where a ready wheel exists"),
}


def report(model: str = EMBEDDED_NAME) -> Iterator[str]:
    """Lines of text. What cannot be found out is said in its line; only an unknown device profile raises."""
    device = select_device("auto")
    yield from _device_lines(device)
    yield from _model_lines(model, device)
    yield from _package_lines()
    yield ""
    yield "When something goes wrong"
    for seen, help_ in TROUBLES:
        yield f"  {seen}\n      {help_}"


def _device_lines(device: torch.device) -> Iterator[str]:
    yield f"python       {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"torch        {torch.__version__}" + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", without CUDA")
    if device.type == "cuda":
        free, total = gpu_memory(device)
        major, minor = capability(device)
        yield f"device       {device}: {torch.cuda.get_device_name(device)}, {total / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
        if profile := device_profile():
            yield f"profile      {PROFILE_VARIABLE} is set: it is used as if it were sm{profile.capability[0]}{profile.capability[1]} with {profile.total_memory / GIB:.0f} GiB"
        yield f"capability   sm{major}{minor}: bfloat16 {'in hardware' if has_bfloat16(device) else 'only emulated, so float16 is used'}"
    else:
        why = "torch was built without CUDA" if not torch.version.cuda else "torch sees no CUDA device"
        yield f"device       cpu, {torch.get_num_threads()} threads ({why})"
        yield "capability   none: no GPU"
    backend, reason = attention.select("auto", device)
    yield f"attention    {backend.name}: {reason} (tried on a small example; an LLM tries its own shape)"
    yield f"a step       at most {default_max_num_batched_tokens(device)} tokens"


def _model_lines(model: str, device: torch.device) -> Iterator[str]:
    if model == EMBEDDED_NAME:
        try:
            embedded_model_file()
        except FileNotFoundError as error:
            yield f"model        {error}"
            return
    try:
        checkpoint = open_model(model)
        config = ModelConfig.from_dict(checkpoint.config, checkpoint.generation_config)
        dtype = select_dtype("auto", device, config.dtype)
        with torch.device("meta"):
            shapes = model_class(config.architecture)(config)
    except (ValueError, OSError, ImportError) as error:
        yield f"model        {model}: {error}"
        return
    elements = sum(parameter.numel() for parameter in shapes.parameters())
    weights = elements * dtype.itemsize
    spec = KVCacheSpec.of(config, dtype)
    step = predicted_activation_bytes(config, dtype, default_max_num_batched_tokens(device), DEFAULT_MAX_NUM_SEQS)
    pool = CPU_POOL_BYTES if device.type == "cpu" else _gpu_pool_bytes(device, weights + step)
    yield f"model        {model}: {config.architecture}, {config.num_layers} layers, dtype {str(dtype).removeprefix('torch.')}"
    yield f"weights      {weights / GIB:.2f} GiB"
    yield f"KV cache     {spec.bytes_per_token:,} bytes a token; pool {max(0, pool) / GIB:.2f} GiB: {max(0, pool) // spec.bytes_per_token:,} tokens"
    bounds = ", ".join(f"{name} {bandwidth / (2 * elements):,.0f}" for name, bandwidth in BANDWIDTH.items())
    yield f"predicted    tokens/s for one sequence in 16 bit, at most: {bounds} (all weights read once a token; a bound, not measured)"
    if pool <= 0:
        yield "             the weights leave no room for a KV cache: choose a smaller model, or close what else uses the GPU"


def _gpu_pool_bytes(device: torch.device, taken: int) -> int:
    """Predicted; an LLM measures what a step takes, and its CUDA graphs."""
    free, total = gpu_memory(device)
    return min(int(total * default_gpu_memory_utilization(device)), free) - taken - GPU_SLACK_BYTES


def _package_lines() -> Iterator[str]:
    for name, (purpose, how) in _OPTIONAL.items():
        try:
            yield f"{name:<12} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name:<12} missing: {purpose}; {how}"
    try:
        yield f"{'smollm2':<12} {embedded_model_file().name}"
    except FileNotFoundError:
        yield f"{'smollm2':<12} missing: the embedded model; {EMBEDDED_INSTALL}"
