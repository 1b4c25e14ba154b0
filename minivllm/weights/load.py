"""Filling a model's parameters from a checkpoint's tensors, with every name and shape checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minivllm.layers.embedding import ParallelLMHead
from minivllm.layers.parallel import Part

#: Tensors that old checkpoints carry and every model computes for itself.
_COMPUTED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")


@dataclass(frozen=True)
class Slot:
    """A place in a model: `view` is all or part of a parameter, and takes `part` of a checkpoint's tensor (None: all of it)."""

    view: Tensor
    part: Part | None = None

    @property
    def shape(self) -> list[int]:
        """What the checkpoint's tensor must have."""
        shape = list(self.view.shape)
        if self.part is not None:
            shape[self.part.dim] = self.part.whole
        return shape

    def fill(self, tensor: Tensor) -> None:
        """Only this rank's part of `tensor` is read, and goes to the device."""
        self.view.copy_(tensor if self.part is None else tensor.narrow(self.part.dim, self.part.start, self.part.size))


def all_slots(model: nn.Module) -> dict[str, Slot]:
    """Where each tensor of a checkpoint goes, by its name."""
    slots = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not _is_tied(module):
                for part, slot in _slots(module, parameter):
                    owner = f"{path.rpartition('.')[0]}.{part}" if part else path
                    slots[f"{owner}.{name}".lstrip(".")] = slot
    return slots


def parameter_slots(model: nn.Module) -> dict[str, Tensor]:
    """The parameter, or the part of a merged parameter, that each tensor of a checkpoint fills, by its name."""
    return {name: slot.view for name, slot in all_slots(model).items()}


def _slots(module: nn.Module, parameter: Tensor) -> Iterator[tuple[str, Slot]]:
    """(part's name, slot) of each tensor that `parameter` is made of."""
    first = 0
    for name, part in (getattr(module, "parts", None) or {"": None}).items():
        if part is None or part.dim >= parameter.dim():  # a norm; the bias of a row-parallel layer
            yield name, Slot(parameter)
        else:
            yield name, Slot(parameter.narrow(part.dim, first, part.size), part)
            first += part.size


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Copy `tensors` into `model`, converting dtype and device.

    Raises ValueError that lists every missing, unexpected and wrongly shaped tensor of `source`. A repeated `lm_head.weight`
    of a model that ties it to the embedding is passed over.
    """
    open_slots, unexpected, misshapen = all_slots(model), [], []
    for name, tensor in tensors:
        slot = open_slots.pop(name, None)
        if slot is None:
            if not name.endswith(_COMPUTED) and name != _tied_name(model):
                unexpected.append(name)
        elif slot.shape != list(tensor.shape):
            misshapen.append(f"{name} is {list(tensor.shape)}, the model wants {slot.shape}")
        else:
            slot.fill(tensor)
    problems = [f"{what}: {', '.join(names)}" for what, names in
                (("missing", list(open_slots)), ("unexpected", unexpected), ("wrong shape", misshapen)) if names]
    if problems:
        raise ValueError(f"the weights in {source} do not fit {type(model).__name__}. " + "; ".join(problems))


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with small random numbers, the same for the same seed on the same device, however many ranks share it."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    filled: set[int] = set()  # a tied head's weight is the embedding's
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in filled:
                filled.add(id(parameter))
                _randomize(parameter, [slot for _, slot in _slots(module, parameter)], generator)


def _randomize(parameter: Tensor, slots: list[Slot], generator: torch.Generator) -> None:
    """Norm weights, and biases, which a model can bear, are 1. The numbers of a shared weight are drawn for all ranks, and one's kept."""
    if parameter.dim() == 1:
        parameter.fill_(1.0)
    elif all(slot.part is None or slot.part.size == slot.part.whole for slot in slots):
        parameter.normal_(0, 0.02, generator=generator)
    else:
        shape, dim = list(parameter.shape), slots[0].part.dim
        shape[dim] = sum(slot.part.whole for slot in slots)
        whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device).normal_(0, 0.02, generator=generator)
        for slot, tensor in zip(slots, whole.split([slot.part.whole for slot in slots], dim)):
            slot.fill(tensor)


def _is_tied(module: nn.Module) -> bool:
    return isinstance(module, ParallelLMHead) and module.tied


def _tied_name(model: nn.Module) -> str | None:
    return next((f"{path}.weight" for path, module in model.named_modules() if _is_tied(module)), None)
