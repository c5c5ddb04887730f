"""The messages between a worker's end of a rank (``link``) and the rank process (``mover``). Nothing is pickled.

worker ──OpenMemory──> rank          rank ──Answer(RankMemory)──> worker
worker ──Connect, Disconnect, Bar, Admit, OpenGrant, CloseGrant, Check, Close──> rank ──Answer──> worker
worker ──PostPart──> rank            rank ──PartEnded──> worker        once for each
worker ──Watch, Learn──> rank        rank ──Notified, Counted──> worker
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.config import TransferConfig
from kvrelay.core.workers import KvMetadata
from kvrelay.transfer.base import PostEnd
from kvrelay.transfer.p2p.address import P2pAddress
from kvrelay.transfer.stats import P2pCounters
from kvrelay.transfer.values import GrantRef, Int64Array, Pieces, TransferOp

Fence = npt.NDArray[np.float64]
"""One number, in memory that the worker shares with its ranks: the monotonic time until which they may post."""


class RankMemory(msgspec.Struct, frozen=True):
    """What one rank has registered: its part of block b begins at ``begin + b * stride`` bytes of ``num_bytes`` from
    ``address``. ``agent`` is its transport's blob."""

    agent: bytes
    address: int
    num_bytes: int
    device: str = "cpu"
    device_id: int = 0
    begin: int = 0
    stride: int = 0


class OpenMemory(msgspec.Struct, frozen=True, tag=True):
    """Build the transport as ``rank_id`` and register the pool. ``pool_name``: of the shared memory in which a pool of
    the host lies, empty: it cannot be shared. ``address``:
    of transport p2p."""

    rank_id: str
    config: TransferConfig
    pool_name: str
    address: P2pAddress


class Connect(msgspec.Struct, frozen=True, tag=True):
    """``peer``: a worker's entry with what this rank of it has registered."""

    rank_id: str
    peer: KvMetadata


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    rank_id: str


class PostPart(msgspec.Struct, frozen=True, tag=True):
    """A post; the arrays of its pieces as their bytes."""

    handle: int
    op: TransferOp
    rank_id: str
    pieces: tuple[bytes, bytes, bytes]
    notify: bytes | None
    grant: GrantRef | None


class Bar(msgspec.Struct, frozen=True, tag=True):
    worker_id: str


class Admit(msgspec.Struct, frozen=True, tag=True):
    worker_id: str


class Learn(msgspec.Struct, frozen=True, tag=True):
    worker_id: str
    public_key: str


class OpenGrant(msgspec.Struct, frozen=True, tag=True):
    """Rows of (offset, length) in the rank's memory, as their bytes."""

    grant: GrantRef
    loan: int
    worker_id: str
    readable: bytes
    writable: bytes


class CloseGrant(msgspec.Struct, frozen=True, tag=True):
    handoff: str
    loan: int


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Poll for the next ``WATCH_S``: peers may move KV."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """``Transport.check_integrity``."""


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


ToRank = (
    OpenMemory | Connect | Disconnect | PostPart | Bar | Admit | Learn | OpenGrant | CloseGrant | Watch | Check | Close
)


class Answer(msgspec.Struct, frozen=True, tag=True):
    """``error``: the message of what was raised, and ``kind`` the name of its class."""

    error: str | None = None
    kind: str = ""
    is_true: bool = True
    memory: RankMemory | None = None


class PartEnded(PostEnd, frozen=True, tag=True):
    """The end of a PostPart."""


class Notified(msgspec.Struct, frozen=True, tag=True):
    payload: bytes


class Counted(msgspec.Struct, frozen=True, tag=True):
    counters: P2pCounters


FromRank = Answer | PartEnded | Notified | Counted


def packed(pieces: Pieces) -> tuple[bytes, bytes, bytes]:
    """The arrays of some pieces as their bytes."""
    local, remote, lengths = (
        np.ascontiguousarray(array, dtype=np.int64).tobytes()
        for array in (pieces.local_offsets, pieces.remote_offsets, pieces.lengths)
    )
    return local, remote, lengths


def unpacked(data: tuple[bytes, bytes, bytes]) -> Pieces:
    """The reverse of ``packed``."""
    return Pieces(*map(integers, data))


def integers(data: bytes) -> Int64Array:
    """Copied, because compiled kernels take writable arrays."""
    return np.frombuffer(data, dtype=np.int64).copy()
