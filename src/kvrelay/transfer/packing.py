"""Moving many small pieces by way of a buffer: packed here, moved in few large pieces; and a rule when it pays.

    write   pool pieces ──copied──> buffer ──few descriptors──> the peer's blocks, in its own order
    read    the peer's blocks ──few descriptors──> buffer ──copied──> pool pieces

The side that posts rearranges, so the peer has nothing to do: it copies after reads and before writes. Between unequal
layouts a descriptor may be a few KiB, and costs a transport as much time as the bytes themselves. The copy costs
another pass over the bytes. Shared memory has no use for this: its pieces cost tens of nanoseconds each.

``PackingBuffer`` owns the memory, for one transport, and the compiled copy, which a thread of its own loads at the
first use: until then, and while another post has the buffer, pieces move one by one. A post that has failed may still
be under way somewhere, so its buffer is never used again. All else here is pure.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvrelay.errors import FatalError
from kvrelay.transfer.shm.memory import address_of
from kvrelay.transfer.values import Pieces, TransferOp

if TYPE_CHECKING:
    from kvrelay.transfer.shm.transport import CopyPieces


class PackedPieces(msgspec.Struct, frozen=True):
    """``packed``: pieces between the pool (local) and the buffer (remote). ``wire``: pieces between the buffer (local)
    and the peer (remote)."""

    packed: Pieces
    wire: Pieces


def stage(pieces: Pieces) -> PackedPieces:
    """The same bytes by way of a buffer of ``pieces.num_bytes``. Pieces that are adjacent at the peer become one."""
    order = np.argsort(pieces.remote_offsets, kind="stable")
    local, remote, lengths = pieces.local_offsets[order], pieces.remote_offsets[order], pieces.lengths[order]
    ends = np.cumsum(lengths)
    at = ends - lengths
    starts = np.flatnonzero(np.concatenate(([True], remote[1:] != remote[:-1] + lengths[:-1])))
    wire = Pieces(at[starts], remote[starts], np.add.reduceat(lengths, starts))
    return PackedPieces(Pieces(local, at, lengths), wire)


class PackingRule(msgspec.Struct, frozen=True):
    """What a transport's descriptor, a copied piece and a copied byte cost, in seconds."""

    descriptor_s: float
    piece_s: float
    byte_s: float

    def may_pay(self, pieces: Pieces) -> bool:
        """Whether it would pay if one descriptor were left: few large pieces need not be looked at."""
        return self.pays(pieces, 1)

    def pays(self, pieces: Pieces, num_wire_pieces: int) -> bool:
        """Whether the descriptors that are saved cost more than the copy."""
        saved_s = (pieces.num_pieces - num_wire_pieces) * self.descriptor_s
        return saved_s > pieces.num_pieces * self.piece_s + pieces.num_bytes * self.byte_s


NEVER = PackingRule(0.0, 0.0, 0.0)
ALWAYS = PackingRule(1.0, 0.0, 0.0)
"""For measurements: wherever it saves a descriptor."""
NIXL_RULE = PackingRule(descriptor_s=3.0e-6, piece_s=0.03e-6, byte_s=0.2e-9)
"""Fitted to ``python -m benchmarks layouts``, between two processes of a machine with a memcpy of 10 GB/s."""


_log = logging.getLogger(__name__)

BUFFER_BYTES = 32 << 20
"""As large as a post (``thread.MAX_POST_BYTES``); not resident before it is used."""
MAX_LOST = 4
"""So many buffers may be lost with failed posts; after that nothing is packed any more."""


class PackingBuffer:
    """``register(address, num_bytes)`` makes memory known to the transport; it may raise FatalError."""

    def __init__(self, register: Callable[[int, int], None]) -> None:
        self._register = register
        self._memory: mmap.mmap | None = None
        self._lost: list[mmap.mmap] = []
        self._owner: int | None = None
        self._unpack: tuple[int, Pieces] | None = None
        self._copy: CopyPieces | None = None
        self._loading: threading.Thread | None = None
        self.num_staged = 0

    @property
    def is_loaded(self) -> bool:
        """Whether the copy is compiled."""
        return self._copy is not None

    def take(
        self, handle: int, op: TransferOp, pool_address: int, pieces: Pieces, rule: PackingRule
    ) -> tuple[Pieces, int] | None:
        """The pieces between the buffer and the peer, and the buffer's address, if that pays and the buffer is free.

        Before a write the pieces are in the buffer. ``give_back`` must follow.
        """
        if self._owner is not None or pieces.num_bytes > BUFFER_BYTES or not rule.may_pay(pieces):
            return None
        staged = stage(pieces)
        if not rule.pays(pieces, staged.wire.num_pieces) or not self._is_ready():
            return None
        assert self._memory is not None
        assert self._copy is not None
        address, packed = address_of(self._memory), staged.packed
        if op is TransferOp.WRITE:
            self._copy(address, packed.remote_offsets, pool_address, packed.local_offsets, packed.lengths)
        else:
            self._unpack = pool_address, packed
        self._owner = handle
        self.num_staged += 1
        return staged.wire, address

    def give_back(self, handle: int, *, is_complete: bool) -> None:
        """The post has ended. After a read that is complete, its pieces are in the pool."""
        if self._owner != handle:
            return
        unpack, self._unpack, self._owner = self._unpack, None, None
        if not is_complete:
            assert self._memory is not None
            self._lost.append(self._memory)
            self._memory = None
        elif unpack is not None:
            assert self._memory is not None
            assert self._copy is not None
            pool_address, packed = unpack
            address = address_of(self._memory)
            self._copy(pool_address, packed.local_offsets, address, packed.remote_offsets, packed.lengths)

    def close(self) -> None:
        """Wait for the copy to be loaded, if that is under way."""
        if self._loading is not None:
            self._loading.join()

    def _is_ready(self) -> bool:
        if self._loading is None:
            self._loading = threading.Thread(target=self._load, name="staging", daemon=True)
            self._loading.start()
        if self._copy is None or len(self._lost) >= MAX_LOST:
            return False
        if self._memory is None:
            memory = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            try:
                self._register(address_of(memory), BUFFER_BYTES)
            except FatalError as exc:
                _log.warning("small pieces are moved one by one: %s", exc.message)
                self._lost = [memory] * MAX_LOST
                return False
            self._memory = memory
        return True

    def _load(self) -> None:
        from kvrelay.transfer.shm.copying import copy_pieces

        self._copy = copy_pieces
