"""The holding area: KV blocks after those of the pool, for KV that has come before the pool has room for it.

    decode side    no room in the pool ──> blocks of the area, lent to the hand-off               REMOTE_PREFILLING
                   the KV has come ──> its first token goes out; it waits for the pool's blocks   KV_HELD
                   the pool has room ──> copied there, and goes on                                LOADING_KV, RUNNING
    prefill side   computed, and D is to read it (pull) ──> copied from the pool, whose blocks are free at once

The blocks lie in the memory that peers write to, and no step reads or writes them: a peer, a checksum and a transport
see ids like any others. Lent ones are quarantined as in the pool. A held request takes no block of the pool, not even a
prefix hit, so what is held can keep nobody out.

It owns the area's blocks and the copies. Copies run between two steps, for ``COPY_S`` at most, on the engine's thread:
so a step never sees a block half copied, and none waits for long. Which request is held, admission decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.core.clock import Clock
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.kv_source import Hit
from kvrelay.engine.request import Request
from kvrelay.engine.step import KvLoad, StepOutput

MAX_POOLS = 4
"""An area larger than so many pools would hold what waits for as many turns of the pool."""
COPY_S = 0.001
"""Of one step. A step in which copies are due takes that much longer, and one piece at most."""
PIECE_BYTES = 1024 * 1024

CopyBlocks = Callable[[Sequence[int], Sequence[int]], None]
"""``Executor.copy_blocks``."""


def num_holding_blocks(num_bytes: int, block_bytes: int, num_pool_blocks: int) -> int:
    """Blocks of an area of ``num_bytes``, MAX_POOLS at most."""
    return min(num_bytes // block_bytes, MAX_POOLS * num_pool_blocks)


@dataclass(slots=True, eq=False)
class _Copy:
    """``on_end`` runs when all blocks are copied."""

    source_ids: Sequence[int]
    target_ids: Sequence[int]
    on_end: Callable[[], None]
    num_copied: int = 0


class Holding:
    """A ``KvSource`` of what it holds. ``blocks``: those of the area. ``on_loaded`` gets a request whose KV is now in
    its blocks of the pool."""

    def __init__(
        self,
        blocks: BlockPool,
        block_bytes: int,
        copy: CopyBlocks,
        clock: Clock,
    ) -> None:
        self.blocks = blocks
        self.on_loaded: Callable[[Request], None] = lambda _: None
        self.num_arriving = 0
        """Requests whose KV is still to come."""
        self.num_arriving_blocks = 0
        self.num_held = 0
        """Requests that have been held since start, on either side."""
        self.num_full = 0
        """Times that KV found no room here: its request waited, or its blocks stayed in the pool."""
        self.copy = copy
        self._clock = clock
        self._piece = max(PIECE_BYTES // block_bytes, 1)
        self._copies: deque[_Copy] = deque()

    def __repr__(self) -> str:
        return f"Holding({self.blocks!r}, {self.num_arriving} to come, {len(self._copies)} copies)"

    # -- decode side --------------------------------------------------------------------------------------------------

    def has_room(self, num_blocks: int) -> bool:
        return num_blocks <= self.blocks.num_free

    def expect(self, request: Request) -> None:
        """Blocks for all known tokens of ``request``, whose KV will come. There is room."""
        block_ids = self.blocks.allocate(self.blocks.blocks_for(len(request.token_ids)))
        assert block_ids is not None, "as many blocks were free a moment ago"
        request.held_block_ids = block_ids
        self.num_arriving += 1
        self.num_arriving_blocks += len(block_ids)

    def arrived(self, request: Request) -> None:
        """The KV is here, or will not come: nothing more is expected."""
        self.num_arriving -= 1
        self.num_arriving_blocks -= len(request.held_block_ids)

    def release(self, request: Request) -> None:
        """The request needs its blocks of the area no longer. Lent ones stay quarantined."""
        self.blocks.release(request.held_block_ids)
        request.held_block_ids = []

    def find(self, request: Request, first_block: int) -> Hit | None:
        num_blocks = len(request.held_block_ids) - first_block
        is_here = request.num_missing_tokens <= 1  # of the last, partly filled block all that there is
        return Hit(num_blocks, 0.0) if num_blocks > 0 and not is_here else None

    def load(self, request: Request, load: KvLoad, output: StepOutput) -> None:
        source_ids = request.held_block_ids[load.first_block :]
        self._copies.append(_Copy(source_ids, load.block_ids, lambda: self.on_loaded(request)))

    # -- prefill side -------------------------------------------------------------------------------------------------

    def keep(self, request: Request, block_ids: Sequence[int], on_kept: Callable[[], None]) -> bool:
        """Copy these blocks of the pool here; ``on_kept`` follows. False: there is no room."""
        taken = self.blocks.allocate(len(block_ids)) if block_ids else None
        if taken is None:
            self.num_full += 1
            return False
        request.held_block_ids = taken
        self.num_held += 1
        self._copies.append(_Copy(block_ids, taken, on_kept))
        return True

    # -- copies -------------------------------------------------------------------------------------------------------

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def copy_some(self) -> None:
        """Copy for a while, in order."""
        until_s = self._clock.now() + COPY_S
        while self._copies:
            copy = self._copies[0]
            first, end = copy.num_copied, copy.num_copied + self._piece
            self.copy(copy.source_ids[first:end], copy.target_ids[first:end])
            copy.num_copied = end
            if end >= len(copy.source_ids):
                self._copies.popleft()
                copy.on_end()
            if self._clock.now() >= until_s:
                return
