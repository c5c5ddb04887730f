"""One namespace's key-value bucket: entries with an optional lease, and the leases themselves, as NATS stores them.

It owns the bucket's stream, the form of keys, headers and markers, and compare-and-swap. It does not know the watchers,
or when a lease has expired.

An entry's value is the caller's, unchanged; a header names the entry's lease. A lease is a key of its own,
``kvrelay/NS/leases/ID``, written once. Its holder's keepalives go to a separate stream in memory, which only the lease
keeper reads. So the bucket, which every process watches, changes only when members come and go.

    bucket KV_kvrelay_NS (file)             kvrelay.NS.workers.ID, ..., kvrelay.NS.leases.ID  when members change
    stream kvrelay_NS_keepalives (memory)   kvrelay.NS.keepalives.ID                          with each lease's beats

A lease expires by compare-and-swap on its last keepalive, so that either the holder's next keepalive or the expiry
succeeds. Then its key is deleted, with a marker that says so. An operator who deletes the key in another way, e.g. with
``nats kv del kvrelay_NS kvrelay.NS.leases.ID``, asks the holder to leave. Markers are kept for one hour, keepalives for
two.
"""

from __future__ import annotations

import logging

import msgspec

from kvrelay.control.base import Keys
from kvrelay.control.nats.connection import NatsMessage
from kvrelay.control.nats.jetstream import (
    EXPECTED_SEQUENCE,
    MESSAGE_TTL,
    ROLLUP,
    ConsumerInfo,
    JetStream,
    StoredMessage,
)
from kvrelay.control.nats.kv_keys import decode_key, encode_key
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.workers import LeaseTime

_log = logging.getLogger(__name__)

LEASE_HEADER = "Kvrelay-Lease"
EXPIRED_HEADER = "Kvrelay-Expired"
OPERATION_HEADER = "KV-Operation"
MARKER_HEADERS = (OPERATION_HEADER, "Nats-Marker-Reason")
MARKER_TTL = "3600s"
KEEPALIVES_MAX_AGE_S = 7200
"""Twice the longest lease."""


class LeaseValue(msgspec.Struct):
    """The value of a lease's key."""

    ttl_s: LeaseTime
    holder: str = ""
    first_seq: int = 0
    """Of its first keepalive, which is stored before it."""


class LeaseRecord(msgspec.Struct, frozen=True):
    """A lease was granted; ``ttl_s`` None: it has ended. ``seq``: of its first keepalive."""

    lease_id: str
    ttl_s: float | None
    seq: int = 0


class KeepaliveRecord(msgspec.Struct, frozen=True):
    """A lease was refreshed at ``stored_s`` by the server's clock, or expired (``is_end``)."""

    lease_id: str
    seq: int
    stored_s: float
    is_end: bool


class EntryRecord(msgspec.Struct, frozen=True):
    """A key was put, or deleted (``value`` None)."""

    key: str
    value: bytes | None
    lease_id: str | None
    seq: int


class Bucket:
    """Reads and writes of one bucket. Raises ControlUnavailableError."""

    def __init__(self, jetstream: JetStream, namespace: str) -> None:
        self._jetstream = jetstream
        self.name = f"kvrelay_{namespace}"
        self.stream = f"KV_{self.name}"
        self._subjects = f"$KV.{self.name}."
        keys = Keys(namespace)
        self._leases = keys.leases
        self.keepalive_stream = f"{self.name}_keepalives"
        self._keepalives = keys.lease_keepalives

    async def ensure(self) -> None:
        """Create both streams unless they exist."""
        await self._jetstream.ensure_stream(
            {
                "name": self.stream,
                "subjects": [f"{self._subjects}>"],
                "max_msgs_per_subject": 1,
                "discard": "new",
                "storage": "file",
                "allow_direct": True,
                "allow_rollup_hdrs": True,
                "allow_msg_ttl": True,
                "deny_delete": True,
                "duplicate_window": 2_000_000_000,
            }
        )
        await self._jetstream.ensure_stream(
            {
                "name": self.keepalive_stream,
                "subjects": [f"{self._keepalives}*"],
                "max_msgs_per_subject": 1,
                "discard": "old",
                "storage": "memory",
                "max_age": KEEPALIVES_MAX_AGE_S * 1_000_000_000,
                "duplicate_window": 2_000_000_000,
            }
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes, lease_id: str | None) -> int:
        return await self._publish(key, value, {LEASE_HEADER: lease_id} if lease_id is not None else {})

    async def delete(self, key: str, expected_seq: int | None = None) -> None:
        """Leave a deletion marker. Raises WrongSequenceError if the key was written since ``expected_seq``."""
        await self._delete(key, {EXPECTED_SEQUENCE: str(expected_seq)} if expected_seq is not None else {})

    async def grant_lease(self, lease_id: str, value: LeaseValue) -> int:
        """Grant a new lease. Its first keepalive precedes its key, so that every reader of the key can tell the lease's
        age. Returns the keepalive's sequence number."""
        seq = await self.refresh_lease(lease_id, 0)
        granted = msgspec.structs.replace(value, first_seq=seq)
        await self._publish(self._leases + lease_id, msgspec.json.encode(granted), {})
        return seq

    async def refresh_lease(self, lease_id: str, expected_seq: int) -> int:
        """Send a keepalive and return its sequence number. Raises WrongSequenceError unless ``expected_seq`` is that of
        the last one."""
        return await self._store_keepalive(lease_id, {EXPECTED_SEQUENCE: str(expected_seq)})

    async def end_lease(self, lease_id: str) -> None:
        """End a lease on behalf of its holder, or revoke another process's."""
        await self.delete(self._leases + lease_id)

    async def expire_lease(self, lease_id: str, expected_seq: int) -> None:
        """Expire an overdue lease. Raises WrongSequenceError if it was refreshed or ended since ``expected_seq``."""
        headers = {EXPECTED_SEQUENCE: str(expected_seq), EXPIRED_HEADER: "true"}
        await self._store_keepalive(lease_id, headers)
        await self.finish_expiry(lease_id)

    async def finish_expiry(self, lease_id: str) -> None:
        """The second half of an expiry: the process that expires a lease may die between the two."""
        await self._delete(self._leases + lease_id, {EXPIRED_HEADER: "true"})

    async def has_lease(self, lease_id: str) -> bool:
        """False if the lease has ended or was never granted."""
        message = await self._last_of_lease(lease_id)
        return message is not None and not _has(message, *MARKER_HEADERS)

    async def last_keepalive(self, lease_id: str) -> KeepaliveRecord | None:
        """None if the server has lost it, e.g. in a restart. Its ``stored_s`` is not known (0)."""
        message = await self._jetstream.last_message(self.keepalive_stream, self._keepalives + lease_id)
        return None if message is None else KeepaliveRecord(lease_id, message.seq, 0.0, _has(message, EXPIRED_HEADER))

    async def was_revoked(self, lease_id: str) -> bool:
        """Whether an operator has deleted the lease: there is a marker, and no expiry has left it."""
        message = await self._last_of_lease(lease_id)
        return message is not None and _has(message, OPERATION_HEADER) and not _has(message, EXPIRED_HEADER)

    async def _last_of_lease(self, lease_id: str) -> StoredMessage | None:
        return await self._jetstream.last_message(self.stream, self._subjects + encode_key(self._leases + lease_id))

    async def last_seq(self) -> int:
        """The sequence number of the last write."""
        return (await self._jetstream.stream_info(self.stream)).state.last_seq

    async def _delete(self, key: str, headers: dict[str, str]) -> None:
        await self._publish(key, b"", {OPERATION_HEADER: "PURGE", ROLLUP: "sub", MESSAGE_TTL: MARKER_TTL, **headers})

    async def _publish(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        subject = self._subjects + encode_key(key)
        return await self._jetstream.publish_again(self.stream, self.ensure, subject, value, headers)

    async def _store_keepalive(self, lease_id: str, headers: dict[str, str]) -> int:
        subject = self._keepalives + lease_id
        return await self._jetstream.publish_again(self.keepalive_stream, self.ensure, subject, b"", headers)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def consume(self, name: str, inbox: str, heartbeat_s: float) -> ConsumerInfo:
        """Have the last message of every key, and then every new one, pushed to ``inbox``."""
        return await self._consume(self.stream, f"{self._subjects}>", name, inbox, heartbeat_s)

    async def consume_keepalives(self, name: str, inbox: str, heartbeat_s: float) -> ConsumerInfo:
        """The same for the leases' keepalives."""
        return await self._consume(self.keepalive_stream, f"{self._keepalives}*", name, inbox, heartbeat_s)

    async def _consume(self, stream: str, subjects: str, name: str, inbox: str, heartbeat_s: float) -> ConsumerInfo:
        return await self._jetstream.create_consumer(
            stream,
            {
                "name": name,
                "deliver_subject": inbox,
                "deliver_policy": "last_per_subject",
                "filter_subject": subjects,
                "ack_policy": "none",
                "max_deliver": 1,
                "mem_storage": True,
                "num_replicas": 1,
                "idle_heartbeat": int(heartbeat_s * 1e9),
                "inactive_threshold": 10_000_000_000,
            },
        )

    def parse(self, message: NatsMessage, seq: int) -> LeaseRecord | EntryRecord | None:
        """A message of the stream as a record; None for a lease that this project did not write."""
        key = decode_key(message.subject.removeprefix(self._subjects))
        headers = message.headers or {}
        is_marker = any(name in headers for name in MARKER_HEADERS)
        if not key.startswith(self._leases):
            return EntryRecord(key, None if is_marker else message.data, headers.get(LEASE_HEADER), seq)
        lease_id = key.removeprefix(self._leases)
        if is_marker:
            return LeaseRecord(lease_id, None)
        try:
            value = msgspec.json.decode(message.data, type=LeaseValue)
        except UNREADABLE as exc:
            _log.warning("lease %s in bucket %s is malformed: %s", lease_id, self.name, exc)
            return None
        return LeaseRecord(lease_id, value.ttl_s, value.first_seq)

    def parse_keepalive(self, message: NatsMessage, seq: int, stored_s: float) -> KeepaliveRecord:
        lease_id = message.subject.removeprefix(self._keepalives)
        return KeepaliveRecord(lease_id, seq, stored_s, EXPIRED_HEADER in (message.headers or {}))


def _has(message: StoredMessage, *names: str) -> bool:
    """Whether the message carries one of these headers."""
    return any(name.encode() in message.headers for name in names)
