"""Exercises of notebook 00: how many blocks a request takes, and how many bytes a token."""

from __future__ import annotations

import random

from minivllm.teach.exercise import Case, Exercise, Mistake


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens`: the last one may be partly empty."""
    return -(-num_tokens // block_size)


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: int) -> int:
    """Bytes of K and V of one token in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_element


def _block_cases() -> list[Case]:
    rng = random.Random(0)
    shown = [(5, 4, "a part of a block takes a whole one"), (8, 4, "two full blocks"), (1, 16, "fewer tokens than a block holds"),
             (0, 16, "no tokens"), (33, 16, "one token too many for two blocks"),
             (16, 16, "one block, exactly full"), (17, 16, "one token behind a full block")]
    drawn = [(rng.randrange(100, 10_000), rng.choice([7, 16, 256]), "") for _ in range(3)]
    return [Case({"num_tokens": tokens, "block_size": size}, note) for tokens, size, note in shown + drawn]


def _byte_cases() -> list[Case]:
    rng = random.Random(1)
    names = ("num_layers", "num_kv_heads", "head_dim", "bytes_per_element")
    shown = [(1, 1, 8, 4), (3, 2, 16, 2), (30, 3, 64, 4)]
    drawn = [(rng.randrange(2, 80), rng.randrange(2, 16), rng.choice([32, 80, 128]), rng.choice([1, 2, 4])) for _ in range(3)]
    notes = ["the smallest model", "16-bit numbers", "the shape of the embedded model", "", "", ""]
    return [Case(dict(zip(names, values)), note) for values, note in zip(shown + drawn, notes)]


BLOCKS_NEEDED = Exercise("blocks_needed", _block_cases(), blocks_needed, kind="int", mistakes=[
    Mistake(lambda n, s: n // s, "// rounds down, so the tokens of the last, partly filled block have no place: round up instead"),
    Mistake(lambda n, s: n // s + 1, "`// ... + 1` adds a block even when the last one is exactly full: 8 tokens in blocks of 4 need 2, "
                                     "not 3"),
    Mistake(lambda n, s: n / s, "/ gives a fraction of a block, but only whole blocks are handed out: round up to an int"),
    Mistake(lambda n, s: round(n / s), "round() goes to the nearest whole number, so a block less than half full is lost: always round up"),
    Mistake(lambda n, s: round(n / s + 0.5), "round(n / b + 0.5) does not always round up: Python rounds a half to the even number, so 16 "
            "tokens in blocks of 16 give round(1.5) = 2. Use whole numbers, or math.ceil"),
    Mistake(lambda n, s: blocks_needed(n, 16), "the block size is fixed at 16 here: use the argument block_size, it differs from call to "
            "call"),
    Mistake(lambda n, s: blocks_needed(s, n), "the arguments are swapped: divide the number of tokens by the block size",
            everywhere=True),
    Mistake(lambda n, s: float(blocks_needed(n, s)), "the number is right but a float: return an int, such as by // or math.ceil"),
    Mistake(lambda n, s: max(1, blocks_needed(n, s)), "a sequence of 0 tokens needs 0 blocks: nothing is reserved in advance"),
    Mistake(lambda n, s: n * s, "blocks hold tokens: divide the number of tokens by the block size, do not multiply"),
    Mistake(lambda n, s: blocks_needed(n, s) * s, "that is the number of slots in those blocks: the question is how many blocks"),
    Mistake(lambda n, s: n // s + n % s, "the remainder n % s counts tokens, not blocks: whatever it is, it adds one block, or none when "
            "it is 0"),
])

KV_BYTES_PER_TOKEN = Exercise("kv_bytes_per_token", _byte_cases(), kv_bytes_per_token, kind="int", mistakes=[
    Mistake(lambda n, k, d, b: n * k * d * b, "half of it is missing: a token has a key and a value, so everything counts twice"),
    Mistake(lambda n, k, d, b: 2 * k * d * b, "that is one layer: each of the num_layers layers keeps its own K and V"),
    Mistake(lambda n, k, d, b: 2 * n * k * d * b * 8, "8 times too much: that is bits, and bytes_per_element is in bytes already"),
    Mistake(lambda n, k, d, b: 2 * n * d * b, "that is one kv head: each of the num_kv_heads heads has a key and a value of head_dim "
            "numbers"),
    Mistake(lambda n, k, d, b: 2 * n * k * b, "head_dim is missing: one head's key is a vector of head_dim numbers"),
    Mistake(lambda n, k, d, b: 2 * n * k * d, "that is how many numbers there are: each of them takes bytes_per_element bytes"),
    Mistake(lambda n, k, d, b: 2 * n * k * d * 2, "an element is taken to be 2 bytes long: use bytes_per_element, which is 4 for float32"),
    Mistake(lambda n, k, d, b: 2 * n * k * d * 4, "an element is taken to be 4 bytes long: use bytes_per_element, which is 2 for 16-bit "
            "numbers"),
    Mistake(lambda n, k, d, b: 2 * n * k * d * b * 16, "16 times too much: that is a block of 16 tokens, the question is one token"),
    Mistake(lambda n, k, d, b: 2 * n * n * k * d * b, "num_layers counts twice here: it belongs into the product once"),
    Mistake(lambda n, k, d, b: 2 * n * k * d * d * b, "head_dim counts twice here: a head's key is one vector of head_dim numbers, not a "
            "matrix"),
    Mistake(lambda n, k, d, b: n + k + d + b, "that is a sum: multiply the four numbers, and count key and value (times 2)"),
    Mistake(lambda n, k, d, b: 2 * (n + k + d + b), "that is twice a sum: all four numbers belong into one product"),
    Mistake(lambda n, k, d, b: 2 * n * (k + d) * b, "num_kv_heads and head_dim are added here: each head has head_dim numbers, so multiply "
            "them"),
    Mistake(lambda n, k, d, b: 2 * (n + k) * d * b, "num_layers and num_kv_heads are added here: each layer has num_kv_heads heads, so "
            "multiply them"),
    Mistake(lambda n, k, d, b: 2 * (n + k + d) * b, "layers, heads and numbers in a head lie inside each other: multiply them, do not add "
            "them"),
    Mistake(lambda n, k, d, b: 2 * n * k * d * b / 1024, "divided by 1024 it is KiB: return bytes, as an int"),
    Mistake(lambda n, k, d, b: 2 * n * k * d * b / 8, "an element's size is in bytes already: do not divide by 8"),
    Mistake(lambda n, k, d, b: float(2 * n * k * d * b), "the number is right but a float: return an int"),
    Mistake(lambda n, k, d, b: 2 * n * k * k * d * b, "num_kv_heads counts twice here: it belongs into the product once"),
])

EXERCISES = [BLOCKS_NEEDED, KV_BYTES_PER_TOKEN]
