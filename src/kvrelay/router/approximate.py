"""ApproximateIndexer: an index for engines that tell nothing about their caches.

Whatever this router has sent to a worker is taken to be cached there for a time to live, which a later use extends.
What it does not know: what the worker really holds, and what other frontends have sent there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from kvrelay.core.clock import Clock
from kvrelay.router.prefix_index import PrefixIndex

MAX_TRACKED_BLOCKS = 1 << 20


class ApproximateIndexer:
    """Memory is bounded by ``max_blocks`` (counted once per placement): the oldest placements go first."""

    def __init__(self, ttl_s: float, clock: Clock, max_blocks: int = MAX_TRACKED_BLOCKS) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._max_blocks = max_blocks
        self._index = PrefixIndex()
        self._placed: deque[tuple[float, str, tuple[int, ...]]] = deque()
        self._uses: dict[str, Counter[int]] = {}
        self._num_tracked = 0

    @property
    def index(self) -> PrefixIndex:
        return self._index

    def find_steps(self, sequence: Sequence[int]) -> list[tuple[int, int]]:
        """``PrefixIndex.find_steps``, over what has not expired."""
        self._expire()
        return self._index.find_steps(sequence)

    def place(self, worker_id: str, sequence: tuple[int, ...]) -> None:
        """A prompt with these sequence hashes was sent to the worker. ``ttl_s`` may be changed at any time."""
        if not sequence:
            return
        self._index.store(worker_id, None, sequence)
        self._uses.setdefault(worker_id, Counter()).update(sequence)
        self._placed.append((self._clock.now(), worker_id, sequence))
        self._num_tracked += len(sequence)
        self._expire()

    def remove_worker(self, worker_id: str) -> None:
        """Forget the worker, and all that was placed there."""
        self._index.remove_worker(worker_id)
        if self._uses.pop(worker_id, None) is not None:
            self._placed = deque(placed for placed in self._placed if placed[1] != worker_id)
            self._num_tracked = sum(len(sequence) for _, _, sequence in self._placed)

    def _expire(self) -> None:
        oldest = self._clock.now() - self.ttl_s
        while self._placed and (self._placed[0][0] < oldest or self._num_tracked > self._max_blocks):
            _, worker_id, sequence = self._placed.popleft()
            self._num_tracked -= len(sequence)
            self._drop(worker_id, sequence)

    def _drop(self, worker_id: str, sequence: tuple[int, ...]) -> None:
        uses = self._uses[worker_id]
        gone = []
        for block in reversed(sequence):
            uses[block] -= 1
            if not uses[block]:
                del uses[block]
                gone.append(block)
        self._index.remove(worker_id, gone)

    def __repr__(self) -> str:
        return f"ApproximateIndexer(placements={len(self._placed)}, blocks={self._num_tracked}, {self._index!r})"
