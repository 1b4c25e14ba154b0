"""BlockManager: allocation, sharing, the order of eviction, the prefix cache."""

import struct

import pytest

from minivllm.engine.block_manager import BlockManager, block_hash, root_hash
from minivllm.engine.invariants import InvariantError, check_blocks
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams


def sequence(*tokens, extra=b""):
    return Sequence(0, list(tokens), SamplingParams(), cache_extra=extra)


def allocate(manager, *tokens, extra=b"", computed=True):
    """A sequence with blocks for all its tokens; computed ones are published."""
    seq = sequence(*tokens, extra=extra)
    hits = manager.find_prefix(seq)
    manager.allocate(seq, hits)
    if computed:
        start, seq.num_computed_tokens = len(hits) * manager.block_size, len(seq)
        manager.publish(seq, start)
    return seq


def free_order(manager):
    return list(manager.free_blocks)


# Allocation and the free list.

def test_blocks_are_handed_out_in_order():
    manager = BlockManager(4, 2)
    assert allocate(manager, 1, 2, 3).block_table == [0, 1]
    assert (free_order(manager), manager.num_free_blocks, manager.num_used_blocks) == ([2, 3], 2, 2)


@pytest.mark.parametrize("tokens, blocks", [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_partly_filled_block_counts_whole(tokens, blocks):
    assert BlockManager(4, 2).num_blocks_for(tokens) == blocks


def test_freed_blocks_queue_up_behind_those_that_were_free_before():
    manager = BlockManager(4, 2)
    manager.free(allocate(manager, 1, 2, 3))
    assert free_order(manager)[:2] == [2, 3]


def test_the_tail_of_a_sequence_is_freed_first():
    manager = BlockManager(3, 2)
    manager.free(allocate(manager, 1, 2, 3, 4, 5))
    assert free_order(manager) == [2, 1, 0]


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    manager = BlockManager(3, 2)
    manager.free(allocate(manager, 1, 2, 3, 4, 1, 2))
    allocate(manager, 9)
    assert manager.find_prefix(sequence(1, 2, 3, 4, 1, 2)) == [0, 1]


def test_least_recently_freed_is_reused_first():
    manager = BlockManager(2, 2)
    older, newer = allocate(manager, 1, 2), allocate(manager, 3, 4)
    manager.free(older)
    manager.free(newer)
    allocate(manager, 5)
    assert manager.find_prefix(sequence(1, 2)) == []
    assert manager.find_prefix(sequence(3, 4)) == [1]


def test_a_hit_makes_a_block_the_most_recently_used():
    manager = BlockManager(3, 2)
    for tokens in ((1, 2), (3, 4), (5, 6), (1, 2)):
        manager.free(allocate(manager, *tokens))
    assert free_order(manager) == [1, 2, 0]


def test_grow_takes_a_block_at_the_boundary_only():
    manager = BlockManager(3, 2)
    seq = allocate(manager, 1, 2, 3)
    seq.token_ids.append(4)
    assert manager.grow(seq) and len(seq.block_table) == 2
    seq.token_ids.append(5)
    assert manager.grow(seq) and len(seq.block_table) == 3


def test_grow_without_a_free_block_changes_nothing():
    manager = BlockManager(3, 1)
    seq, _ = allocate(manager, 1), allocate(manager, 7)
    seq.token_ids += [2, 3]
    assert not manager.grow(seq)
    assert seq.block_table == [0] and free_order(manager) == [2]


def test_freeing_twice_is_harmless_and_a_block_nobody_owns_is_refused():
    manager = BlockManager(2, 2)
    seq = allocate(manager, 1)
    manager.free(seq)
    manager.free(seq)
    assert free_order(manager) == [1, 0]
    seq.block_table = [0]
    with pytest.raises(AssertionError, match="block 0 is freed but nobody owns it"):
        manager.free(seq)


def test_a_sequence_with_blocks_is_not_allocated_again():
    manager = BlockManager(4, 2)
    seq = allocate(manager, 1)
    with pytest.raises(AssertionError, match="already owns blocks"):
        manager.allocate(seq, [])


# can_allocate.

def test_a_sequence_that_fills_the_pool_can_be_allocated():
    assert BlockManager(3, 2).can_allocate(sequence(1, 2, 3, 4, 5), [])
    assert not BlockManager(2, 2).can_allocate(sequence(1, 2, 3, 4, 5), [])


def test_can_allocate_counts_every_token_and_the_reserve():
    manager = BlockManager(4, 2)
    seq = sequence(1, 2, 3, 4, 5)
    assert manager.can_allocate(seq, [], reserve=1)
    assert not manager.can_allocate(seq, [], reserve=2)


def test_a_hit_that_nobody_owns_is_not_free_as_well():
    manager = BlockManager(4, 2)
    manager.free(allocate(manager, 1, 2, 3, 4))
    seq = sequence(1, 2, 3, 4, 5)
    hits = manager.find_prefix(seq)
    assert hits == [0, 1]
    assert manager.can_allocate(seq, hits, reserve=1)
    assert not manager.can_allocate(seq, hits, reserve=2)


def test_a_hit_that_somebody_owns_costs_nothing():
    manager = BlockManager(4, 2)
    allocate(manager, 1, 2, 3, 4)
    seq = sequence(1, 2, 3, 4, 5)
    hits = manager.find_prefix(seq)
    assert manager.can_allocate(seq, hits, reserve=1)
    assert not manager.can_allocate(seq, hits, reserve=2)


# The prefix cache.

def test_only_full_blocks_are_found():
    manager = BlockManager(4, 2)
    allocate(manager, 1, 2, 3)
    assert manager.find_prefix(sequence(1, 2, 3, 4)) == [0]
    assert manager.find_prefix(sequence(1)) == []


def test_nothing_is_found_before_it_is_computed():
    manager = BlockManager(4, 2)
    allocate(manager, 1, 2, computed=False)
    assert manager.find_prefix(sequence(1, 2)) == []


def test_a_chunk_publishes_the_blocks_that_it_filled():
    manager = BlockManager(4, 2)
    seq = allocate(manager, 1, 2, 3, 4, 5, computed=False)
    seq.num_computed_tokens = 3
    manager.publish(seq, 0)
    assert manager.find_prefix(sequence(1, 2, 3, 4, 5)) == [0]
    seq.num_computed_tokens = 5
    manager.publish(seq, 3)
    assert manager.find_prefix(sequence(1, 2, 3, 4, 5)) == [0, 1]


def test_generated_tokens_are_found_too():
    manager = BlockManager(4, 2)
    seq = allocate(manager, 1)
    seq.token_ids.append(2)
    seq.num_computed_tokens = 2
    manager.publish(seq, 1)
    assert manager.find_prefix(sequence(1, 2, 3)) == [0]


def test_a_shared_block_is_owned_by_both_and_free_after_the_last():
    manager = BlockManager(4, 2)
    first, second = allocate(manager, 1, 2, 3), allocate(manager, 1, 2, 4)
    assert (first.block_table, second.block_table) == ([0, 1], [0, 2])
    assert manager.blocks[0].ref_count == 2
    manager.free(first)
    assert 0 not in manager.free_blocks
    manager.free(second)
    assert 0 in manager.free_blocks
    check_blocks(manager, [first, second])


def test_a_full_hit_takes_no_new_block():
    manager = BlockManager(2, 2)
    first, second = allocate(manager, 1, 2, 3, 4), allocate(manager, 1, 2, 3, 4)
    assert first.block_table == second.block_table == [0, 1]


def test_a_freed_block_stays_findable_until_it_is_reused():
    manager = BlockManager(1, 2)
    manager.free(allocate(manager, 1, 2))
    assert manager.find_prefix(sequence(1, 2)) == [0]
    manager.free(allocate(manager, 3))
    assert manager.find_prefix(sequence(1, 2)) == []
    assert manager.cached_blocks == {} and manager.blocks[0].hash is None


def test_a_reused_block_drops_its_entry_only_if_that_still_points_to_it():
    manager = BlockManager(2, 2)
    manager.free(allocate(manager, 1, 2))
    [digest] = manager.cached_blocks
    manager.cached_blocks[digest] = 1  # taken over by another block
    manager.free_blocks.move_to_end(0, last=False)
    assert allocate(manager, 9).block_table == [0]
    assert manager.cached_blocks == {digest: 1} and manager.blocks[0].hash is None


def test_of_two_equal_blocks_the_first_is_findable_and_neither_is_lost():
    manager = BlockManager(2, 2)
    first, second = allocate(manager, 1, 2, computed=False), allocate(manager, 1, 2, computed=False)
    for seq in (first, second):
        seq.num_computed_tokens = 2
        manager.publish(seq, 0)
    assert manager.find_prefix(sequence(1, 2)) == [0]
    manager.free(second)
    assert manager.find_prefix(sequence(1, 2)) == [0]
    check_blocks(manager, [first])


def test_a_hit_ends_at_the_first_block_that_is_missing():
    manager = BlockManager(3, 1)
    manager.free(allocate(manager, 1, 2, 3))
    manager.free_blocks.move_to_end(1, last=False)  # the middle one goes first
    allocate(manager, 9)
    assert manager.find_prefix(sequence(1, 2, 3)) == [0]


def test_equal_tokens_after_another_prefix_are_no_hit():
    manager = BlockManager(4, 2)
    allocate(manager, 1, 2, 3, 4)
    assert manager.find_prefix(sequence(3, 4)) == []
    assert manager.find_prefix(sequence(9, 9, 3, 4)) == []


def test_equal_prompts_with_another_extra_are_no_hit():
    manager = BlockManager(4, 2)
    allocate(manager, 1, 2, extra=b"adapter")
    assert manager.find_prefix(sequence(1, 2)) == []
    assert manager.find_prefix(sequence(1, 2, extra=b"another")) == []
    assert manager.find_prefix(sequence(1, 2, extra=b"adapter")) == [0]


def test_find_prefix_changes_no_block():
    manager = BlockManager(3, 2)
    manager.free(allocate(manager, 1, 2))
    before = free_order(manager), [block.ref_count for block in manager.blocks], dict(manager.cached_blocks)
    manager.find_prefix(sequence(1, 2, 3))
    assert before == (free_order(manager), [block.ref_count for block in manager.blocks], manager.cached_blocks)


def test_without_prefix_caching_nothing_is_published_or_found():
    manager = BlockManager(4, 2, enable_prefix_caching=False)
    seq = allocate(manager, 1, 2, 3, 4)
    assert manager.find_prefix(sequence(1, 2)) == [] and manager.cached_blocks == {} and seq.block_hashes == []


def test_hashes_are_256_bits_and_of_the_whole_prefix():
    one, other = root_hash(), root_hash(b"adapter")
    digests = [one, other, block_hash(one, [1, 2]), block_hash(other, [1, 2]), block_hash(block_hash(one, [1, 2]), [1, 2]), block_hash(one, [2, 1]),
               block_hash(one, [258]), block_hash(one, [1, 2, 0])]
    assert len(set(digests)) == len(digests) and all(len(digest) == 32 for digest in digests)


def test_no_extra_looks_like_the_hash_of_a_block():
    """Else an adapter of that name would share K/V with the base model."""
    assert root_hash(root_hash() + struct.pack("<2I", 1, 2)) != block_hash(root_hash(), [1, 2])


# release_all.

def all_free(manager):
    check_blocks(manager, [])
    return manager.num_free_blocks == len(manager.blocks)


def test_release_all_frees_everything_and_keeps_the_cache():
    manager = BlockManager(4, 2)
    allocate(manager, 1, 2, 3)
    allocate(manager, 1, 2, 4)
    manager.release_all()
    assert all_free(manager) and manager.find_prefix(sequence(1, 2)) == [0]


def broken_while_taking(manager):
    manager.free_blocks.popitem(last=False)


def broken_while_dropping_an_entry(manager):
    manager.free_blocks.pop(0)
    manager.cached_blocks.clear()


def broken_while_publishing(manager):
    manager.blocks[3].hash = b"published by nobody"


def broken_while_taking_over_an_entry(manager):
    manager.blocks[3].hash = manager.blocks[0].hash


def broken_while_forgetting_a_hash(manager):
    manager.cached_blocks[b"an entry of nobody"] = 3


def broken_while_freeing(manager):
    manager.blocks[1].ref_count += 3


def broken_while_sharing(manager):
    manager.free_blocks.pop(0, None)
    manager.blocks[0].ref_count = 0


@pytest.mark.parametrize("breaks", [broken_while_taking, broken_while_dropping_an_entry, broken_while_publishing, broken_while_taking_over_an_entry,
                                    broken_while_forgetting_a_hash, broken_while_freeing, broken_while_sharing])
def test_release_all_mends_a_change_that_was_cut_off(breaks):
    manager = BlockManager(4, 2)
    manager.free(allocate(manager, 1, 2))
    owner = allocate(manager, 5, 6, 7)
    breaks(manager)
    with pytest.raises(InvariantError):
        check_blocks(manager, [owner])
    manager.release_all()
    assert all_free(manager)
    assert manager.find_prefix(sequence(1, 2)) in ([0], [])
