"""What must be true of the pool and of the scheduler after every operation. Tests and notebooks call it; the engine does not.

Every broken invariant raises InvariantError, whose message starts with the invariant's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence, SequenceStatus


class InvariantError(AssertionError):
    """`name` says which invariant is broken."""

    def __init__(self, name: str, detail: str):
        super().__init__(f"{name}: {detail}")
        self.name = name


def _require(condition: bool, name: str, detail: str) -> None:
    if not condition:
        raise InvariantError(name, detail)


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """The pool's own invariants, against the block tables of all `sequences`."""
    owners = Counter(block_id for seq in sequences for block_id in seq.block_table)
    free = manager.free_blocks
    for block in manager.blocks:
        where = f"block {block.block_id} (ref_count {block.ref_count}, {'free' if block.block_id in free else 'not free'})"
        _require(not (block.block_id in free and block.ref_count), "free xor referenced", where)
        _require(block.ref_count == owners[block.block_id], "ref_count = owners", f"{where} has {owners[block.block_id]} owners")
        if block.hash is not None:
            _require(manager.cached_blocks.get(block.hash) == block.block_id, "hash entry = block", f"{where} is hashed, its entry is not")
    used = sum(block.ref_count > 0 for block in manager.blocks)
    _require(len(free) + used == len(manager.blocks), "free + used = N", f"{len(free)} + {used} != {len(manager.blocks)}")
    for digest, block_id in manager.cached_blocks.items():
        _require(manager.blocks[block_id].hash == digest, "hash entry = block", f"an entry points at block {block_id}, which is not it")


def check_scheduler(scheduler: Scheduler) -> None:
    """The scheduler's invariants and the pool's."""
    running, waiting = scheduler.running, list(scheduler.waiting)
    check_blocks(scheduler.blocks, scheduler.sequences.values())
    _require(len(running) <= scheduler.max_num_seqs, "running <= max_num_seqs", f"{len(running)} run, {scheduler.max_num_seqs} may")
    listed = sorted(seq.seq_id for seq in [*running, *waiting])
    _require(listed == sorted(scheduler.sequences), "each sequence in one list", f"{listed} listed, {sorted(scheduler.sequences)} known")
    for seq in waiting:
        _require(seq.status is SequenceStatus.WAITING and not seq.block_table, "waiting owns nothing", f"sequence {seq.seq_id}: {seq.block_table}")
    for seq in running:
        _require(seq.status is SequenceStatus.RUNNING, "running is marked so", f"sequence {seq.seq_id} is {seq.status}")
        room = len(seq.block_table) * scheduler.blocks.block_size
        _require(seq.num_computed_tokens < len(seq), "one token to compute", f"sequence {seq.seq_id} has nothing left to compute")
        _require(seq.num_computed_tokens <= room, "computed tokens have blocks", f"sequence {seq.seq_id}: {seq.num_computed_tokens} in {room} slots")
