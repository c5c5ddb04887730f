"""One namespace's key-value bucket: entries with an optional lease, and the leases themselves, as NATS stores them.

It owns the bucket's stream, the form of keys, headers and markers, and compare-and-swap. It does not know who watches
or when a lease is over.

An entry's value is the caller's, untouched; the lease that it hangs on stands in a header. A lease is a key of its own,
``kvrelay/NS/leases/ID``, which its holder writes again and again. The marker of one that has expired says so in a
header: whoever deletes a lease in another way, with ``nats kv del kvrelay_NS kvrelay/NS/leases/ID`` for instance, asks
its holder to leave. Deletion markers and their subjects go after an hour.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from kvrelay.control.base import Keys
from kvrelay.control.nats.connection import NatsMessage, NoRespondersError
from kvrelay.control.nats.jetstream import (
    EXPECTED_SEQUENCE,
    MESSAGE_TTL,
    ROLLUP,
    ConsumerInfo,
    JetStream,
    StoredMessage,
)
from kvrelay.control.nats.kv_keys import decode_key, encode_key
from kvrelay.core.workers import LeaseTime

_log = logging.getLogger(__name__)

LEASE_HEADER = "Kvrelay-Lease"
EXPIRED_HEADER = "Kvrelay-Expired"
OPERATION_HEADER = "KV-Operation"
MARKER_HEADERS = (OPERATION_HEADER, "Nats-Marker-Reason")
MARKER_TTL = "3600s"


class LeaseValue(msgspec.Struct):
    """What a lease's key holds. ``beats`` shows an operator that it lives."""

    ttl_s: LeaseTime
    beats: int
    holder: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease granted or refreshed; ``ttl_s`` None: ended."""

    lease_id: str
    ttl_s: float | None
    seq: int
    stored_s: float


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """A key put, or deleted (``value`` None)."""

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
        self._leases = Keys(namespace).leases

    async def ensure(self) -> None:
        """Create it unless it exists."""
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

    # -- writing ------------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes, lease_id: str | None) -> int:
        return await self._publish(key, value, {LEASE_HEADER: lease_id} if lease_id is not None else {})

    async def delete(self, key: str, expected_seq: int | None = None) -> None:
        """Leave a deletion marker. With ``expected_seq`` only if nobody has written since: WrongSequenceError."""
        await self._delete(key, {EXPECTED_SEQUENCE: str(expected_seq)} if expected_seq is not None else {})

    async def write_lease(self, lease_id: str, value: LeaseValue, expected_seq: int) -> int:
        """Grant (``expected_seq`` 0) or refresh. Raises WrongSequenceError when it has ended, or been written since."""
        headers = {EXPECTED_SEQUENCE: str(expected_seq)}
        return await self._publish(self._leases + lease_id, msgspec.json.encode(value), headers)

    async def end_lease(self, lease_id: str) -> None:
        """By its holder."""
        await self.delete(self._leases + lease_id)

    async def expire_lease(self, lease_id: str, expected_seq: int) -> None:
        """By anybody who finds it overdue. Raises WrongSequenceError when it was refreshed, or ended, meanwhile."""
        await self._delete(self._leases + lease_id, {EXPECTED_SEQUENCE: str(expected_seq), EXPIRED_HEADER: "true"})

    async def lease_seq(self, lease_id: str) -> int | None:
        """Where the server has the lease; None when it has ended or was never granted."""
        message = await self._last_of_lease(lease_id)
        return None if message is None or _has(message, *MARKER_HEADERS) else message.seq

    async def was_revoked(self, lease_id: str) -> bool:
        """Whether somebody has deleted it on purpose: there is a marker, and no expiry has left it."""
        message = await self._last_of_lease(lease_id)
        return message is not None and _has(message, OPERATION_HEADER) and not _has(message, EXPIRED_HEADER)

    async def _last_of_lease(self, lease_id: str) -> StoredMessage | None:
        return await self._jetstream.last_message(self.stream, self._subjects + encode_key(self._leases + lease_id))

    async def last_seq(self) -> int:
        """The number of the last write."""
        return (await self._jetstream.stream_info(self.stream)).state.last_seq

    async def _delete(self, key: str, headers: dict[str, str]) -> None:
        await self._publish(key, b"", {OPERATION_HEADER: "PURGE", ROLLUP: "sub", MESSAGE_TTL: MARKER_TTL, **headers})

    async def _publish(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        subject = self._subjects + encode_key(key)
        try:
            return await self._jetstream.publish(subject, value, headers)
        except NoRespondersError:
            # The stream is gone (the server lost its data): make a new one.
            await self.ensure()
            return await self._jetstream.publish(subject, value, headers)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def consume(self, name: str, inbox: str, heartbeat_s: float) -> ConsumerInfo:
        """Have the last message of every key, and then every new one, pushed to ``inbox``."""
        return await self._jetstream.create_consumer(
            self.stream,
            {
                "name": name,
                "deliver_subject": inbox,
                "deliver_policy": "last_per_subject",
                "filter_subject": f"{self._subjects}>",
                "ack_policy": "none",
                "max_deliver": 1,
                "mem_storage": True,
                "num_replicas": 1,
                "idle_heartbeat": int(heartbeat_s * 1e9),
                "inactive_threshold": 30_000_000_000,
            },
        )

    def parse(self, message: NatsMessage, seq: int, stored_s: float) -> LeaseRecord | EntryRecord | None:
        """A message of the stream as what it means; None for what nobody of us wrote."""
        key = decode_key(message.subject.removeprefix(self._subjects))
        headers = message.headers or {}
        is_marker = any(name in headers for name in MARKER_HEADERS)
        if not key.startswith(self._leases):
            return EntryRecord(key, None if is_marker else message.data, headers.get(LEASE_HEADER), seq)
        lease_id = key.removeprefix(self._leases)
        if is_marker:
            return LeaseRecord(lease_id, None, seq, stored_s)
        try:
            value = msgspec.json.decode(message.data, type=LeaseValue)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            _log.warning("lease %s in bucket %s is malformed: %s", lease_id, self.name, exc)
            return None
        return LeaseRecord(lease_id, value.ttl_s, seq, stored_s)


def _has(message: StoredMessage, *names: str) -> bool:
    """Whether it carries one of these headers."""
    return any(name.encode() in message.headers for name in names)
