"""The holding area: KV blocks after those of the pool, for KV that has come before the pool has room for it.

    decode side    no room in the pool ──> blocks of the area, lent to the hand-off               REMOTE_PREFILLING
                   the KV has come ──> its first token goes out; it waits for the pool's blocks   KV_HELD
                   the pool has room ──> copied there, and goes on                                LOADING_KV, RUNNING
                   the area is full, and more is to come ──> the latest of these are spilled to host memory
    prefill side   computed, and D is to read it (pull) ──> copied from the pool, whose blocks are free at once

The blocks lie in the memory that peers write to, and no step reads or writes them: a peer, a checksum and a transport
see ids like any others. Lent ones are quarantined as in the pool. A held request takes no block of the pool, not even a
prefix hit, so what is held can keep nobody out.

It owns the area's blocks and the copies. Copies run between two steps, for ``COPY_S`` at most, on the engine's thread:
so a step never sees a block half copied, and none waits for long. Which request is held, admission decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Sized

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.kv_source import Hit
from kvrelay.engine.request import Request
from kvrelay.engine.step import Executor, KvLoad, StepOutput

MAX_POOLS = 4
"""An area larger than so many pools would hold what waits for as many turns of the pool."""
COPY_S = 0.001
"""Of one step. A step in which copies are due takes that much longer, and one piece at most."""
PIECE_BYTES = 1024 * 1024

CopyBlocks = Callable[[Sequence[int], Sequence[int]], None]
"""``Executor.copy_blocks``."""


def num_holding_blocks(num_bytes: int, block_bytes: int, num_pool_blocks: int) -> int:
    """Blocks of an area of ``num_bytes``, MAX_POOLS at most."""
    return min(num_bytes // max(block_bytes, 1), MAX_POOLS * num_pool_blocks)


class _Copy(msgspec.Struct, eq=False):
    """``on_end`` runs when all blocks are copied. Copies run in the order of the queue: what one writes, a later one
    may read."""

    source_ids: Sequence[int]
    target_ids: Sequence[int]
    on_end: Callable[[], None]
    num_copied: int = 0


class Holding:
    """A ``KvSource`` of what it holds. ``blocks``: those of the area; ``spilled``: those in host memory, of a pool that
    is elsewhere. ``on_loaded`` gets a request whose KV is now in its blocks of the pool."""

    def __init__(self, blocks: BlockPool, spilled: BlockPool, block_bytes: int, copy: CopyBlocks, clock: Clock) -> None:
        self.blocks = blocks
        self.spilled = spilled
        self.on_loaded: Callable[[Request], None] = lambda _: None
        self.num_arriving = 0
        """Requests whose KV is still to come."""
        self.num_arriving_blocks = 0
        self.num_held = 0
        """Requests that have been held since start, on either side."""
        self.num_spilled = 0
        """Requests whose KV went to host memory."""
        self.num_full = 0
        """Times that KV found no room here: its request waited, or its blocks stayed in the pool."""
        self.copy = copy
        self._clock = clock
        self._piece = max(PIECE_BYTES // block_bytes, 1)
        self._copies: deque[_Copy] = deque()
        self._num_wanted = 0
        """Blocks of the area for a prefill that waits for them."""
        self.spilling: dict[Request, list[int]] = {}
        """Blocks of the area from which KV is being spilled."""

    def __repr__(self) -> str:
        return f"Holding({self.blocks!r}, {self.num_arriving} to come, {len(self._copies)} copies)"

    # -- decode side --------------------------------------------------------------------------------------------------

    def has_room(self, num_blocks: int) -> bool:
        """For a remote prefill. If not, ``make_room`` may help."""
        has_room = num_blocks <= self.blocks.num_free
        if not has_room and num_blocks <= self.blocks.num_blocks:
            self._num_wanted = max(self._num_wanted, num_blocks)
        return has_room

    @property
    def is_short(self) -> bool:
        """Whether a prefill would begin if some of what is held were spilled."""
        return self._num_wanted > 0 and self.spilled.num_free > 0

    def make_room(self, held: Sequence[Request]) -> None:
        """Spill some of these, the last ones first: the first ones go on soonest."""
        wanted, self._num_wanted = self._num_wanted, 0
        num_free = self.blocks.num_free + sum(map(len, self.spilling.values()))
        for request in reversed(held):
            if num_free >= wanted:
                return
            taken = None if self._is_spilled(request) else self.spilled.allocate(len(request.held_block_ids))
            if taken is not None:
                num_free += len(taken)
                self._spill(request, taken)

    def _is_spilled(self, request: Request) -> bool:
        return request.held_block_ids[0] in self.spilled.block_ids

    def _spill(self, request: Request, block_ids: list[int]) -> None:
        """From now on its KV counts as there: whatever reads it is copied later."""
        source_ids, request.held_block_ids = request.held_block_ids, block_ids
        self.spilling[request] = source_ids
        self.num_spilled += 1
        self._copies.append(_Copy(source_ids, block_ids, lambda: self.blocks.release(self.spilling.pop(request))))

    def expect(self, request: Request) -> None:
        """Blocks for the KV of ``request`` that will come. There is room."""
        block_ids = self.blocks.allocate(self.blocks.blocks_for(request.num_handoff_tokens))
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
        if request.held_block_ids:
            (self.spilled if self._is_spilled(request) else self.blocks).release(request.held_block_ids)
            request.held_block_ids = []

    pending: Sized = ()

    def find(self, request: Request, first_block: int) -> Hit | None:
        num_blocks = len(request.held_block_ids) - first_block
        # Of the last, partly filled block all that there is.
        is_here = request.num_computed_tokens >= request.num_held_tokens
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


def holding_of(executor: Executor, clock: Clock) -> Holding:
    """Over the executor's blocks beside its pool; perhaps there are none."""
    layout, end = executor.kv_layout, executor.num_blocks + executor.num_holding_blocks
    area = BlockPool(
        executor.num_holding_blocks, layout.block_size, enable_prefix_caching=False, first_block=executor.num_blocks
    )
    spilled = BlockPool(executor.num_spill_blocks, layout.block_size, enable_prefix_caching=False, first_block=end)
    return Holding(area, spilled, layout.block_bytes, executor.copy_blocks, clock)
