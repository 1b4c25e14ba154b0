"""Filling a model's parameters from a checkpoint's tensors, with every name and shape checked."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minivllm.layers.embedding import ParallelLMHead
from minivllm.layers.linear import Linear

#: Tensors that old checkpoints carry and every model computes for itself.
_COMPUTED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")


def parameter_slots(model: nn.Module) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes: its name -> the parameter, or the part of a merged parameter, that it fills."""
    slots = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Linear) and module.parts:
                pieces = parameter.split(list(module.parts.values()))
                parent = path.rpartition(".")[0]
                slots.update({f"{parent}.{part}.{name}".lstrip("."): piece for part, piece in zip(module.parts, pieces)})
            elif not _is_tied(module):
                slots[f"{path}.{name}".lstrip(".")] = parameter
    return slots


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Copy `tensors` into `model`, converting dtype and device.

    Raises ValueError that lists every missing, unexpected and wrongly shaped tensor of `source`. A repeated `lm_head.weight`
    of a model that ties it to the embedding is passed over.
    """
    open_slots, unexpected, misshapen = parameter_slots(model), [], []
    for name, tensor in tensors:
        slot = open_slots.pop(name, None)
        if slot is None:
            if not name.endswith(_COMPUTED) and name != _tied_name(model):
                unexpected.append(name)
        elif slot.shape != tensor.shape:
            misshapen.append(f"{name} is {list(tensor.shape)}, the model wants {list(slot.shape)}")
        else:
            slot.copy_(tensor)
    problems = [f"{what}: {', '.join(names)}" for what, names in
                (("missing", list(open_slots)), ("unexpected", unexpected), ("wrong shape", misshapen)) if names]
    if problems:
        raise ValueError(f"the weights in {source} do not fit {type(model).__name__}. " + "; ".join(problems))


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with small random numbers, the same for the same seed on the same device: to measure, not to read."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # norm weights, and biases, which a model can bear
        else:
            parameter.normal_(0, 0.02, generator=generator)


def _is_tied(module: nn.Module) -> bool:
    return isinstance(module, ParallelLMHead) and module.tied


def _tied_name(model: nn.Module) -> str | None:
    return next((f"{path}.weight" for path, module in model.named_modules() if _is_tied(module)), None)
