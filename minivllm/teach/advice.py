"""What an exception in a learner's function most likely means, told from its type and from the words of its message. Knows no exercise."""

from __future__ import annotations

_BY_TYPE = {
    IndexError: "an index runs past the end: print the shape of what is indexed, and count from 0",
    ZeroDivisionError: "something is divided by zero: look at which argument is 0 or 1 here",
    NotImplementedError: "this case still reaches the stub's `raise NotImplementedError`: delete it",
    NameError: "a name is not defined: is it misspelt, or was the cell that imports or defines it not run?",
    AttributeError: "this kind of object has no such attribute: print its type()",
    TypeError: "an operation got a type that it cannot work with: print type() of each argument",
    RecursionError: "the function calls itself without an end",
}
_TOO_MANY = "there are more indices than dimensions: print the shape of what is indexed"
#: torch, numpy and Python raise an IndexError for more than an index that is too large.
_OF_AN_INDEX = {
    "tensors used as indices must be": "a tensor used as an index must hold whole numbers or booleans: a / b gives floats, a // b whole "
                                       "numbers, and .long() converts",
    "only integers, slices": "an index must be a whole number: a / b gives a float, a // b a whole number",
    "shape of the mask": "a tensor of booleans used as an index must have the shape of what it indexes: print both shapes",
    "boolean index did not match": "an array of booleans used as an index must have the shape of what it indexes: print both shapes",
    "shape mismatch: indexing": "indices used together must have shapes that broadcast to one another: print the shapes of all",
    "too many indices": _TOO_MANY,
    "invalid index of a 0-dim": _TOO_MANY,
    "Dimension out of range": "there is no dimension of this number: print the shape, and count dimensions from 0",
    "empty list": "the list is empty at this place: print its length before",
}


def advice_on(error: Exception) -> str:
    """The likely cause in a sentence; a general one where nothing better is known."""
    message = str(error)
    if isinstance(error, IndexError):
        for words, advice in _OF_AN_INDEX.items():
            if words in message:
                return advice
    for kind, advice in _BY_TYPE.items():
        if isinstance(error, kind):
            return advice
    if any(words in message for words in ("size", "shape", "dimension")):
        return "the shapes of two tensors do not fit each other: print both, and name each dimension by its letter"
    return "the message above names the operation that failed: print the shapes and dtypes that go into it"
