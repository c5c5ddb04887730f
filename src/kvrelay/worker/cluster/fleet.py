"""A worker's knowledge of the other workers: which exist, and which leases have ended.

A worker ends in two ways, because a draining worker leaves ``workers/`` first and writes KV until it is done:
  - its entry under ``workers/`` disappears: it takes no more work;
  - its entry under ``kv_metadata/`` disappears: its lease has ended, until it registers again. A revoked lease ends
    before its time, and its holder, which may not know that yet, may still write (``handoff/leases.py``).

While the control plane is away the last known workers stay. A worker that never registered counts as ended, because
nothing would ever show its end.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.control.base import Discovery, Keys, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.control_codec import decode_kv_metadata, decode_worker
from kvrelay.core.tasks import TaskSet
from kvrelay.core.workers import KvMetadata, WorkerRole
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.cluster.fencing import LeaseEnds
from kvrelay.worker.inspection import PeersView


class Fleet:
    """Watches the workers of one model. ``on_registered(metadata)`` runs when a worker has a lease,
    ``on_ended(worker_id)`` when that has ended (perhaps again), ``on_no_prefill`` when the last prefill worker stops
    taking work. With ``transfer``, the end of a lease is told once the worker is barred (``barring.py``)."""

    def __init__(
        self,
        discovery: Discovery,
        keys: Keys,
        model: str,
        kv_compatibility: str,
        on_ended: Callable[[str], None],
        on_no_prefill: Callable[[], None],
        on_registered: Callable[[KvMetadata], None],
        transfer: TransferThread | None = None,
    ) -> None:
        self._discovery = discovery
        self._keys = keys
        self._model = model
        self._kv_compatibility = kv_compatibility
        self._on_registered = on_registered
        self._on_ended = on_ended
        self._on_no_prefill = on_no_prefill
        self._prefill_workers: set[str] = set()
        self._takers: set[str] = set()
        self._addresses: dict[str, str] = {}
        self._ranks: dict[str, set[str]] = {}
        """The registered entries of each worker."""
        self._tasks = TaskSet()
        self._lease_ends = LeaseEnds(transfer, keys.kv_metadata, self._on_memory) if transfer is not None else None

    @property
    def num_prefill_workers(self) -> int:
        """Workers that pull prefills of this model and of this kind of KV from the queue."""
        return len(self._prefill_workers)

    @property
    def num_takers(self) -> int:
        """Workers of this model that take requests of frontends."""
        return len(self._takers)

    def view(self) -> PeersView:
        """What is known now."""
        return PeersView(
            prefill=frozenset(self._prefill_workers),
            takers=frozenset(self._takers),
            leased=frozenset(self._ranks),
            held_ends=frozenset() if self._lease_ends is None else self._lease_ends.held,
            addresses=dict(self._addresses),
        )

    def address_of(self, worker_id: str) -> str | None:
        """The address of a worker of this model; None unless it is listed."""
        return self._addresses.get(worker_id)

    def has_ended(self, worker_id: str) -> bool:
        """Whether it has no lease: the lease has ended and the worker has not registered again, or it never had one."""
        return worker_id not in self._ranks

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
            self._registered(worker_id, rank, decode_kv_metadata(place, event.value))
        else:
            self._unregistered(worker_id, rank)

    def _registered(self, worker_id: str, rank: str, metadata: KvMetadata) -> None:
        self._ranks.setdefault(worker_id, set()).add(rank)
        self._on_registered(metadata)

    def _unregistered(self, worker_id: str, rank: str) -> None:
        ranks = self._ranks.get(worker_id, set())
        ranks.discard(rank)
        if ranks:
            return  # its other entries show that its lease lives
        self._ranks.pop(worker_id, None)
        self._on_ended(worker_id)

    def _apply(self, event: WatchEvent) -> None:
        worker_id = event.key.removeprefix(self._keys.workers)
        pulls = False
        self._addresses.pop(worker_id, None)
        self._takers.discard(worker_id)
        if event.kind is WatchKind.PUT:
            info = decode_worker(worker_id, event.value)
            is_ours = (info.model, info.kv_compatibility) == (self._model, self._kv_compatibility)
            pulls = is_ours and info.role is WorkerRole.PREFILL
            if info.model == self._model:
                self._addresses[worker_id] = info.address
                if info.role.takes_requests:
                    self._takers.add(worker_id)
        had_prefill = bool(self._prefill_workers)
        self._prefill_workers.discard(worker_id)
        if pulls:
            self._prefill_workers.add(worker_id)
        if had_prefill and not self._prefill_workers:
            self._on_no_prefill()
