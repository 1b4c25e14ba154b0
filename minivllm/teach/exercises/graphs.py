"""Exercises of notebook 09: fill a graph's buffer with a batch and its padding, and count the bytes that one fused kernel moves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.teach.exercise import Case, Exercise, Mistake

PADDING = torch.tensor([0, 0, -1, 0])  # token id, position, slot, context length


def pad_batch(buffer: Tensor, columns: Tensor, sizes: list[int]) -> int:
    """Put columns [4, B] (ids, positions, slots, context lengths) into buffer [4, most], padded to the smallest of `sizes` that holds B.

    In place; what lies behind that size is left alone. Returns the size. Raises ValueError for more rows than any size holds.
    """
    count = columns.shape[1]
    size = next((size for size in sizes if size >= count), None)
    if size is None:
        raise ValueError(f"{count} rows: the largest graph has {sizes[-1]}")
    buffer[:, :count] = columns
    buffer[:, count:size] = PADDING[:, None]
    return size


def fused_bytes(reads: Tensor, writes: Tensor, sizes: Tensor, kept: Tensor) -> int:
    """Bytes that one kernel for all operations moves. reads, writes [operations, tensors] bool; sizes [tensors]; kept [tensors] bool.

    An input is read once, a result is written if somebody else wants it (`kept`), everything else stays inside.
    """
    made = writes.any(dim=0)
    return int(sizes[(reads.any(dim=0) & ~made) | (made & kept)].sum())


def _pads(fill: Tensor | Callable = PADDING, choose: Callable = lambda n, sizes: next(size for size in sizes if size >= n),
          returns: Callable = lambda n, size: size, until: Callable = lambda size, most: size, refuses: bool = True) -> Callable:
    """A wrong pad_batch: what padding holds, which size it takes, what it returns, how far it fills."""
    def function(buffer: Tensor, columns: Tensor, sizes: list[int]) -> int:
        count = columns.shape[1]
        if refuses and count > sizes[-1]:
            raise ValueError("too many")
        size = choose(count, sizes)
        buffer[:, :count] = columns
        rest = until(size, buffer.shape[1])
        if rest > count:
            buffer[:, count:rest] = fill(columns) if callable(fill) else fill[:, None]
        return returns(count, size)
    return function


def _column(*values: int) -> Tensor:
    return torch.tensor(values)


def _new_buffer(buffer: Tensor, columns: Tensor, sizes: list[int]) -> int:
    return pad_batch(buffer.clone(), columns, sizes)


def _unfilled(buffer: Tensor, columns: Tensor, sizes: list[int]) -> int:
    size = pad_batch(buffer.clone(), columns, sizes)
    buffer[:, :columns.shape[1]] = columns
    return size


def _slot_alone(buffer: Tensor, columns: Tensor, sizes: list[int]) -> int:
    old = buffer.clone()
    size = pad_batch(buffer, columns, sizes)
    buffer[[0, 1, 3], columns.shape[1]:size] = old[[0, 1, 3], columns.shape[1]:size]
    return size


def _four_rows(buffer: Tensor, columns: Tensor, sizes: list[int]) -> int:
    size = next(size for size in sizes if size >= len(columns))
    buffer[:, :len(columns)] = columns
    buffer[:, len(columns):size] = PADDING[:, None]
    return size


def _cut_off(buffer: Tensor, columns: Tensor, sizes: list[int]) -> int:
    return pad_batch(buffer, columns[:, :sizes[-1]], sizes)


def _case(seed: int, count: int, sizes: list[int], note: str = "") -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(columns: int, low: int) -> Tensor:
        positions = torch.randint(low, 60, (columns,), generator=generator)
        slots = torch.randperm(400, generator=generator)[:columns]
        return torch.stack((torch.randint(1, 500, (columns,), generator=generator), positions, slots, positions + 1))

    return Case({"buffer": draw(sizes[-1], 1), "columns": draw(count, 1), "sizes": sizes}, note)


def _drawn_cases() -> list[Case]:
    generator = torch.Generator().manual_seed(9)
    sizes = [1, 2, 4, 8, 16, 24, 32]
    return [_case(100 + n, int(torch.randint(1, 33, (1,), generator=generator)), sizes) for n in range(3)]


PAD_BATCH = Exercise("pad_batch", [
    _case(0, 3, [1, 2, 4], "three rows: the graph of 4, one row of padding"),
    _case(1, 2, [1, 2, 4], "a graph of just this size: no padding, and what lies behind stays as it was"),
    _case(2, 1, [4, 6], "one row in a graph of 4: three rows of padding"),
    _case(3, 5, [1, 2, 6, 8], "sizes need not be powers of two"),
    _case(4, 5, [1, 2, 4], "more rows than the largest graph has: ValueError, and the buffer stays as it was"),
    _case(5, 8, [1, 2, 4, 8], "the largest graph, full"),
    *_drawn_cases(),
], pad_batch, kind="int", changes=("buffer",),
    refusal="you refuse although a graph fits: only more rows than sizes[-1] are too many", mistakes=[
    Mistake(_unfilled, "the padding is not filled: its columns still hold rows of the step before, and the graph will write their slots "
            "again"),
    Mistake(_pads(_column(0, 0, 0, 0)), "the padding has slot 0, which is somebody's: its K/V would be overwritten. Only -1 writes "
            "nothing"),
    Mistake(_pads(_column(-1, -1, -1, -1)), "the padding is -1 throughout: there is no token -1 and no position -1 (a graph would read "
            "outside of "
            "the embedding). Only the slot is -1"),
    Mistake(_pads(_column(0, 0, -1, 1)), "the padding has context length 1: it would read a slot that is not its own. 0: it reads nothing"),
    Mistake(_pads(_column(0, 0, -1, -1)), "the padding has context length -1: a row that reads nothing has 0"),
    Mistake(_pads(_column(0, 0, 0, -1)), "-1 stands in the wrong row: ids, positions, slots, context lengths, so slots are row 2"),
    Mistake(_slot_alone, "only the slot of the padding is set: its context length is still an old row's, so it would attend to that row's "
            "tokens. All four numbers: (0, 0, -1, 0)"),
    Mistake(_four_rows, "len(columns) is 4, the kinds of numbers: a sequence is a column, so B is columns.shape[1]", same_text=True),
    Mistake(_pads(lambda columns: columns[:, -1:]), "the padding repeats the last row: it would write that row's slot once more, at the "
            "same "
            "moment. Its slot must be -1 and its context 0"),
    Mistake(_pads(lambda columns: PADDING), "four numbers make a row here, not a column: padding[:, None] is [4, 1] and fits any number"),
    Mistake(_pads(choose=lambda n, sizes: sizes[-1]), "it always takes the largest graph: take the smallest that holds all rows"),
    Mistake(_pads(choose=lambda n, sizes: next((size for size in sizes if size > n), sizes[-1])), "a graph of exactly this size fits: "
            "compare with >=, not >"),
    Mistake(_pads(choose=lambda n, sizes: max([size for size in sizes if size <= n], default=sizes[0])), "it takes the largest size "
            "that is not above "
            "the batch, so rows would be left out: take the smallest that is not below"),
    Mistake(_pads(choose=lambda n, sizes: 1 << (n - 1).bit_length()), "it takes the next power of two: only graphs of `sizes` were "
            "captured"),
    Mistake(_pads(until=lambda size, most: most), "the whole buffer is filled, behind the graph's size too: that is work for nothing, "
            "fill columns B to size - 1"),
    Mistake(_pads(until=lambda size, most: min(size + 1, most)), "one column too many: the slice B:size ends before size"),
    Mistake(_pads(returns=lambda n, size: n), "the buffer is right, but you return how many rows are real: return the size of the graph"),
    Mistake(_pads(returns=lambda n, size: size - n), "the buffer is right, but you return how many rows are padding: return the size of "
            "the graph"),
    Mistake(_new_buffer, "the caller's buffer is unchanged: torch.cat, F.pad and clone make a new tensor, at an address that the graph "
            "does not read. "
            "Assign to buffer[:, ...]"),
    Mistake(_cut_off, "rows that find no room are dropped in silence: raise ValueError before anything is written"),
    Mistake(_pads(refuses=False, choose=lambda n, sizes: next((size for size in sizes if size >= n), n)), "more rows than the largest "
            "graph has: "
            "raise ValueError before anything is written"),
])


def _chain(seed: int, operations: int, note: str = "", shared: bool = False) -> Case:
    """Random operations in a row: each reads an input or two and, but for the first, what the one before made."""
    generator = torch.Generator().manual_seed(seed)
    tensors = 3 * operations
    reads, writes = torch.zeros(2, operations, tensors, dtype=torch.bool)
    kept = torch.zeros(tensors, dtype=torch.bool)
    for op in range(operations):
        reads[op, 3 * op] = True
        reads[op, 3 * op + 1] = bool(torch.rand(1, generator=generator) < 0.5)
        writes[op, 3 * op + 2] = True
        if op:
            reads[op, 3 * op - 1] = True
            reads[op, 0] |= shared
        kept[3 * op + 2] = op == operations - 1 or bool(torch.rand(1, generator=generator) < 0.3)
    sizes = 64 * torch.randint(1, 100, (tensors,), generator=generator)
    return Case({"reads": reads, "writes": writes, "sizes": sizes, "kept": kept}, note)


def _plain(reads: list[list[int]], writes: list[list[int]], sizes: list[int], kept: list[int], note: str) -> Case:
    return Case({"reads": torch.tensor(reads).bool(), "writes": torch.tensor(writes).bool(), "sizes": torch.tensor(sizes),
                 "kept": torch.tensor(kept).bool()}, note)


def _every(reads: Tensor, writes: Tensor, sizes: Tensor) -> int:
    return int((reads.long() * sizes).sum() + (writes.long() * sizes).sum())


def _of(choose: Callable) -> Callable:
    """A fused_bytes that adds up sizes times whatever `choose(reads, writes, kept)` [tensors] counts."""
    return lambda reads, writes, sizes, kept: int((choose(reads, writes, kept).long() * sizes).sum())


FUSED_BYTES = Exercise("fused_bytes", [
    _plain([[1, 0]], [[0, 1]], [100, 40], [0, 1], "one operation: nothing to fuse"),
    _plain([[1, 0, 0], [0, 1, 0]], [[0, 1, 0], [0, 0, 1]], [80, 40, 40], [0, 0, 1], "silu, then the product: what lies between stays "
        "inside"),
    _plain([[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]], [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]], [64, 64, 64, 2, 64], [0, 0, 1, 0, 1],
           "sum and norm: the sum is wanted later, so it is written"),
    _plain([[1, 0, 0, 0], [1, 1, 0, 0]], [[0, 1, 0, 0], [0, 0, 1, 0]], [50, 20, 30, 70], [0, 0, 1, 1], "both operations read the first; "
        "nobody touches the last"),
    _chain(1, 3), _chain(2, 5, shared=True), _chain(3, 6), _chain(4, 4, shared=True),
    _plain([[1, 0, 0, 0], [0, 1, 0, 0]], [[0, 1, 1, 0], [0, 0, 0, 1]], [60, 40, 24, 40], [0, 0, 0, 1], "the third is made, and nobody "
        "wants it"),
    _plain([[0, 1, 1, 0, 0], [0, 1, 0, 1, 0]], [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]], [10, 36, 20, 44, 28], [0, 0, 0, 0, 1],
           "nobody touches the first"),
], fused_bytes, kind="int", mistakes=[
    Mistake(lambda reads, writes, sizes, kept: _every(reads, writes, sizes), "that is what separate kernels move: fused, what one "
            "operation makes for another stays "
            "inside, and an input is read once"),
    Mistake(_of(lambda reads, writes, kept: (reads.any(0) & ~writes.any(0)) | writes.any(0)), "every result is written here: write only "
            "what is `kept`"),
    Mistake(_of(lambda reads, writes, kept: reads.any(0).int() + (writes.any(0) & kept).int()), "what an operation inside has made is "
            "read again here: it "
            "is still at hand. Read only what nobody inside makes"),
    Mistake(_of(lambda reads, writes, kept: reads.sum(0) * ~writes.any(0) + (writes.any(0) & kept)), "an input that two operations use "
            "is read once, and "
            "you count it for each"),
    Mistake(_of(lambda reads, writes, kept: reads.any(0) & ~writes.any(0)), "only the reads are counted: results that are `kept` must "
            "be written"),
    Mistake(_of(lambda reads, writes, kept: writes.any(0) & kept), "only the writes are counted: inputs must be read"),
    Mistake(_of(lambda reads, writes, kept: (reads.any(0) & ~writes.any(0)) | kept), "`kept` may name a tensor that no operation here "
            "makes: write only what is made "
            "and kept"),
    Mistake(_of(lambda reads, writes, kept: ~writes.any(0) | kept), "a tensor that no operation touches is counted: an input is what some "
            "operation reads"),
    Mistake(_of(lambda reads, writes, kept: reads.any(0) ^ writes.any(0)), "what is made and read again inside cancels out, even where it "
            "is `kept`: that one is written once. And what is made for nobody is not written"),
    Mistake(_of(lambda reads, writes, kept: reads[0].int() + (writes.any(0) & kept).int()), "only the first operation's inputs are read: "
            "later ones bring inputs of their own"),
    Mistake(_of(lambda reads, writes, kept: reads[0].int() + writes[-1].int()), "only what the first reads and the last writes is counted: "
            "others read inputs too, and may make what is `kept`"),
    Mistake(_of(lambda reads, writes, kept: (reads.any(0) & ~writes.any(0)) | (writes.any(0) & (kept | ~reads.any(0)))), "what nobody "
            "reads and nobody keeps is written here: write only what is `kept`"),
    Mistake(lambda reads, writes, sizes, kept: 2 * fused_bytes(reads, writes, sizes, kept), "twice as much: the sizes are bytes already, "
            "not numbers of 16 bit"),
    Mistake(lambda reads, writes, sizes, kept: int(sizes[(reads.any(1) & ~writes.any(1)) | (writes.any(1) & kept)].sum()), "dim=1 asks of "
            "each operation: dim=0 asks of each tensor whether some operation reads or writes it", same_text=True),
    Mistake(lambda reads, writes, sizes, kept: int(((reads.any(0) & ~writes.any(0)) | (writes.any(0) & kept)).sum()), "that is how many "
            "tensors move: add up "
            "their sizes"),
    Mistake(lambda reads, writes, sizes, kept: _every(reads, writes, sizes) - fused_bytes(reads, writes, sizes, kept), "that is what "
            "fusion saves: return "
            "what is still moved"),
])

EXERCISES = [PAD_BATCH, FUSED_BYTES]
