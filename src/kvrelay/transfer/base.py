"""The KV data plane's contract: one-sided reads and writes between registered memory of two workers.

A transport owns connections between memories, posting, completion and notifications. It gets offsets and lengths
(Pieces); it does not know requests, schedulers or prefixes.

Protocol, per worker:
  1. ``register(region)`` once, after the pool is allocated; the blob it returns goes to discovery (KvMetadata.agent).
  2. ``add_peer(metadata)`` at the first hand-off with a peer. Raises IncompatiblePeerError for other KV.
  3. ``post(...)`` any number of reads and writes; the peer's engine takes no part. A ``notify`` payload arrives at the
     peer after all bytes of that write are visible there.
  4. ``poll()`` completes posts and collects notifications. Both sides must poll while a hand-off is open.
  5. ``remove_peer(id)`` tears the connection down: after it returns, no post of the peer can touch our memory through
     this connection, and our pending posts to the peer have failed.
  6. ``bar(id)`` when a peer's lease has ended, repeated until it returns True. Only then does the end of the lease
     count: blocks that the peer may touch are reused after its fence. ``admit(id)`` when the peer has a lease again.
All methods of a Transport are called from one thread, the transfer thread (``TransferThread``); on one host a post
blocks that thread for the whole copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.transfer.grants import GrantTable
from kvrelay.transfer.stats import P2pCounters
from kvrelay.transfer.values import GrantRef, Pieces, TransferOp


@dataclass(frozen=True, slots=True)
class PostEnd:
    """The end of a post. ``error`` is None if every byte arrived. ``is_refused``: the peer has refused it, for want of
    room or of a grant; the connection is good, and other posts go on."""

    handle: int
    error: str | None
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Notification:
    """A peer's payload, delivered after the write to which it belongs. The payload is untrusted until decoded."""

    payload: bytes


class Transport(Protocol):
    """One worker's end of the data plane."""

    @property
    def name(self) -> str: ...

    @property
    def has_bar(self) -> bool:
        """Whether ``bar`` knows more than True. Then the end of a lease must wait for it."""

    @property
    def grants(self) -> GrantTable | None:
        """For transports that put peers' bytes into place in this process: what peers may touch. None: peers reach our
        memory without us."""

    def register(self, region: MemoryRegion) -> bytes: ...

    def add_peer(self, metadata: KvMetadata) -> None: ...

    def remove_peer(self, worker_id: str) -> None: ...

    def has_peer(self, worker_id: str) -> bool: ...

    def post(
        self,
        op: TransferOp,
        worker_id: str,
        pieces: Pieces,
        notify: bytes | None = None,
        grant: GrantRef | None = None,
    ) -> int:
        """Start moving; returns a handle that a PostEnd will name exactly once. Raises TransferError.

        No pieces are allowed with ``notify``: then only the payload is delivered. ``grant`` is the peer's
        permission; a transport without a GrantTable has no use for it.
        """

    def poll(self) -> tuple[list[PostEnd], list[Notification]]: ...

    @property
    def num_pending(self) -> int:
        """Number of posts that have not completed."""

    def bar(self, worker_id: str) -> bool:
        """Keep a worker whose lease has ended from our memory, whether it is connected or not.

        True: it is not in the middle of a copy, and cannot begin one before ``admit``. False: it may be in the middle
        of one, perhaps stopped; ask again. A transport that cannot know returns True; its module says which late copies
        remain possible.
        """

    def admit(self, worker_id: str) -> None:
        """Undo ``bar``."""

    def learn(self, worker_id: str, public_key: str) -> None:
        """A worker has registered: who proves to hold this key is that worker. Empty: no one is. From any thread."""

    def p2p_counters(self) -> P2pCounters | None:
        """What only the peer-to-peer transport counts. From any thread."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if memory of the transport's own is lost or used twice. From any thread."""

    def close(self) -> None: ...


class OneSided:
    """For transports whose peers reach our memory without us: there is nothing to permit, and no memory between."""

    @property
    def grants(self) -> GrantTable | None:
        return None

    def learn(self, worker_id: str, public_key: str) -> None:
        pass

    def p2p_counters(self) -> P2pCounters | None:
        return None

    def check_integrity(self) -> None:
        pass
