"""WorkerBits: a bit for each worker of an index, so that a set of workers is one integer.

This module owns the assignment of bits to workers, and knows which bits are free. The bit of a worker that leaves is
*retired*: it no longer counts, but old masks still contain it. So it stays taken until the pass over the segments has
cleared it everywhere and calls ``give_away``. This module does not know where the masks are.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.router.overlap import WorkerGroup

MAX_CACHED_MASKS = 4096


class WorkerBits:
    """``alive``: the bits of all present workers. ``retired``: the bits of departed workers that masks may contain."""

    def __init__(self) -> None:
        self.alive = 0
        self.retired = 0
        self._bit_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._free: list[int] = []
        self._num_bits = 0
        self._group_of_mask: dict[int, WorkerGroup] = {}

    def __len__(self) -> int:
        return len(self._bit_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._bit_of)

    @property
    def num_bits(self) -> int:
        """Number of bits: those of present workers, retired ones and free ones."""
        return self._num_bits

    def bit(self, worker_id: str) -> int:
        """0 for a worker without a bit."""
        return self._bit_of.get(worker_id, 0)

    def add(self, worker_id: str) -> int:
        """Give a bit to a worker that has none yet."""
        if not self._free:
            self._free.append(1 << self._num_bits)
            self._num_bits += 1
        bit = self._free.pop()
        self._bit_of[worker_id] = bit
        self._name_of[bit] = worker_id
        self.alive |= bit
        return bit

    def retire(self, worker_id: str) -> int:
        """Retire the bit of a departed worker and return it; 0 if the worker had none."""
        bit = self._bit_of.pop(worker_id, 0)
        self.alive &= ~bit
        self.retired |= bit
        return bit

    def give_away(self, mask: int) -> None:
        """Free these retired bits, which no mask contains any more: new workers may get them."""
        for bit in _single_bits(mask):
            del self._name_of[bit]
            self._free.append(bit)
        self._group_of_mask.clear()
        self.retired &= ~mask

    def group(self, mask: int) -> WorkerGroup:
        """The workers of a mask. The same masks come again and again, so the groups are cached."""
        found = self._group_of_mask.get(mask)
        if found is None:
            if len(self._group_of_mask) >= MAX_CACHED_MASKS:
                self._group_of_mask.clear()
            found = self._group_of_mask[mask] = WorkerGroup(tuple(self._name_of[bit] for bit in _single_bits(mask)))
        return found


def _single_bits(mask: int) -> Iterator[int]:
    """Lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
