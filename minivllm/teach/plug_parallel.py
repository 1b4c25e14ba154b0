"""The real model on ranks that are threads, with a learner's `shard_qkv` or `row_parallel` in it. As `plug`, for notebook 10."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minivllm.layers.linear import QKVParallelLinear, RowParallelLinear
from minivllm.teach import check
from minivllm.teach.compare import as_tensor
from minivllm.teach.plug import PlugError, _call
from minivllm.teach.stub import NOT_ATTEMPTED, is_stub
from minivllm.teach.thread_ranks import MeetingError, ThreadRank
from minivllm.teach.thread_runner import Change, ThreadRunner


def shard_qkv(fn: Any, model: str, size: int, prompts: list[list[int]], want: list[list[int]]) -> None:
    """Print whether `size` ranks, whose q, k and v weights are cut by `fn`, generate the tokens of `want`."""
    def change(module: nn.Module, rank: ThreadRank, whole: dict[str, Tensor]) -> None:
        heads, kv_heads = _heads(module, rank.size)
        for path, layer in module.named_modules():
            if isinstance(layer, QKVParallelLinear):
                names = [f"{path.rpartition('.')[0]}.{name}.weight" for name in layer.parts]
                merged = torch.cat([whole[name].to(layer.weight.dtype) for name in names])
                given = f"(it was given weight {list(merged.shape)})"
                rows = as_tensor(_call(fn, given, merged, heads, kv_heads, rank.rank, rank.size))  # its checker takes lists, too
                if rows is None or rows.shape != layer.weight.shape:
                    got = "no tensor" if rows is None else list(rows.shape)
                    raise PlugError(f"your function returned {got}, rank {rank.rank} needs {list(layer.weight.shape)} {given}")
                layer.weight.copy_(rows)

    _run("shard_qkv", fn, model, size, prompts, want, change)


def row_parallel(fn: Any, model: str, size: int, prompts: list[list[int]], want: list[list[int]]) -> None:
    """The same with `fn` as what every row-parallel layer of every rank computes."""
    def change(module: nn.Module, rank: ThreadRank, whole: dict[str, Tensor]) -> None:
        for layer in module.modules():
            if isinstance(layer, RowParallelLinear):
                layer.forward = lambda x, layer=layer: _call(fn, f"(it was given x {list(x.shape)})", x, layer.weight, layer.bias,
                                                             rank.rank, rank.all_reduce)

    _run("row_parallel", fn, model, size, prompts, want, change)


def _heads(module: nn.Module, size: int) -> tuple[int, int]:
    """Query and kv heads of the whole model."""
    layer = next(layer for layer in module.modules() if isinstance(layer, QKVParallelLinear))
    attention = next(layer for layer in module.modules() if hasattr(layer, "k_cache"))
    return attention.num_heads * size, layer.parts["k_proj"].whole // attention.head_dim


def _run(name: str, fn: Any, model: str, size: int, prompts: list[list[int]], want: list[list[int]], change: Change) -> None:
    if is_stub(fn):
        print(NOT_ATTEMPTED)
        return
    if check.result(name, fn).status != "passed":
        print(f"run the check above first: check.{name} does not pass yet")
        return
    try:
        with torch.no_grad(), ThreadRunner(model, size, change) as runner:
            got = runner.generate(prompts, [len(tokens) for tokens in want])
            calls = len(runner.ranks[0].calls)
    except (PlugError, MeetingError) as error:
        print(error)
        return
    print(f"{size} ranks, {sum(map(len, got))} tokens, {calls} collectives; the same tokens as one rank's: {got == want}")
