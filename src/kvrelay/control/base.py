"""The control plane's contract: discovery with leases, the global prefill queue, events.

It owns keys under leases, a watch that recovers by itself, a work queue with acknowledgement, and pub/sub with
request-reply. It does not know what the values mean; callers encode and decode them.

There are three seams. Each has an in-memory implementation beside the real one, and all of them pass the contract suite
in ``tests/contracts``. Every method that talks to a server raises ControlUnavailableError while the server is away, and
every wait is bounded. Implementations reconnect by themselves. After a gap they grant leases again and put the keys
again, watches list again and report the difference, and subscriptions are renewed.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol
from urllib.parse import quote, unquote

import msgspec

from kvrelay.core.handoff import RemotePrefillRequest

KEEPALIVES_PER_LEASE = 2.5
"""Within its time to live. A lost one is sent again at once, and still saves the lease."""


class WatchKind(enum.Enum):
    PUT = "put"
    DELETE = "delete"
    SYNCED = "synced"


class WatchEvent(msgspec.Struct, frozen=True):
    """A change under a watched prefix. SYNCED (with an empty key) follows the last key of the initial listing."""

    kind: WatchKind
    key: str
    value: bytes = b""


class Lease(Protocol):
    """Liveness of one process. Until ``revoke`` the implementation sends KEEPALIVES_PER_LEASE keepalives per time to
    live, on the beats of the host's clock (``core.clock.next_beat_s``).

    A lease is lost if the server forgot it or the process was silent for too long. The implementation then runs the
    ``on_lost`` callbacks, grants a new lease and puts the keys again. The callbacks do not wait for the server: a
    process that cannot reach it runs them when ``alive_until_s`` has passed by its own clock. If the server turns out
    to have kept the lease, the lease goes on as it was.

    A lease is revoked if an operator deleted it with the server's own tool, which asks this process to leave. The
    ``on_revoked`` callbacks run after ``on_lost``, and the implementation forgets the keys of the lease instead of
    putting them again. It still grants a new lease, because the process may have work to finish. A server that lost its
    data, or that ended the lease of a silent process, has not revoked it.
    """

    @property
    def lease_id(self) -> str: ...

    @property
    def ttl_s(self) -> float: ...

    @property
    def alive_until_s(self) -> float:
        """Until this time no other process can have counted this one as dead for its silence: the time at which the
        last confirmed refresh was sent, plus ``ttl_s``. By the monotonic clock of this process; minus infinity while
        the lease is lost or revoked. May be read from any thread."""

    def on_lost(self, callback: Callable[[], None]) -> None: ...

    def on_revoked(self, callback: Callable[[], None]) -> None:
        """A revocation is noticed with the next keepalive, or at once while this process watches a key of the
        lease."""

    async def revoke(self) -> None:
        """End the lease now; its keys are deleted at once. Idempotent."""


class Discovery(Protocol):
    """Keys and values under leases, and settings and adapters, which need none.

    Any holder of a login can write any key. An entry of another kind than a setting or an adapter grants something, so
    it counts only while its lease lives: without a lease it is as if it were not there, also if it replaces one that
    had a lease (``unleased.py``).
    """

    @property
    def is_connected(self) -> bool:
        """Whether the last contact with the server succeeded."""

    @property
    def num_unleased(self) -> int:
        """Number of entries ignored so far because they have no lease."""

    async def grant(self, ttl_s: float) -> Lease: ...

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """The key leaves the lease that it had, unless the put fails. Raises LeaseLostError if this process or an
        operator revoked the lease. After ``on_revoked`` the lease can be used again."""

    async def delete(self, key: str) -> None:
        """The key leaves its lease first: this process does not put it again, also if the deletion fails."""

    async def get(self, key: str) -> bytes | None: ...

    async def list(self, prefix: str) -> dict[str, bytes]: ...

    async def revoke_lease_of(self, key: str) -> bool:
        """As an operator: revoke the lease that this entry hangs on by the server's own record, whoever granted it. All
        entries of the lease end at once, also those of a process that does not answer. False if there is no such entry,
        or it has no lease."""

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """All keys under ``prefix`` as PUTs, one SYNCED, then every change, without end.

        An entry whose lease has ended is reported as DELETE within 1.5 times its time to live, whether or not the
        server announces the end. A watch outlives the connection: after a gap it reports the differences.
        """


class PrefillDelivery(Protocol):
    """One entry pulled from the queue. Exactly one of ``ack`` and ``nak`` ends it; until then its consumer calls
    ``in_progress`` at regular intervals."""

    @property
    def request(self) -> RemotePrefillRequest: ...

    @property
    def num_deliveries(self) -> int:
        """1 on the first delivery; more if an earlier consumer died or gave up."""

    @property
    def is_expired(self) -> bool:
        """Whether the entry was in the queue for longer than ``request.timeout_s``, by the server's clock alone. The
        decode worker has computed the prefill itself by now: do not compute it, but tell the decode worker."""

    async def ack(self) -> None: ...

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back for another consumer."""

    async def in_progress(self) -> None:
        """Extend the ack deadline: the redelivery timer restarts. Call it every
        ``redelivery.KEEPALIVE_INTERVAL_S``."""


class PrefillQueue(Protocol):
    """The global queue: decode workers push, prefill workers pull, one by one. Entries survive a restart of both.

    It has one partition per ``kv_compatibility`` (model, weights, layout), so that a worker never pulls a prefill that
    it cannot compute.
    """

    async def push(self, request: RemotePrefillRequest) -> None:
        """Into the partition of ``request.kv_compatibility``."""

    async def pull(self, kv_compatibility: str, timeout_s: float) -> PrefillDelivery | None:
        """The partition's next entry, or None after ``timeout_s``.

        The classes of requests (``queue_class``) come in order, each first in, first out; now and then a lower class
        has its turn (``queue_order.py``). Malformed entries are logged, counted and dropped. Entries that were
        delivered too often go to the dead-letter subject.
        """

    async def size(self, kv_compatibility: str | None = None) -> int:
        """Number of entries that no consumer has pulled yet, in one partition or in all. An entry counts from when its
        push has returned until its pull has."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class EventBus(Protocol):
    """Unreliable publish/subscribe and request/reply on subjects. Callers number their messages and replay lost ones.

    Subjects are dot-separated tokens; ``*`` matches one token, a trailing ``>`` the rest.
    """

    async def publish(self, subject: str, data: bytes) -> None: ...

    async def subscribe(self, subject: str, handler: Callable[[str, bytes], None]) -> Subscription:
        """``handler(subject, data)`` runs on the event loop and must not block."""

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """One reply. Raises RetryElsewhereError if no service answers in time."""

    async def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> Subscription: ...


class ControlPlane(Protocol):
    """One process's connection to the whole control plane."""

    @property
    def discovery(self) -> Discovery: ...

    @property
    def prefill_queue(self) -> PrefillQueue: ...

    @property
    def events(self) -> EventBus: ...

    @property
    def is_connected(self) -> bool: ...

    async def close(self) -> None:
        """Close connections and end background tasks. Leases that were not revoked expire by themselves."""


class Keys:
    """Names in discovery and on the bus, all in one place."""

    def __init__(self, namespace: str) -> None:
        self.root = f"kvrelay/{namespace}/"
        self.workers = f"{self.root}workers/"
        self.leases = f"{self.root}leases/"
        self.kv_metadata = f"{self.root}kv_metadata/"
        self.frontends = f"{self.root}frontends/"
        self.operators = f"{self.root}operators/"
        self.planners = f"{self.root}planners/"
        self.hosts = f"{self.root}hosts/"
        self.config = f"{self.root}config/"
        self.adapters = f"{self.root}adapters/"
        self.subject_root = f"kvrelay.{namespace}."
        self.kv_events = f"{self.subject_root}kv_events.*"
        self.load_metrics = f"{self.subject_root}load.*"

    def worker(self, worker_id: str) -> str:
        return self.workers + worker_id

    def lease(self, lease_id: str) -> str:
        """Prefix of the keys that are leases, in NATS. Deleting such a key revokes the lease."""
        return self.leases + lease_id

    @property
    def lease_keepalives(self) -> str:
        """Prefix of the subjects of lease keepalives, in NATS; the lease's id follows."""
        return f"{self.subject_root}keepalives."

    @property
    def lease_keeper(self) -> str:
        """The subject on which the lease keeper announces itself, in NATS."""
        return f"{self.subject_root}lease_keeper"

    def worker_kv_metadata(self, worker_id: str, rank: int) -> str:
        return f"{self.kv_metadata}{worker_id}/{rank}"

    def frontend(self, caller_id: str) -> str:
        return self.frontends + caller_id

    def frontend_figures(self, caller_id: str) -> str:
        """Request/reply between frontends: what one has counted (``frontend/cluster/frontends.py``)."""
        return f"{self.subject_root}figures.{caller_id}"

    def operator(self, caller_id: str) -> str:
        return self.operators + caller_id

    def planner(self, planner_id: str) -> str:
        return self.planners + planner_id

    def host(self, host_id: str) -> str:
        """A host of workers, with free slots for a planner."""
        return self.hosts + host_id

    def orders(self, host_id: str) -> str:
        """Prefix of a planner's orders to this host."""
        return f"{self.root}orders/{host_id}/"

    def adapter(self, name: str) -> str:
        """An adapter that was loaded at run time. Names of adapters may have slashes."""
        return self.adapters + quote(name, safe="")

    def adapter_name(self, key: str) -> str:
        """The name in such a key."""
        return unquote(key.removeprefix(self.adapters))

    def config_value(self, name: str) -> str:
        return self.config + name

    def worker_kv_events(self, worker_id: str) -> str:
        return f"{self.subject_root}kv_events.{worker_id}"

    def worker_load(self, worker_id: str) -> str:
        return f"{self.subject_root}load.{worker_id}"

    def frontend_requests(self, caller_id: str) -> str:
        """Request/reply: what a frontend can show of its requests."""
        return f"{self.subject_root}requests.{caller_id}"

    def worker_replay(self, worker_id: str) -> str:
        """Request/reply: a first sequence number in, KvEventBatch frames out."""
        return f"{self.subject_root}replay.{worker_id}"
