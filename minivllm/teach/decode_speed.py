"""How fast the Triton decode kernel reads pages: on this GPU now, or as saved from an H200.

The shape is that of one layer of Qwen3-0.6B (16 query heads, 8 kv heads, head dim 128) in 16 bit. Used by notebook 04.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import torch

H, K, D = 16, 8, 128
BYTES_PER_TOKEN = 2 * K * D * 2  # K and V of one layer in 16 bit
CASES = ((256, 1000), (64, 1000), (8, 4000), (1, 8000))  # sequences, tokens of each (on average)
BLOCK_SIZES = (1, 8, 16, 64, 256)
_MOST_LAYERS = 14  # the graph walks over several, so that none finds its pages in the GPU's cache


def saved() -> dict[str, Any]:
    """Measured on an H200: device; copy_bandwidth in bytes a second; cases and block_sizes as `measure` gives them."""
    return json.loads(resources.files("minivllm.teach").joinpath("saved", "h200_decode.json").read_text())


def measure() -> dict[str, Any]:
    """The same on this CUDA GPU. cases: microseconds, and the share of what a large copy reaches; block_sizes: microseconds for 64 x 1,000."""
    from minivllm.bench.kernels import copy_bandwidth, ragged

    torch.manual_seed(0)
    copy, cases = copy_bandwidth(), []
    for count, mean in CASES:
        lengths = ragged(count, mean) if count > 8 else [mean] * count
        seconds = _seconds(lengths, 16)
        cases.append({"case": f"decode {count} x {mean:,}", "microseconds": 1e6 * seconds,
                      "share": sum(lengths) * BYTES_PER_TOKEN / seconds / copy})
    lengths = [1000] * 64
    sizes = {str(size): 1e6 * _seconds(lengths, size) for size in BLOCK_SIZES}
    return {"device": torch.cuda.get_device_name(), "copy_bandwidth": copy, "cases": cases, "block_sizes": sizes}


def _seconds(lengths: list[int], block_size: int) -> float:
    """One layer's decode of sequences of these lengths, their blocks at random places."""
    from minivllm.bench.kernels import graph_seconds
    from minivllm.kernels.paged_decode import paged_decode_triton
    from minivllm.worker.device import has_matrix_unit

    device = torch.device("cuda")
    dot = has_matrix_unit(device)
    dtype = torch.bfloat16 if dot else torch.float16
    needed = [-(-length // block_size) for length in lengths]
    slots = sum(needed) * block_size
    layers = max(1, min(_MOST_LAYERS, int(torch.cuda.mem_get_info(device)[0] / 2 / (slots * BYTES_PER_TOKEN))))
    cache = torch.randn(layers, 2, slots, K, D, dtype=dtype, device=device)
    blocks = torch.randperm(sum(needed), dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for row, part in enumerate(blocks.split(needed)):
        tables[row, :len(part)] = part
    context, q = torch.tensor(lengths, dtype=torch.int32, device=device), torch.randn(len(lengths), H, D, dtype=dtype, device=device)
    args = (tables.to(device), context, block_size, D ** -0.5)
    return graph_seconds([lambda i=i: paged_decode_triton(q, *cache[i], *args, dot=dot) for i in range(layers)])
