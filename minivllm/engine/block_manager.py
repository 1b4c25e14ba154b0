"""BlockManager: which block of the KV cache belongs to whom, and which old blocks can be used again.

Owns the free list, the reference counts and the prefix cache. It moves block numbers only: the K/V itself is the worker's.
Built in notebooks 04 (allocation) and 05 (prefix cache). The idea is PagedAttention's (Kwon et al., 2023).
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from minivllm.engine.events import Trace
from minivllm.engine.sequence import Sequence


@dataclass(slots=True)
class Block:
    """One block: how many sequences own it, and the hash it was published under (None: not findable)."""

    block_id: int
    ref_count: int = 0
    hash: bytes | None = None


def root_hash(extra: bytes = b"") -> bytes:
    """Where a hash chain starts. `extra` is whatever else changes K/V for the same tokens, such as a LoRA adapter's name.

    Hashed twice: what goes into the second hash is shorter than any block's encoding, so no `extra` can imitate a block.
    """
    return hashlib.sha256(hashlib.sha256(extra).digest()).digest()


def block_hash(parent: bytes, token_ids: Tokens[int]) -> bytes:
    """The hash of a full block: of its own tokens and, through `parent` (32 bytes), of every token before them.

    K/V depends on the whole prefix, so equal tokens after different prefixes must not be mistaken for each other.
    Both parts have a fixed width, so no two inputs have the same encoding.
    """
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


class BlockManager:
    """Hands out blocks 0..N-1 of `block_size` slots each. `free_blocks` is in least-recently-used order.

    A freed block keeps its hash, so a later prompt may still find it there; it is forgotten only when it is reused.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached_blocks: dict[bytes, int] = {}
        self.trace: Trace | None = None

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    @property
    def num_used_blocks(self) -> int:
        return len(self.blocks) - len(self.free_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The blocks, from the start of `seq`, that the cache already holds. Changes no block."""
        if not self.enable_prefix_caching:
            return []
        self._hash_full_blocks(seq)
        hits = []
        for digest in seq.block_hashes:
            block_id = self.cached_blocks.get(digest)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def can_allocate(self, seq: Sequence, hits: list[int], reserve: int = 0) -> bool:
        """Whether all of `seq` fits while `reserve` blocks stay free. A hit that nobody owns is taken from the free ones too."""
        unowned_hits = sum(self.blocks[block_id].ref_count == 0 for block_id in hits)
        new = self.num_blocks_for(len(seq)) - len(hits)
        return new + unowned_hits + reserve <= self.num_free_blocks

    def allocate(self, seq: Sequence, hits: list[int]) -> None:
        """Give `seq` blocks for all its tokens: first the shared `hits`, then new ones. `can_allocate` must hold."""
        assert not seq.block_table, f"sequence {seq.seq_id} already owns blocks"
        for block_id in hits:
            self._share(block_id)
            seq.block_table.append(block_id)
            if self.trace is not None:
                self.trace.record("share", seq.seq_id, block_id)
        self._extend(seq, self.num_blocks_for(len(seq)) - len(hits))

    def grow(self, seq: Sequence) -> bool:
        """Make room for every token of `seq`. False, with nothing changed, when no block is free."""
        missing = -(-len(seq.token_ids) // self.block_size) - len(seq.block_table)
        if missing <= 0:  # a decode within its last block: the common case
            return True
        if missing > len(self.free_blocks):
            return False
        self._extend(seq, missing)
        return True

    def publish(self, seq: Sequence, start: int) -> None:
        """Make the blocks that were filled since position `start` findable. Only after the step that computed them."""
        if not self.enable_prefix_caching:
            return
        first, last = start // self.block_size, seq.num_computed_tokens // self.block_size
        if first == last:
            return
        self._hash_full_blocks(seq)
        for index in range(first, last):
            block, digest = self.blocks[seq.block_table[index]], seq.block_hashes[index]
            # Simplified: of two blocks with equal contents only the first is findable; vLLM remembers both.
            if block.hash is None and digest not in self.cached_blocks:
                block.hash = digest
                self.cached_blocks[digest] = block.block_id
                if self.trace is not None:
                    self.trace.record("publish", seq.seq_id, block.block_id, hash=digest.hex())

    def free(self, seq: Sequence) -> None:
        """Take all blocks from `seq`, the last one first: the tail of a prefix is worth less than its head, so it is reused first."""
        while seq.block_table:
            block = self.blocks[seq.block_table.pop()]
            assert block.ref_count > 0, f"block {block.block_id} is freed but nobody owns it"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_blocks[block.block_id] = None
            if self.trace is not None:
                self.trace.record("free", seq.seq_id, block.block_id)

    def release_all(self) -> None:
        """Nobody owns anything any more; published blocks stay findable. Right from any state, even half-way through a change."""
        for block in self.blocks:
            block.ref_count = 0
            self.free_blocks.setdefault(block.block_id)
            if block.hash is not None and self.cached_blocks.get(block.hash) != block.block_id:
                block.hash = None
        self.cached_blocks = {block.hash: block.block_id for block in self.blocks if block.hash is not None}
        if self.trace is not None:
            self.trace.record("reset")

    def _extend(self, seq: Sequence, num_blocks: int) -> None:
        for _ in range(num_blocks):
            block_id = self._take_least_recently_used()
            seq.block_table.append(block_id)
            if self.trace is not None:
                self.trace.record("allocate", seq.seq_id, block_id)

    def _take_least_recently_used(self) -> int:
        block_id, _ = self.free_blocks.popitem(last=False)
        block = self.blocks[block_id]
        assert block.ref_count == 0, f"block {block_id} is free but owned"
        if block.hash is not None:
            if self.cached_blocks.get(block.hash) == block_id:
                del self.cached_blocks[block.hash]
            block.hash = None
            if self.trace is not None:
                self.trace.record("evict", block=block_id)
        block.ref_count = 1
        return block_id

    def _share(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_blocks[block_id]
        block.ref_count += 1

    def _hash_full_blocks(self, seq: Sequence) -> None:
        hashes, size = seq.block_hashes, self.block_size
        for index in range(len(hashes), len(seq) // size):
            parent = hashes[-1] if hashes else root_hash(seq.cache_extra)
            hashes.append(block_hash(parent, seq.token_ids[index * size:(index + 1) * size]))
