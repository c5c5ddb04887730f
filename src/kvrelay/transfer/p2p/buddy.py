"""A buddy allocator: which bytes of a piece of memory are taken. Pure: it hands out offsets and touches no memory.

    capacity 14 blocks of min_block   | order 3: 8 blocks | order 2: 4 | order 1: 2 |     roots, largest first
    split                             an order-3 block becomes two order-2 buddies, and so on down to the wanted order
    merge                             a freed block joins its buddy while that one is free, up to its root

A root of order k begins at a multiple of its own size, because larger roots precede it. So the buddy of the block at
``offset`` with ``size`` bytes is at ``offset ^ size``, and lies in the same root unless the block is the root itself.
"""

from __future__ import annotations

from bisect import bisect_right

from kvrelay.errors import FatalError, IntegrityError


class BuddyAllocator:
    """Allocates from ``num_bytes``, in blocks of ``min_block_bytes`` times a power of two. Not thread-safe.

    What ``num_bytes`` has beyond a multiple of ``min_block_bytes`` is never used, so a capacity of 0 is possible.
    """

    def __init__(self, num_bytes: int, min_block_bytes: int = 4096) -> None:
        assert min_block_bytes > 0
        assert min_block_bytes & (min_block_bytes - 1) == 0, "min_block_bytes is a power of two"
        self.min_block_bytes = min_block_bytes
        self.capacity_bytes = num_bytes // min_block_bytes * min_block_bytes
        self._roots: list[int] = []
        """Offsets of the roots, ascending."""
        self._root_sizes: list[int] = []
        self._free: dict[int, set[int]] = {}
        """Offsets of free blocks by size."""
        self._taken: dict[int, int] = {}
        """Size of each allocated block by offset."""
        offset = 0
        while offset < self.capacity_bytes:
            size = 1 << (self.capacity_bytes - offset).bit_length() - 1
            self._roots.append(offset)
            self._root_sizes.append(size)
            self._free.setdefault(size, set()).add(offset)
            offset += size

    def __repr__(self) -> str:
        taken = f"{self.used_bytes} of {self.capacity_bytes} bytes taken by {self.num_taken}"
        return f"BuddyAllocator({taken}, largest free {self.largest_free_bytes})"

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of at least ``num_bytes`` adjacent bytes; None if no free block is large enough."""
        if num_bytes <= 0:
            return None
        wanted = max(self.min_block_bytes, 1 << (num_bytes - 1).bit_length())
        size = min((size for size, offsets in self._free.items() if size >= wanted and offsets), default=None)
        if size is None:
            return None
        # The lowest address: what is used stays together.
        offset = min(self._free[size])
        self._free[size].remove(offset)
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(offset + size)
        self._taken[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Give back what ``allocate`` returned. Raises FatalError for anything else: memory would be used twice."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise FatalError(f"no block begins at offset {offset}, or it was freed already")
        limit = self._root_sizes[bisect_right(self._roots, offset) - 1]
        while size < limit:
            buddy = offset ^ size
            if buddy not in self._free.get(size, ()):
                break
            self._free[size].remove(buddy)
            offset = min(offset, buddy)
            size *= 2
        self._free.setdefault(size, set()).add(offset)

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated blocks, rounding included."""
        return sum(self._taken.values())

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that would succeed now."""
        return max((size for size, offsets in self._free.items() if offsets), default=0)

    @property
    def largest_block_bytes(self) -> int:
        """The largest request that succeeds when everything is free."""
        return max(self._root_sizes, default=0)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every byte is free or taken, none twice, and free buddies are merged."""
        blocks = [(offset, size) for size, offsets in self._free.items() for offset in offsets]
        if any((offset ^ size) in self._free[size] and not self._is_root(offset, size) for offset, size in blocks):
            raise IntegrityError("two free buddies are not merged")
        end = 0
        for offset, size in sorted([*blocks, *self._taken.items()]):
            if offset != end:
                raise IntegrityError(f"the bytes from {min(offset, end)} to {max(offset, end)} are lost, or used twice")
            end = offset + size
        if end != self.capacity_bytes:
            raise IntegrityError(f"the bytes from {end} to {self.capacity_bytes} are lost")

    def _is_root(self, offset: int, size: int) -> bool:
        index = bisect_right(self._roots, offset) - 1
        return self._roots[index] == offset and self._root_sizes[index] == size
