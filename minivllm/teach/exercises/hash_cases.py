"""Judges a learner's `block_hashes(token_ids, block_size, extra)` by what any right one has in common, whatever hash it uses.

Two blocks must have equal hashes exactly if all tokens up to their ends are equal, and `extra` too. Every pair of blocks is compared.
"""

from __future__ import annotations

import inspect
import itertools
import random
import struct
from dataclasses import dataclass
from typing import Any

from minivllm.teach.compare import a_kind
from minivllm.teach.diagnose import Result, labelled
from minivllm.teach.exercise import one_line
from minivllm.teach.stub import NOT_ATTEMPTED, is_stub, not_attempted, returned_none

_SIGNATURE = 'block_hashes(token_ids: list[int], block_size: int, extra: bytes = b"")'
_PARENT = ("the hash of a block must depend on everything before it, because its K/V do: put the parent's hash in front of the block's "
           "tokens, and hash both")
_WIDE = "a hash of 64 bits or less collides by chance among billions of blocks, and on purpose at once: use hashlib, 128 bits or more"


@dataclass(frozen=True)
class Prefix:
    """A sequence's tokens, and what else its K/V depend on."""

    token_ids: list[int]
    extra: bytes = b""


@dataclass(frozen=True)
class HashCase:
    note: str
    block_size: int
    sequences: list[Prefix]


class Wrong(Exception):
    """(got, want, likely cause). `shown`: which sequences of the case it is about; empty: the first ones."""

    def __init__(self, got: str, want: str, cause: str, shown: tuple[int, ...] = ()):
        super().__init__(got, want, cause)
        self.shown = shown


def _random_case(seed: int) -> HashCase:
    rng = random.Random(seed)
    draw = lambda: [rng.choice([1, 2]) for _ in range(rng.randrange(0, 9))]
    sequences = [Prefix(draw(), rng.choice([b"", b"a"])) for _ in range(24)]
    return HashCase("ragged sequences of few different tokens", rng.choice([1, 2, 3]), sequences)


CASES = [
    HashCase("only full blocks are hashed", 4, [Prefix([5, 6, 7, 8, 9, 10]), Prefix([5, 6, 7]), Prefix(list(range(5, 17)))]),
    HashCase("equal beginnings, other ends", 2, [Prefix([5, 6, 7, 8]), Prefix([5, 6, 9, 9]), Prefix([5, 6, 7, 8, 1])]),
    HashCase("the same block behind another one", 2, [Prefix([1, 2, 7, 8]), Prefix([3, 4, 7, 8])]),
    HashCase("the same block at another place", 2, [Prefix([7, 8, 7, 8, 7, 8])]),
    HashCase("the same tokens in another order", 3, [Prefix([1, 2, 3]), Prefix([3, 2, 1]), Prefix([2, 2, 2])]),
    HashCase("tokens whose digits run together", 2, [Prefix([1, 23]), Prefix([12, 3]), Prefix([1, 2, 3, 4]), Prefix([12, 34])]),
    HashCase("large token ids", 2, [Prefix([1, 2]), Prefix([257, 2]), Prefix([65537, 2]), Prefix([151_935, 2])]),
    HashCase("the same prompt for two adapters", 2, [Prefix([1, 2, 3, 4], extra) for extra in (b"", b"french", b"polite")]),
    HashCase("an adapter whose name has the bytes of tokens", 2, [Prefix([1, 2, 3, 4]), *(
        Prefix([3, 4], struct.pack(f"{order}2I", 1, 2)) for order in "<>")]),
    HashCase("different beginnings, two equal blocks behind them", 1, [Prefix([1, 5, 6]), Prefix([2, 5, 6])]),
    *map(_random_case, range(3)),
]


def judge(function: Any) -> Result:
    """What `check.block_hashes(function)` finds. Never raises for what the learner's function does."""
    if function is None or function is ... or is_stub(function):
        return Result("not attempted", NOT_ATTEMPTED)
    if not callable(function):
        return Result("failed", f"give the function itself: check.block_hashes(block_hashes); this is {a_kind(function)}")
    for number, case in enumerate(CASES, start=1):
        try:
            _check(function, case)
        except NotImplementedError:
            return Result("not attempted", not_attempted(function))
        except Wrong as wrong:
            return Result("failed", _report(number, case, wrong), number, wrong.args[2])
    return Result("passed", f"{len(CASES)} checks passed")


def _report(number: int, case: HashCase, wrong: Wrong) -> str:
    got, want, cause = wrong.args
    places = wrong.shown or range(min(4, len(case.sequences)))
    given = "\n".join([f"block_size {case.block_size}", *(_shown(index, case.sequences[index]) for index in dict.fromkeys(places))])
    parts = (("input", given), ("got", got), ("want", want), ("likely cause", cause))
    return "\n".join([f"check {number} of {len(CASES)} failed: {case.note}", *(line for part in parts for line in labelled(*part))])


def _check(function: Any, case: HashCase) -> None:
    found = []
    for index, prefix in enumerate(case.sequences):
        found.append(_call(function, prefix, case.block_size))
        if found[-1] is None:
            raise Wrong("None", "a list", returned_none(function), (index,))
        _check_count(found[-1], len(prefix.token_ids), case.block_size, _name(index))
    _check_kinds([digest for hashes in found for digest in hashes])
    if [_call(function, prefix, case.block_size) for prefix in case.sequences] != found:
        raise Wrong("other hashes when called again", "the same", "the hash depends on something else than the prefix: no random number, "
                    "no id()")
    blocks = [(index, block, hashes[block]) for index, hashes in enumerate(found) for block in range(len(hashes))]
    for (p, i, first), (q, j, second) in itertools.combinations(blocks, 2):
        _compare(case, (p, i), (q, j), first == second)


def _call(function: Any, prefix: Prefix, size: int) -> Any:
    token_ids = list(prefix.token_ids)
    args = (token_ids, size, prefix.extra) if prefix.extra else (token_ids, size)
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        raise Wrong("a function with other arguments", _SIGNATURE, f"it must take these arguments, in this order: {_SIGNATURE}") from None
    try:
        hashes = function(*args)
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(f"raised {one_line(error)}", "a list of hashes", _why_raised(str(error))) from None
    if token_ids != prefix.token_ids:
        raise Wrong(f"token_ids then {token_ids}", f"token_ids {prefix.token_ids}", "your function changes its input in place: work on a "
                    "copy")
    return hashes


def _why_raised(message: str) -> str:
    if "bytes must be in range" in message:
        return 'bytes([...]) takes numbers up to 255: use struct.pack or token.to_bytes(4, "little")'
    if "bytes" in message and "str" in message:
        return 'text and bytes are joined: `extra` is bytes, and so is a .digest(); text becomes bytes with .encode()'
    if "too big to convert" in message or "format requires" in message:
        return ('this token id does not fit: ids go beyond 100,000, so give each four bytes, struct.pack("<I", token) or '
                'token.to_bytes(4, "little")')
    return "see the message above, and the first sequence that is shown"


def _check_count(hashes: Any, length: int, size: int, name: str) -> None:
    if not isinstance(hashes, (list, tuple)):
        raise Wrong(a_kind(hashes), "a list", "return a list with one hash for each full block, the first block's first")
    want = length // size
    if len(hashes) == want:
        return
    cause = "there must be one hash for each full block, in order: len(token_ids) // block_size of them"
    if len(hashes) == want + 1 and length % size:
        cause = "the last tokens do not fill a block: others will follow, so its K/V are not complete and it gets no hash"
        cause += ". (Or is it the root? Only blocks have hashes in the list: the root is not one of them)"
    elif len(hashes) == want - 1 and not length % size:
        cause = "the last block is exactly full, so it has a hash too: look at where your loop ends"
    raise Wrong(f"{len(hashes)} hash{'' if len(hashes) == 1 else 'es'} for {name}", f"{want}", cause)


def _check_kinds(hashes: list[Any]) -> None:
    """Bytes, text or ints; of one width; wide enough."""
    for digest in hashes:
        if hasattr(digest, "digest"):
            raise Wrong("hash objects", "their values", "two hash objects are never equal: take the value, with .digest()")
        if isinstance(digest, bool) or not isinstance(digest, (bytes, str, int)):
            raise Wrong(f"{a_kind(digest)} for a hash", "bytes", "each hash is a value of its own, such as "
                        "hashlib.sha256(...).digest()")
    if not hashes:
        return
    if all(isinstance(digest, int) for digest in hashes):
        if max(digest.bit_length() for digest in hashes) <= 64:
            raise Wrong(f"ints of at most 64 bits, such as {hashes[0]}", "128 bits or more", _WIDE)
        return
    widths = {len(digest) * (8 if isinstance(digest, bytes) else 4) for digest in hashes if not isinstance(digest, int)}
    if len(widths) > 1:
        raise Wrong(f"hashes of {min(widths)} to {max(widths)} bits", "one width", "they are not all equally long: a hash is short and of a "
                    "fixed width, however long the prefix; the parent's hash stands for all that came before")
    if max(widths) < 128:
        raise Wrong(f"hashes of {max(widths)} bits", "128 bits or more", _WIDE)


def _compare(case: HashCase, one: tuple[int, int], other: tuple[int, int], equal: bool) -> None:
    first, second = (_prefix(case, *place) for place in (one, other))
    if equal == (first == second):
        return
    a, b = (f"block {block} of {_name(index)}" for index, block in (one, other))
    shown = (one[0], other[0])
    if not equal:
        raise Wrong(f"different hashes for {a} and {b}", "equal ones: the prefixes are equal", "the hash depends on something else than the "
                    "prefix up to the block's end: what comes later, the length of the sequence, or chance", shown)
    raise Wrong(f"equal hashes for {a} and {b}", "different ones", _why_equal(first, second, case.block_size), shown)


def _why_equal(first: tuple, second: tuple, size: int) -> str:
    (extra, ids), (other_extra, other_ids) = first, second
    own, other = ids[-size:], other_ids[-size:]
    if extra != other_extra and ids != other_ids:
        return ("`extra` and the tokens run together: the end of one can be read as the beginning of the other. Hash `extra` by itself "
                "first, and let the chain start from that")
    if ids == other_ids:
        return "`extra` has no part in the hash: K/V made by another adapter are other K/V. Let the chain start from it"
    if own == other and extra == other_extra:
        before, other_before = ids[:-size][-size:], other_ids[:-size][-size:]
        one_back = before and before == other_before
        return "your hash looks only one block back: use the parent's hash, which stands for everything before it" if one_back else _PARENT
    if "".join(map(str, own)) == "".join(map(str, other)) or "".join(map(str, ids)) == "".join(map(str, other_ids)):
        return "1 and 23 were joined to the same text as 12 and 3: give each token a fixed width (struct.pack) or put something between them"
    if sum(own) == sum(other):
        return "the order of the tokens is lost, or only their sum is hashed: hash the tokens themselves, in order"
    if any(a != b and (a - b) % 256 == 0 for a, b in zip(own, other)):
        return "the upper part of a token id is cut off: one or two bytes are not enough, use four"
    return _PARENT


def _prefix(case: HashCase, index: int, block: int) -> tuple[bytes, tuple[int, ...]]:
    sequence = case.sequences[index]
    return sequence.extra, tuple(sequence.token_ids[:(block + 1) * case.block_size])


def _name(index: int) -> str:
    return chr(ord("a") + index)


def _shown(index: int, prefix: Prefix) -> str:
    return f"{_name(index)} = {prefix.token_ids}" + (f", extra {prefix.extra!r}" if prefix.extra else "")
