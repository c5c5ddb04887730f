"""The messages between a worker's end of a rank (``link``) and the rank process (``mover``). Nothing is pickled.

worker ──OpenMemory──> rank          rank ──Answer(RankMemory)──> worker
worker ──Connect, Disconnect, Call, MemoryWindow──> rank ──Answer──> worker
worker ──Post──> rank                rank ──PartEnded──> worker        once for each
worker ──Watch, Learn──> rank        rank ──Notified, Counted──> worker
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.config import TransferConfig
from kvrelay.core.window import MemoryWindow
from kvrelay.core.workers import KvMetadata
from kvrelay.transfer.base import Post, PostEnd
from kvrelay.transfer.p2p.address import P2pAddress
from kvrelay.transfer.stats import P2pCounters

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


class Call(msgspec.Struct, frozen=True, tag=True):
    """A method of the rank's transport, with its arguments."""

    method: Literal["bar", "admit", "close_window", "check_integrity", "close"]
    arguments: tuple[str | int, ...] = ()


class Learn(msgspec.Struct, frozen=True, tag=True):
    worker_id: str
    public_key: str


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Poll for the next ``WATCH_S``: peers may move KV."""


ToRank = OpenMemory | Connect | Disconnect | Post | Call | Learn | MemoryWindow | Watch


class Answer(msgspec.Struct, frozen=True, tag=True):
    """``error``: the message of what was raised, and ``kind`` the name of its class."""

    error: str | None = None
    kind: str = ""
    is_true: bool = True
    memory: RankMemory | None = None


class PartEnded(PostEnd, frozen=True, tag=True):
    """The end of a Post."""


class Notified(msgspec.Struct, frozen=True, tag=True):
    payload: bytes


class Counted(msgspec.Struct, frozen=True, tag=True):
    counters: P2pCounters


FromRank = Answer | PartEnded | Notified | Counted
