"""The table of the other workers: what discovery says of each, and what that makes of it.

    workers/ID          listed: it takes work of its role, at its address
    kv_metadata/ID/R    registered: it has a lease and is in a term; its public key, its memory

A worker ends in two ways, because a draining worker leaves ``workers/`` first and writes KV until it is done:
  - its entry under ``workers/`` disappears: it takes no more work;
  - its entries under ``kv_metadata/`` disappear: its lease has ended, until it registers again. A revoked lease ends
    before its time, and its holder, which may not know that yet, may still write (``handoff/leases.py``).

While the control plane is away the last known workers stay. A worker that never registered counts as ended, because
nothing would ever show its end.

It is the event loop's. Who decides on another thread, or together with something else, is told of each change
(``peer_events.py``) and keeps what it needs: the ledgers the leases, since a lease and the hand-offs that depend on it
change in one step under the lock of their side; the transfer thread the keys, the bars and the grants; ``Callers``
an index of all keys, those of frontends included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from kvrelay.control.base import Discovery, Keys, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.control_codec import decode_kv_metadata, decode_worker
from kvrelay.core.layout import Compatibility
from kvrelay.core.tasks import TaskSet
from kvrelay.core.workers import KvMetadata, WorkerInfo
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.cluster.fencing import LeaseEnds
from kvrelay.worker.inspection import PeersView

_log = logging.getLogger(__name__)


class _Peer(msgspec.Struct):
    """One worker. It is forgotten once it has no entry."""

    listed: WorkerInfo | None = None
    last: WorkerInfo | None = None
    """What was listed last: while a worker leaves, others may read what it has."""
    registered: dict[str, KvMetadata] = {}
    """By rank. It has a lease while there are any."""


class PeerTable:
    """Watches the workers. ``on_registered(metadata)`` runs when a worker has a lease, ``on_ended(worker_id)`` when
    that has ended (perhaps again), ``on_no_prefill`` when the last prefill worker stops taking work. With ``transfer``,
    the end of a lease is told once the worker is barred (``fencing.py``). A worker of this model whose KV is of another
    kind is no pair for ours, and the log says what differs."""

    def __init__(
        self,
        discovery: Discovery,
        keys: Keys,
        model: str,
        kv_terms: Compatibility,
        on_ended: Callable[[str], None],
        on_no_prefill: Callable[[], None],
        on_registered: Callable[[KvMetadata], None],
        transfer: TransferThread | None = None,
    ) -> None:
        self._discovery = discovery
        self._keys = keys
        self._model = model
        self._kv_terms = kv_terms
        self._kv_compatibility = kv_terms.digest()
        self._on_registered = on_registered
        self._on_ended = on_ended
        self._on_no_prefill = on_no_prefill
        self._peers: dict[str, _Peer] = {}
        self.num_prefill_workers = 0
        """Workers that pull prefills of this model and of this kind of KV from the queue. Read by other threads."""
        self.prefill_ids: frozenset[str] = frozenset()
        """Their ids. Read by other threads."""
        self.prefill_adapters: frozenset[str] = frozenset()
        """The adapters that all of them have, by id: any may pull a prefill. Read by other threads."""
        self._tasks = TaskSet()
        self._lease_ends = LeaseEnds(transfer, keys.kv_metadata, self._on_memory) if transfer is not None else None

    @property
    def num_serving(self) -> int:
        """Workers of this model that take requests of frontends."""
        return len(self._ids_of(self._serves))

    def view(self) -> PeersView:
        """What is known now."""
        return PeersView(
            prefill=self._ids_of(self._pulls),
            serving=self._ids_of(self._serves),
            leased=frozenset(worker_id for worker_id, peer in self._peers.items() if peer.registered),
            held_ends=frozenset() if self._lease_ends is None else self._lease_ends.held,
            addresses={worker_id: info.address for worker_id, info in self._listed() if info.model == self._model},
        )

    def address_of(self, worker_id: str) -> str | None:
        """The address of a worker of this model; None unless it is listed, or was and has its lease."""
        peer = self._peers.get(worker_id)
        info = None if peer is None else peer.last
        return info.address if info is not None and info.model == self._model else None

    def _listed(self) -> list[tuple[str, WorkerInfo]]:
        return [(worker_id, peer.listed) for worker_id, peer in self._peers.items() if peer.listed is not None]

    def _ids_of(self, is_meant: Callable[[WorkerInfo], bool]) -> frozenset[str]:
        return frozenset(worker_id for worker_id, info in self._listed() if is_meant(info))

    def _serves(self, info: WorkerInfo) -> bool:
        return info.model == self._model and info.role.takes_requests

    def _pulls(self, info: WorkerInfo) -> bool:
        is_ours = (info.model, info.kv_compatibility) == (self._model, self._kv_compatibility)
        return is_ours and (info.pulls_prefills or info.role.pulls_prefills)

    def start(self) -> None:
        self._tasks.spawn(follow(self._discovery, self._keys.workers, self._apply))
        on_memory = self._on_memory if self._lease_ends is None else self._lease_ends.on_event
        self._tasks.spawn(follow(self._discovery, self._keys.kv_metadata, on_memory))

    async def close(self) -> None:
        await self._tasks.close()
        if self._lease_ends is not None:
            await self._lease_ends.close()

    def _on_memory(self, event: WatchEvent) -> None:
        place = event.key.removeprefix(self._keys.kv_metadata)
        worker_id, _, rank = place.partition("/")
        if event.kind is WatchKind.PUT:
            metadata = decode_kv_metadata(place, event.value)
            peer = self._peers.setdefault(worker_id, _Peer())
            if not peer.registered:
                self._compare(metadata)
            peer.registered[rank] = metadata
            self._on_registered(metadata)
            return
        peer = self._peers.get(worker_id, _Peer())
        peer.registered.pop(rank, None)
        if not peer.registered:  # no other entry shows that its lease lives
            self._forget_if_empty(worker_id)
            self._on_ended(worker_id)

    def _compare(self, metadata: KvMetadata) -> None:
        theirs = metadata.terms
        difference = None if theirs is None or theirs.model != self._model else self._kv_terms.difference(theirs)
        if difference is not None:
            _log.warning("no KV is exchanged with %s: %s", metadata.worker_id, difference)

    def _apply(self, event: WatchEvent) -> None:
        worker_id = event.key.removeprefix(self._keys.workers)
        listed = decode_worker(worker_id, event.value) if event.kind is WatchKind.PUT else None
        peer = self._peers.setdefault(worker_id, _Peer())
        peer.listed, peer.last = listed, listed or peer.last
        self._forget_if_empty(worker_id)
        pulling = [info for _, info in self._listed() if self._pulls(info)]
        had_prefill, self.num_prefill_workers = self.num_prefill_workers > 0, len(pulling)
        self.prefill_ids = frozenset(info.worker_id for info in pulling)
        of_each = [frozenset((info.adapter, *info.adapters)) for info in pulling]
        self.prefill_adapters = frozenset.intersection(*of_each) if of_each else frozenset()
        if had_prefill and not self.num_prefill_workers:
            self._on_no_prefill()

    def _forget_if_empty(self, worker_id: str) -> None:
        peer = self._peers.get(worker_id)
        if peer is not None and peer.listed is None and not peer.registered:
            del self._peers[worker_id]
