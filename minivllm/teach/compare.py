"""Whether two results are the same, what is wrong with one that is not, and how to show both in a few characters.

Takes lists, tuples, numpy arrays and tensors alike. Knows no exercise.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import torch
from torch import Tensor

#: dtype -> (relative, absolute) tolerance; others are compared exactly.
TOLERANCES = {torch.float64: (1e-6, 1e-6), torch.float32: (1e-4, 1e-5), torch.float16: (1e-2, 5e-3), torch.bfloat16: (5e-2, 3e-2)}

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def as_tensor(value: Any) -> Tensor | None:
    """A tensor of what a tensor, a numpy array or nested lists hold, on the CPU; None for anything else."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value if value.layout == torch.strided else value.to_dense()
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        value = [item.tolist() if isinstance(item, Tensor) else item for item in value]
    if not isinstance(value, (list, tuple)) and not hasattr(value, "__array__"):
        return None
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def as_number(value: Any) -> Any:
    """A plain number of a Python, numpy or one-element tensor number; anything else as it is."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 or type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        return value.item()
    return value


def close(got: Tensor, want: Tensor) -> bool:
    """Equal shapes and equal elements, within the tolerance of the coarser float dtype."""
    if got.shape != want.shape or got.is_complex() != want.is_complex():
        return False
    relative, absolute = max(TOLERANCES.get(got.dtype, (0, 0)), TOLERANCES.get(want.dtype, (0, 0)))
    return torch.allclose(got.double(), want.double(), rtol=relative, atol=absolute, equal_nan=True)


def same(a: Any, b: Any) -> bool:
    """Whether two results are alike, dtype included: a learner's and a known mistake's, or an argument before and after."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return isinstance(a, float) == isinstance(b, float) and _near(a, b)
    first, second = as_tensor(a), as_tensor(b)
    if first is None or second is None:
        return type(a) is type(b) and isinstance(a, (str, bytes, type(None), type(...), complex)) and a == b
    return first.dtype == second.dtype and close(first, second)


def number_problem(got: Any, want: Any) -> str | None:
    """What is wrong with a returned number, or None. An int may not come as a float, though the value be right."""
    if isinstance(want, bool):
        return truth_problem(got, want)
    if isinstance(want, int) and isinstance(got, Tensor):
        return "your function returns a tensor where a plain int is wanted: convert with int(), or count with .shape and len()"
    got = as_number(got)
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return f"your function returns {_answer(got)} where a number is wanted"
    if isinstance(want, int) and isinstance(got, float):
        right = "a whole number is wanted and this is a float: divide with // instead of /"
        return right if got == want else "the number is wrong, and a float"
    if got != got:
        return "the result is NaN (not a number): look for 0 / 0"
    if isinstance(want, int):
        return None if got == want else "the number is wrong"
    return None if _near(got, want) else "the number is wrong"


def truth_problem(got: Any, want: bool) -> str | None:
    """What is wrong with a returned yes or no, or None."""
    if not isinstance(got, bool):
        return f"your function returns {_answer(got)} where True or False is wanted: a comparison gives one"
    return None if got is want else "the answer is wrong"


def tensor_problem(got: Any, want: Tensor, letters: str) -> str | None:
    """What is wrong with a returned tensor, or None."""
    tensor = as_tensor(got)
    if tensor is None:
        return f"your function returns {_answer(got)} where a tensor [{letters}] is wanted"
    if tensor.shape != want.shape:
        return _shape_problem(tensor, want, letters)
    if tensor.dtype != want.dtype and not isinstance(got, (list, tuple)):
        convert = "; the values are right: convert with .to(...)" if close(tensor, want) else ""
        return f"the dtype is {_dtype(tensor)}, wanted is {_dtype(want)}{convert}"
    if tensor.is_floating_point() and tensor.numel() and want.dtype in _INTEGERS:
        return "the list holds floats where whole numbers are wanted: divide with // instead of /"
    if want.dtype == torch.bool and not bool(((tensor == 0) | (tensor == 1)).all()):
        return "the values must be True or False"
    if tensor.is_floating_point() and bool(tensor.isnan().any()) and not bool(want.isnan().any()):
        return "there are NaNs in it: a softmax over a row that is all -inf gives them, and so does 0 / 0"
    if close(tensor, want):
        return None
    order = _transposed(tensor, want)
    return f"dimensions {order} look transposed: the shape is right, but the values lie crosswise" if order else "the values are wrong"


def _shape_problem(got: Tensor, want: Tensor, letters: str) -> str:
    message = f"the shape is {list(got.shape)}, wanted is {list(want.shape)}, that is [{letters}]"
    names = letters.split(", ")
    if got.dim() != want.dim():
        return f"{message}: {got.dim()} dimension{'' if got.dim() == 1 else 's'} instead of {want.dim()}"
    for i, j in itertools.combinations(range(want.dim()), 2):
        if got.transpose(i, j).shape == want.shape:
            return f"{message}: {names[i]} and {names[j]} look transposed"
    return message


def _transposed(got: Tensor, want: Tensor) -> str:
    for i, j in itertools.combinations(range(want.dim()), 2):
        if close(got.transpose(i, j).contiguous(), want):
            return f"{i} and {j}"
    return ""


def show(value: Any, against: Any = None) -> str:
    """A value in one line, or a small matrix in a few. A large tensor is shown where it first differs from `against`."""
    tensor = as_tensor(value) if not isinstance(value, (list, tuple)) or against is not None else None
    if tensor is None or tensor.dim() == 0 or tensor.layout != torch.strided:
        return _plain(as_number(value))
    head = f"{_dtype(tensor)} {list(tensor.shape)}"
    if tensor.dim() == 2 and tensor.shape[0] <= 4 and tensor.shape[1] <= 8:
        rows = [[_element(x) for x in row] for row in tensor.tolist()]
        width = max((len(text) for row in rows for text in row), default=0)
        return head + "".join("\n  " + " ".join(text.rjust(width) for text in row) for row in rows)
    if tensor.numel() <= 8:  # dimensions of size 1 would only add brackets
        return f"{head} = {_nested(tensor.squeeze().tolist())}"
    other = as_tensor(against) if against is not None else None
    if other is None or other.shape != tensor.shape:
        return head
    differs = ~torch.isclose(tensor.double(), other.double(), rtol=1e-3, atol=1e-4)
    places = differs.nonzero()
    if not len(places):
        return head
    place = places[0].tolist()
    return f"{head}; at {place} it is {_element(tensor[tuple(place)].item())}"


def _near(a: float, b: float) -> bool:
    """Equal up to rounding; ints exactly. Two NaNs count as equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    try:
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) or (a != a and b != b)
    except OverflowError:  # an int beyond all floats
        return False


def a_kind(value: Any) -> str:
    """The kind of a value with its article, for a sentence: "an int", "a Tensor", and "None" as it is."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIO' or name == 'ndarray' else 'a'} {name}"


def _answer(value: Any) -> str:
    return a_kind(value) + (" (is a `return` missing?)" if value is None else "")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _element(x: Any) -> str:
    return str(x) if isinstance(x, (bool, int)) else f"{x:.4g}"


def _nested(x: Any) -> str:
    return f"[{', '.join(_nested(item) for item in x)}]" if isinstance(x, list) else _element(x)


def _plain(value: Any) -> str:
    if not isinstance(value, (int, float, complex, str, list, tuple, type(None), type(...))):
        return a_kind(value)  # its repr may hold an address, which differs from run to run
    text = f"{value:.6g}" if isinstance(value, float) and value == value else re.sub(r"\b0x[0-9a-fA-F]+", "...", repr(value))
    if isinstance(value, float) and value.is_integer() and "e" not in text and "." not in text:
        text += ".0"
    return text if len(text) <= 100 else text[:97] + "..."
