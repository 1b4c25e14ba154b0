"""Exercises of notebook 05: the hashes of a sequence's blocks, judged by their properties alone, and a test that tells engines apart.

Neither has one right result to compare with: any hash function will do, and any way to observe an engine. So each has a checker of its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

from minivllm.engine.block_manager import block_hash, root_hash
from minivllm.teach.diagnose import Result
from minivllm.teach.exercises import engines_on_trial, hash_cases
from minivllm.teach.exercises.engines_on_trial import Ask


def block_hashes(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    """One hash for each full block, of all tokens up to its end and of `extra`."""
    hashes = [root_hash(extra)]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        hashes.append(block_hash(hashes[-1], token_ids[start:start + block_size]))
    return hashes[1:]


def cache_works(ask: Ask, prompt: list[int]) -> bool:
    """Whether an engine's prefix cache saves work and changes no answer. ask(prompt): one request, from beginning to end."""
    first, second = ask(prompt), ask(prompt)
    return second.token_ids == first.token_ids and second.num_computed_tokens < first.num_computed_tokens


def _sha(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def _full(token_ids: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(token_ids[i:i + size]) for i in range(0, len(token_ids) - size + 1, size)]


def _chain(encode: Callable[[bytes, tuple[int, ...]], bytes]) -> Callable:
    """A chain whose every link is the hash of what `encode(parent, tokens)` makes of both."""
    def function(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
        hashes = [_sha(extra)]
        for block in _full(token_ids, block_size):
            hashes.append(hashlib.sha256(encode(hashes[-1], block)).digest())
        return hashes[1:]
    return function


def _own_tokens(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    return [_sha(extra, block) for block in _full(token_ids, block_size)]


def _with_place(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    return [_sha(extra, index, block) for index, block in enumerate(_full(token_ids, block_size))]


def _one_back(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    blocks = _full(token_ids, block_size)
    return [_sha(extra, blocks[i - 1] if i else None, blocks[i]) for i in range(len(blocks))]


def _rest_too(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    return [_sha(extra, token_ids[:i + block_size]) for i in range(0, len(token_ids), block_size)]


def _one_too_few(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    return block_hashes(token_ids[:-1], block_size, extra)


def _without_extra(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    return block_hashes(token_ids, block_size)


def _extra_joined(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    return [hashlib.sha256(extra + struct.pack(f"<{end}I", *token_ids[:end])).digest()
            for end in range(block_size, len(token_ids) + 1, block_size)]


def _whole_sequence(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    return [_sha(extra, token_ids, i) for i in range(len(token_ids) // block_size)]


def _pythons_hash(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[int]:
    return [hash((len(extra), *token_ids[:end])) for end in range(block_size, len(token_ids) + 1, block_size)]


def _the_prefix_itself(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    return [_sha(extra) + struct.pack(f"<{end}I", *token_ids[:end]) for end in range(block_size, len(token_ids) + 1, block_size)]


def _hash_objects(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[Any]:
    return [hashlib.sha256(digest) for digest in block_hashes(token_ids, block_size, extra)]


def _no_default(token_ids: list[int], block_size: int, extra: bytes) -> list[bytes]:
    return block_hashes(token_ids, block_size, extra)


#: Wrong answers that people give, each with words that its message must hold.
HASH_MISTAKES: list[tuple[Callable, str]] = [
    (_own_tokens, "put the parent's hash in front of the block's tokens"),
    (_with_place, "put the parent's hash in front of the block's tokens"),
    (_one_back, "looks only one block back"),
    (_rest_too, "the last tokens do not fill a block"),
    (_one_too_few, "the last block is exactly full"),
    (lambda ids, size, extra=b"": block_hashes(ids, size, extra)[-1:], "one hash for each full block"),
    (lambda ids, size, extra=b"": block_hashes(ids, size, extra)[-1], "return a list"),
    (_chain(lambda parent, block: parent + "".join(map(str, block)).encode()), "give each token a fixed width"),
    (_chain(lambda parent, block: parent + bytes(token % 256 for token in block)), "cut off"),
    (_chain(lambda parent, block: parent + bytes(block)), "bytes([...]) takes numbers up to 255"),
    (_chain(lambda parent, block: parent + struct.pack(f"<{len(block)}H", *(token % 65536 for token in block))), "cut off"),
    (_chain(lambda parent, block: parent + repr(sorted(block)).encode()), "the order of the tokens is lost"),
    (_chain(lambda parent, block: parent + repr(sum(block)).encode()), "the order of the tokens is lost"),
    (_without_extra, "`extra` has no part in the hash"),
    (_extra_joined, "run together"),
    (_chain(lambda parent, block: parent + struct.pack(f"<{len(block)}H", *block)), "four bytes"),
    (lambda ids, size, extra=b"": [root_hash(extra), *block_hashes(ids, size, extra)], "the root is not one of them"),
    (_whole_sequence, "depends on something else than the prefix"),
    (lambda ids, size, extra=b"": [_sha(digest, object()) for digest in block_hashes(ids, size, extra)], "depends on something else"),
    (_pythons_hash, "64 bits"),
    (lambda ids, size, extra=b"": [digest[:8] for digest in block_hashes(ids, size, extra)], "64 bits"),
    (_the_prefix_itself, "not all equally long"),
    (_hash_objects, ".digest()"),
    (lambda ids, size, extra="": [hashlib.sha256((extra + repr(block)).encode()).digest() for block in _full(ids, size)], "parent's hash"),
    (lambda ids, size, extra="": [hashlib.sha256((extra + repr(ids[:end])).encode()).digest() for end in range(size, len(ids) + 1, size)],
     "text becomes bytes with .encode()"),
    (_no_default, "extra: bytes = b\"\""),
    (lambda ids, size, extra=b"": ids.reverse() or block_hashes(ids, size, extra), "in place"),
    (lambda ids, size, extra=b"": print(end="") if ids else None, "`return` hands it back"),
]

#: Wrong tests of an engine that people write, each with the hint that it gets.
TEST_MISTAKES: list[tuple[Callable[[Ask, list[int]], Any], str]] = [
    (lambda ask, prompt: ask(prompt).token_ids == ask(prompt).token_ids,
     "equal tokens say that nothing is broken, not that anything was saved: an engine without a cache gives them too. Count what is "
     "computed"),
    (lambda ask, prompt: [ask(prompt), ask(prompt)][1].num_cached_tokens > 0,
     "num_cached_tokens is what the engine says of itself. Look at what it did: the tokens that it computed, and the answer"),
    (lambda ask, prompt: _same_and(ask, prompt, lambda first, second: second.num_cached_tokens > 0),
     "the answer is compared, which is good; but the hit is still the engine's own word. Compare num_computed_tokens of both requests"),
    (lambda ask, prompt: ask(prompt).num_computed_tokens > ask(prompt).num_computed_tokens,
     "less work is not enough: an engine may skip tokens and read other blocks. Compare the answers too"),
    (lambda ask, prompt: ask(prompt).num_computed_tokens < len(prompt),
     "one request alone cannot hit: the cache is empty. Ask the same prompt twice, and look at the second"),
    (lambda ask, prompt: _same_and(ask, prompt, lambda first, second: second.num_computed_tokens == 0),
     "no engine passes. Ask the same prompt twice, and for less work the second time, not for none: even a full hit computes the last "
     "token (its logits give the answer's first one), so num_computed_tokens is never 0 and num_cached_tokens never the whole prompt"),
    (lambda ask, prompt: _same_and(ask, prompt, lambda first, second: second.num_computed_tokens == 1),
     "only a prompt that ends at a block's end leaves one token; others leave the tokens of their unfinished block. Ask for less than "
     "before"),
    (lambda ask, prompt: ask(prompt) == ask(prompt),
     "the two answers as a whole are never equal where a cache works, for they say what was found and computed: compare their token_ids"),
    (lambda ask, prompt: not cache_works(ask, prompt), "the answers are the wrong way round: True is for a cache that works"),
]


def _same_and(ask: Ask, prompt: list[int], then: Callable) -> bool:
    first, second = ask(prompt), ask(prompt)
    return first.token_ids == second.token_ids and then(first, second)


CHECKERS: dict[str, Callable[[Any], Result]] = {
    "block_hashes": hash_cases.judge,
    "cache_works": lambda function: engines_on_trial.judge(function, TEST_MISTAKES),
}
