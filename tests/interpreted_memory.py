"""What a kernel reads and writes, address by address, while Triton's interpreter runs it: a stray access on a GPU is often not noticed."""

import contextlib

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder


def bytes_of(tensor):
    """(first, behind the last) of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@contextlib.contextmanager
def only(reads, writes):
    """Within it a load outside of the tensors `reads`, or a store outside of `writes`, raises IndexError."""
    allowed = {"load": [bytes_of(tensor) for tensor in reads], "store": [bytes_of(tensor) for tensor in writes]}
    originals = {name: getattr(InterpreterBuilder, f"create_masked_{name}") for name in allowed}

    def checked(name):
        def access(self, pointers, *arguments):
            mask = arguments[0 if name == "load" else 1]
            at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64)
            inside = np.zeros(at.shape, bool)
            for first, end in allowed[name]:
                inside |= (at >= first) & (at < end)
            if not inside.all():
                raise IndexError(f"{(~inside).sum()} of {at.size} addresses of a {name} lie outside")
            return originals[name](self, pointers, *arguments)
        return access

    try:
        for name in allowed:
            setattr(InterpreterBuilder, f"create_masked_{name}", checked(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(InterpreterBuilder, f"create_masked_{name}", original)
