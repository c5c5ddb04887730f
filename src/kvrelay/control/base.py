"""The control plane's contract: discovery with leases, the global prefill queue, events.

What it owns: keys under leases, a watch that heals itself, a work queue with acknowledgement, pub/sub with
request-reply. What it does not know: what the values mean; callers encode and decode them.

Three seams, each with an in-memory implementation for tests beside the real one, all of which pass the contract suite
in ``tests/contracts``. Every method that talks to a server raises ControlUnavailableError while there is none; nothing
waits without a bound. Implementations reconnect by themselves: after a gap, leases are granted again and what was
registered under them is put again, watches list again and report the difference, subscriptions come back.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.core.handoff import RemotePrefillRequest


class WatchKind(enum.Enum):
    PUT = "put"
    DELETE = "delete"
    SYNCED = "synced"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change under a watched prefix. SYNCED (with an empty key) follows the last of the keys found at the start."""

    kind: WatchKind
    key: str
    value: bytes = b""


class Lease(Protocol):
    """Liveness of one process. Kept alive by the implementation, at a third of its time to live, until revoked.

    When it is lost (the server forgot it, or the process was silent for too long) the implementation grants a new one
    and puts its keys again; ``on_lost`` callbacks run once each time, before that. They do not wait for the server: a
    process that cannot reach it hears them when ``alive_until_s`` has passed, by its own clock. If it then turns out
    that nobody has ended the lease, it goes on as it was.

    When somebody else has ended it on purpose, with the server's own tool, this process is asked to leave: after
    ``on_lost`` the ``on_revoked`` callbacks run, and the implementation forgets the keys that hung on the lease instead
    of putting them again. It grants a new lease even so, since who leaves may have something to finish. A server that
    has lost its data, or ended the lease of a process that was silent, has not revoked it.
    """

    @property
    def lease_id(self) -> str: ...

    @property
    def ttl_s(self) -> float: ...

    @property
    def alive_until_s(self) -> float:
        """Until when nobody can have counted this process as dead for its silence: when the last refresh that the
        server confirmed was sent, plus ``ttl_s``. By the monotonic clock of this process; minus infinity while the
        lease is lost or revoked. May be read from any thread."""

    def on_lost(self, callback: Callable[[], None]) -> None: ...

    def on_revoked(self, callback: Callable[[], None]) -> None:
        """Noticed within a third of ``ttl_s``; at once while this process watches one of the lease's keys."""

    async def revoke(self) -> None:
        """End the lease now; its keys go at once. Idempotent."""


class Discovery(Protocol):
    """Keys and values, some under a lease."""

    async def grant(self, ttl_s: float) -> Lease: ...

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """Raises LeaseLostError when the lease was revoked, by whomever; after ``on_revoked`` it can be used again."""

    async def delete(self, key: str) -> None: ...

    async def get(self, key: str) -> bytes | None: ...

    async def list(self, prefix: str) -> dict[str, bytes]: ...

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """All keys under ``prefix`` as PUTs, one SYNCED, then every change, without end.

        An entry whose lease has ended is reported as DELETE within 1.5 times its time to live, whether or not the
        server announces it. A watch outlives the connection: after a gap it reports what is different.
        """


class PrefillDelivery(Protocol):
    """One entry pulled from the queue. Exactly one of ``ack`` and ``nak`` ends it; until then it is beaten alive."""

    @property
    def request(self) -> RemotePrefillRequest: ...

    @property
    def num_deliveries(self) -> int:
        """1 at first; more when an earlier consumer died or gave up."""

    @property
    def is_expired(self) -> bool:
        """Whether it was in the queue for longer than ``request.timeout_s``, by the server's clock alone. Its owner has
        computed it by now: do not, but say so to the owner."""

    async def ack(self) -> None: ...

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back for another consumer."""

    async def in_progress(self) -> None:
        """Beat: the redelivery timer starts again. To be called every ``redelivery.BEAT_INTERVAL_S``."""


class PrefillQueue(Protocol):
    """The global queue: decode workers push, prefill workers pull, one by one. Entries survive a restart of both.

    It has a line for each ``kv_compatibility`` (model, weights, layout), so that a worker never pulls what it cannot
    compute.
    """

    async def push(self, request: RemotePrefillRequest) -> None:
        """Into the line of ``request.kv_compatibility``."""

    async def pull(self, kv_compatibility: str, timeout_s: float) -> PrefillDelivery | None:
        """The line's next entry, or None after ``timeout_s``. What continues a stream (``is_resumed``) goes before
        what is new. Malformed entries are logged, counted and dropped; those delivered too often go to the dead-letter
        subject."""

    async def size(self, kv_compatibility: str | None = None) -> int:
        """Entries that nobody has pulled yet, in one line or in all."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class EventBus(Protocol):
    """Unreliable publish/subscribe and request/reply on subjects; numbering and replay are the callers' business.

    Subjects are dot-separated tokens; ``*`` matches one token, a trailing ``>`` the rest.
    """

    async def publish(self, subject: str, data: bytes) -> None: ...

    async def subscribe(self, subject: str, handler: Callable[[str, bytes], None]) -> Subscription:
        """``handler(subject, data)`` runs on the event loop and must not block."""

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """One reply. Raises RetryElsewhereError when nobody answers in time."""

    async def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> Subscription: ...


class ControlPlane(Protocol):
    """One process's connection to all of it."""

    @property
    def discovery(self) -> Discovery: ...

    @property
    def prefill_queue(self) -> PrefillQueue: ...

    @property
    def events(self) -> EventBus: ...

    @property
    def is_connected(self) -> bool: ...

    async def close(self) -> None:
        """Close connections and end background tasks. Leases that were not revoked run out by themselves."""


class Keys:
    """Names in discovery and on the bus, all in one place."""

    def __init__(self, namespace: str) -> None:
        self.root = f"kvrelay/{namespace}/"
        self.workers = f"{self.root}workers/"
        self.leases = f"{self.root}leases/"
        self.kv_metadata = f"{self.root}kv_metadata/"
        self.frontends = f"{self.root}frontends/"
        self.operators = f"{self.root}operators/"
        self.config = f"{self.root}config/"
        self.subject_root = f"kvrelay.{namespace}."
        self.kv_events = f"{self.subject_root}kv_events.*"
        self.load_metrics = f"{self.subject_root}load.*"

    def worker(self, worker_id: str) -> str:
        return self.workers + worker_id

    def lease(self, lease_id: str) -> str:
        """Where a lease is kept that is a key itself, in NATS: who deletes it has revoked it."""
        return self.leases + lease_id

    @property
    def lease_beats(self) -> str:
        """Subjects of a lease's refreshes, less its id, in NATS."""
        return f"{self.subject_root}beats."

    @property
    def lease_keeper(self) -> str:
        """The subject on which the watcher that times the leases says that it does, in NATS."""
        return f"{self.subject_root}lease_keeper"

    def worker_kv_metadata(self, worker_id: str, rank: int) -> str:
        return f"{self.kv_metadata}{worker_id}/{rank}"

    def frontend(self, caller_id: str) -> str:
        return self.frontends + caller_id

    def operator(self, caller_id: str) -> str:
        return self.operators + caller_id

    def config_value(self, name: str) -> str:
        return self.config + name

    def worker_kv_events(self, worker_id: str) -> str:
        return f"{self.subject_root}kv_events.{worker_id}"

    def worker_load(self, worker_id: str) -> str:
        return f"{self.subject_root}load.{worker_id}"

    def worker_replay(self, worker_id: str) -> str:
        """Request/reply: a first sequence number in, KvEventBatch frames out."""
        return f"{self.subject_root}replay.{worker_id}"
