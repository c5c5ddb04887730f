"""The buddy allocator: whatever is taken and given back, in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import FatalError, IntegrityError
from kvrelay.transfer.p2p.buddy import BuddyAllocator

MIN_BLOCK = 16
sizes = st.integers(min_value=1, max_value=20 * MIN_BLOCK)
steps = st.lists(st.one_of(sizes, st.integers(min_value=-50, max_value=-1)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(capacity=st.integers(min_value=0, max_value=70 * MIN_BLOCK), program=steps)
def test_blocks_never_overlap_and_all_merge_when_everything_is_free(capacity: int, program: list[int]) -> None:
    """A positive step allocates so many bytes; a negative one frees one of the blocks that are out."""
    allocator = BuddyAllocator(capacity, MIN_BLOCK)
    empty = repr(allocator)
    largest = allocator.largest_free_bytes
    taken: dict[int, int] = {}
    for step in program:
        if step < 0:
            if taken:
                offset = sorted(taken)[step % len(taken)]
                del taken[offset]
                allocator.free(offset)
        else:
            possible = allocator.largest_free_bytes
            offset = allocator.allocate(step)
            assert (offset is None) == (step > possible)
            if offset is not None:
                assert offset % MIN_BLOCK == 0
                assert offset + step <= capacity
                assert all(offset + step <= other or other + length <= offset for other, length in taken.items())
                taken[offset] = step
        allocator.check_integrity()
        assert allocator.num_taken == len(taken)
        assert allocator.used_bytes >= sum(taken.values())
    for offset in taken:
        allocator.free(offset)
    allocator.check_integrity()
    assert repr(allocator) == empty
    assert allocator.largest_free_bytes == largest == allocator.largest_block_bytes


def test_free_blocks_that_are_no_buddies_are_no_larger_block() -> None:
    allocator = BuddyAllocator(8 * MIN_BLOCK, MIN_BLOCK)
    offsets = [allocator.allocate(MIN_BLOCK) for _ in range(8)]
    assert offsets == [index * MIN_BLOCK for index in range(8)]
    assert allocator.allocate(1) is None
    for offset in (0, 2 * MIN_BLOCK, 4 * MIN_BLOCK, 6 * MIN_BLOCK):
        allocator.free(offset)
    assert allocator.used_bytes == 4 * MIN_BLOCK
    assert allocator.largest_free_bytes == MIN_BLOCK


def test_a_capacity_that_is_no_power_of_two_is_used_to_its_last_whole_block() -> None:
    allocator = BuddyAllocator(7 * MIN_BLOCK + 5, MIN_BLOCK)
    assert allocator.capacity_bytes == 7 * MIN_BLOCK
    assert allocator.largest_block_bytes == 4 * MIN_BLOCK
    assert sorted(allocator.allocate(size * MIN_BLOCK) or 0 for size in (4, 2, 1)) == [0, 4 * MIN_BLOCK, 6 * MIN_BLOCK]
    assert allocator.used_bytes == allocator.capacity_bytes


@pytest.mark.parametrize("capacity", [0, 1, MIN_BLOCK - 1])
def test_less_than_a_block_of_memory_is_none(capacity: int) -> None:
    allocator = BuddyAllocator(capacity, MIN_BLOCK)
    assert allocator.allocate(1) is None
    allocator.check_integrity()


def test_memory_that_is_not_taken_cannot_be_freed() -> None:
    allocator = BuddyAllocator(4 * MIN_BLOCK, MIN_BLOCK)
    offset = allocator.allocate(2 * MIN_BLOCK)
    assert offset == 0
    for wrong in (MIN_BLOCK, 2 * MIN_BLOCK, -MIN_BLOCK):
        with pytest.raises(FatalError):
            allocator.free(wrong)
    allocator.free(0)
    with pytest.raises(FatalError):
        allocator.free(0)


def test_integrity_notices_lost_and_doubled_memory() -> None:
    for damage in ({}, {0: MIN_BLOCK}, {0: 2 * MIN_BLOCK}):
        allocator = BuddyAllocator(4 * MIN_BLOCK, MIN_BLOCK)
        allocator.allocate(2 * MIN_BLOCK)
        allocator.allocate(MIN_BLOCK)
        allocator.check_integrity()
        allocator._taken = damage  # no public call does it
        with pytest.raises(IntegrityError):
            allocator.check_integrity()
