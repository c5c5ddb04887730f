"""The global prefill queue on a JetStream work-queue stream.

It owns the stream, the durable consumers, and the dead-letter stream. Each partition has a subject and a consumer for
each class of requests, which all prefill workers of the partition share; ``control/queue_order.py`` has the order in
which a pull looks at them. Most entries are of one class, so a pull first asks the stream which classes have entries at
all, and looks at these. An idle worker waits for the normal class and looks at all of them now and then. Delivery is
at least once: an entry whose consumer is silent for ``ack_wait_s`` goes to the next consumer, so consumers extend the
ack deadline while they compute. This module does not know what a prefill is, beyond its partition and the time limit in
its envelope. The limit is compared with the server's time stamps, so that no two machines' clocks are compared.

    kvrelay.NS.prefill.queue.PART ──> stream kvrelay_NS_prefill ──> consumer prefill_PART ──pull──> workers
    ...PART=resumed, =high, =low ────────────> " ─────────────────> ..._PART=resumed, ... ────────> "
                                                                          │ delivered too often
                                                                          v
                                      kvrelay.NS.prefill.dead (stream kvrelay_NS_prefill_dead, kept for a day)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvrelay.control.base import Keys, PrefillDelivery
from kvrelay.control.nats.connection import NatsConnection, NatsMessage
from kvrelay.control.nats.jetstream import ConsumerInfo, JetStream, JetStreamError, StreamInfo, parse_ack_subject
from kvrelay.control.nats.kv_keys import encode_key
from kvrelay.control.nats.pulls import Pulls
from kvrelay.control.queue_order import CLASSES, QueueTurns
from kvrelay.control.redelivery import MAX_ACK_WAIT_S, MAX_DELIVERIES
from kvrelay.core.clock import next_beat_s
from kvrelay.core.control_codec import decode_prefill
from kvrelay.core.handoff import QueueClass, RemotePrefillRequest
from kvrelay.core.tasks import end_tasks
from kvrelay.errors import ControlUnavailableError, PayloadTooLargeError, ProtocolError

_log = logging.getLogger(__name__)

MAX_ENTRIES = 100_000
MAX_AGE_S = 3600
DEAD_MAX_ENTRIES = 1_000
DEAD_MAX_AGE_S = 86_400
STOCK_CACHE_S = 0.02
LOOK_INTERVAL_S = 1.0
"""An idle worker looks at all classes again after so long if classes other than the normal one had entries."""
RARE_LOOK_INTERVAL_S = 16.0
"""Otherwise it looks once more after the ack deadline, for what was pushed before it waited at the server, and then
this seldom. While it waits, an entry goes to another class only behind an entry for each waiting worker, so every
waiting worker soon looks anyway."""


class NatsPrefillDelivery(msgspec.Struct, frozen=True):
    """One entry, leased to this consumer until it is silent for the queue's ``ack_wait_s``."""

    connection: NatsConnection
    reply: str
    request: RemotePrefillRequest
    num_deliveries: int
    is_expired: bool

    async def ack(self) -> None:
        # Wait for the answer: if the acknowledgement got lost, the prefill would be computed twice.
        await self.connection.request(self.reply, b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        await self.connection.publish(self.reply, _nak(delay_s))

    async def in_progress(self) -> None:
        await self.connection.publish(self.reply, b"+WPI")


class _Track(NamedTuple):
    """A subject, and the durable consumer that all workers share."""

    subject: str
    consumer: str


class _Partition(msgspec.Struct):
    """One ``kv_compatibility``, with a track per class. ``stock`` is valid until ``stock_until_s``."""

    tracks: dict[QueueClass, _Track]
    is_ready: bool = False
    creation: asyncio.Task[None] | None = None
    """The latest."""
    stock: dict[QueueClass, int] = {}
    """How many entries the classes have that have any: waiting ones, and delivered ones not yet acknowledged."""
    stock_until_s: float = 0.0


class NatsPrefillQueue:
    """PrefillQueue of one namespace. ``num_malformed`` and ``num_dead`` count the entries that ``pull`` dropped,
    ``num_expired`` those that it delivered as expired."""

    def __init__(
        self,
        connection: NatsConnection,
        namespace: str,
        *,
        ack_wait_s: float = MAX_ACK_WAIT_S,
        max_deliveries: int = MAX_DELIVERIES,
        num_replicas: int = 0,
    ) -> None:
        self._connection = connection
        self._jetstream = JetStream(connection, num_replicas)
        self._stream = f"kvrelay_{namespace}_prefill"
        root = Keys(namespace).subject_root
        self._subject = f"{root}prefill.queue."
        self._dead_subject = f"{root}prefill.dead"
        self._ack_wait_s = ack_wait_s
        self._max_deliveries = max_deliveries
        self._partitions: dict[str, _Partition] = {}
        self._turns = QueueTurns()
        self._pulls = Pulls(connection, self._stream)
        self.num_malformed = 0
        self.num_expired = 0
        self.num_dead = 0
        self._server_offset_s = 0.0
        """The server's clock minus the event loop's."""
        connection.on_reconnected(self._distrust)

    def __repr__(self) -> str:
        return (
            f"NatsPrefillQueue({self._stream}, malformed={self.num_malformed}, expired={self.num_expired}, "
            f"dead={self.num_dead})"
        )

    async def start(self) -> None:
        """Create the streams if they do not exist."""
        await self._jetstream.ensure_stream(
            _stream(self._stream, f"{self._subject}*", "workqueue", "new", MAX_ENTRIES, MAX_AGE_S)
        )
        await self._jetstream.ensure_stream(
            _stream(f"{self._stream}_dead", self._dead_subject, "limits", "old", DEAD_MAX_ENTRIES, DEAD_MAX_AGE_S)
        )

    async def close(self) -> None:
        await end_tasks(partition.creation for partition in self._partitions.values() if partition.creation is not None)
        await self._pulls.close()

    async def push(self, request: RemotePrefillRequest) -> None:
        data = msgspec.msgpack.encode(request)
        partition = await self._ready_partition(request.kv_compatibility)
        queue_class = request.queue_class
        if queue_class is not QueueClass.NORMAL and await self._is_next(partition):
            queue_class = QueueClass.NORMAL
        try:
            await self._jetstream.publish_again(
                self._stream, lambda: self._create(partition), partition.tracks[queue_class].subject, data
            )
        except PayloadTooLargeError as exc:
            # Not the client's fault: this prefill is for the decode worker itself.
            raise ControlUnavailableError(f"prefill {request.handoff_id} does not fit into the queue: {exc}") from exc
        partition.stock_until_s = 0.0

    async def pull(self, kv_compatibility: str, timeout_s: float) -> PrefillDelivery | None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        is_new = True
        while True:
            partition = await self._ready_partition(kv_compatibility)
            message = await self._first(partition)
            if message is None:
                now_s = loop.time()
                left_s = deadline_s - now_s
                if left_s <= 0 and QueueClass.NORMAL not in partition.stock:
                    return None
                has_others = bool(partition.stock.keys() - {QueueClass.NORMAL})
                quiet_s = self._ack_wait_s if is_new else next_beat_s(now_s, RARE_LOOK_INTERVAL_S) - now_s
                look_s, is_new = LOOK_INTERVAL_S if has_others else quiet_s, has_others
                message = await self._next(partition, QueueClass.NORMAL, min(max(left_s, 0.0), look_s))
                if message is None and left_s <= 0:
                    return None
            if message is None:
                continue
            delivery = await self._accept(partition, message)
            if delivery is not None:
                return delivery

    async def size(self, kv_compatibility: str | None = None) -> int:
        self._connection.check_connected()
        if kv_compatibility is None:
            info = await self._jetstream.stream_info(self._stream)
            return _num_waiting(info.state.messages, await self._jetstream.consumers(self._stream))
        return await self._size(await self._ready_partition(kv_compatibility))

    async def _size(self, partition: _Partition) -> int:
        try:
            stock = await self._ask_stock(partition)
            infos = await asyncio.gather(
                *(self._jetstream.consumer_info(self._stream, partition.tracks[item].consumer) for item in stock)
            )
        except ControlUnavailableError:
            partition.is_ready = False
            raise
        return _num_waiting(sum(stock.values()), infos)

    async def _is_next(self, partition: _Partition) -> bool:
        """Whether an entry that is pushed now is delivered at once, so that there is no order to keep: the queue is
        empty, or more workers wait than entries. Idle workers wait for the normal class only: if they waited for
        several, a pull might get several entries."""
        num_entries = await self._size(partition)
        if not num_entries:
            return True
        normal = await self._jetstream.consumer_info(self._stream, partition.tracks[QueueClass.NORMAL].consumer)
        return num_entries < normal.num_waiting

    async def _ask_stock(self, partition: _Partition) -> dict[QueueClass, int]:
        """The stock now, by one request."""
        info = await self._jetstream.stream_info(self._stream, f"{self._subject}*")
        self._set_clock(info)
        subjects = info.state.subjects or {}
        partition.stock = {
            item: subjects[track.subject] for item, track in partition.tracks.items() if track.subject in subjects
        }
        partition.stock_until_s = asyncio.get_running_loop().time() + STOCK_CACHE_S
        return partition.stock

    def _partition(self, kv_compatibility: str) -> _Partition:
        partition = self._partitions.get(kv_compatibility)
        if partition is None:
            token = _token(kv_compatibility)
            partition = self._partitions[kv_compatibility] = _Partition(
                {queue_class: self._track(token, queue_class) for queue_class in CLASSES}
            )
        return partition

    def _track(self, token: str, queue_class: QueueClass) -> _Track:
        # "=resumed" cannot be part of a token: inside a token two hexadecimal digits follow each "=".
        suffix = "" if queue_class is QueueClass.NORMAL else f"={queue_class.value}"
        return _Track(f"{self._subject}{token}{suffix}", f"prefill_{token}{suffix}")

    async def _ready_partition(self, kv_compatibility: str) -> _Partition:
        self._connection.check_connected()
        partition = self._partition(kv_compatibility)
        if not partition.is_ready:
            await self._create(partition)
        return partition

    async def _create(self, partition: _Partition) -> None:
        """Create the partition's consumers, and the streams, if they do not exist. Once for all who ask meanwhile."""
        if partition.creation is None or partition.creation.done():
            partition.creation = asyncio.create_task(self._create_now(partition))
        await asyncio.shield(partition.creation)

    async def _create_now(self, partition: _Partition) -> None:
        await self.start()
        for track in partition.tracks.values():
            config = _consumer(track, self._ack_wait_s)
            self._set_clock(await self._jetstream.create_consumer(self._stream, config))
        partition.is_ready = True

    def _set_clock(self, answer: ConsumerInfo | StreamInfo) -> None:
        """Set the clock offset from an answer that has just arrived."""
        if answer.ts is not None:
            self._server_offset_s = answer.ts.timestamp() - asyncio.get_running_loop().time()

    async def _is_expired(self, partition: _Partition, request: RemotePrefillRequest, stored_s: float) -> bool:
        """Whether the entry has expired. Both ends of its age are the server's time stamps. Only a fresh stamp can
        expire an entry, because the server's clock may have been set since the last one."""
        if not request.timeout_s or self._age_s(stored_s) <= request.timeout_s:
            return False
        self._set_clock(await self._jetstream.consumer_info(self._stream, partition.tracks[QueueClass.NORMAL].consumer))
        return self._age_s(stored_s) > request.timeout_s

    def _age_s(self, stored_s: float) -> float:
        return asyncio.get_running_loop().time() + self._server_offset_s - stored_s

    def _distrust(self) -> None:
        """After a gap: the server may have lost its data."""
        for partition in self._partitions.values():
            partition.is_ready = False
        self._pulls.interrupt()

    # -- pulling ------------------------------------------------------------------------------------------------------

    async def _first(self, partition: _Partition) -> NatsMessage | None:
        """The first message that waits. None only after a fresh look at the stream: if there is no message but perhaps
        those of the normal class, for which the caller waits then; or, with the partition no longer ready, if the
        stream may be gone."""
        order = self._turns.next_order()
        if asyncio.get_running_loop().time() < partition.stock_until_s:
            message = await self._first_of(partition, order, partition.stock)
            if message is not None:
                return message
        stock = await self._fresh_stock(partition)
        return await self._first_of(partition, order, stock) if stock.keys() - {QueueClass.NORMAL} else None

    async def _first_of(
        self, partition: _Partition, order: Sequence[QueueClass], stock: Collection[QueueClass]
    ) -> NatsMessage | None:
        for queue_class in order:
            if queue_class in stock:
                message = await self._next(partition, queue_class, 0.0)
                if message is not None:
                    return message
        return None

    async def _fresh_stock(self, partition: _Partition) -> dict[QueueClass, int]:
        """Empty if the stream is gone."""
        try:
            return await self._ask_stock(partition)
        except JetStreamError as exc:
            _log.debug("cannot look at the prefill queue: %s", exc)
            partition.is_ready = False
            return {}

    async def _next(self, partition: _Partition, queue_class: QueueClass, timeout_s: float) -> NatsMessage | None:
        message, is_sound = await self._pulls.next(partition.tracks[queue_class].consumer, timeout_s)
        if not is_sound:
            partition.is_ready = False
        return message

    async def _accept(self, partition: _Partition, message: NatsMessage) -> NatsPrefillDelivery | None:
        """The entry as a delivery; None for an entry that must not be computed, which is dropped."""
        try:
            stamp = parse_ack_subject(message.reply)
            request = decode_prefill(message.data)
        except (ValueError, ProtocolError) as exc:
            self.num_malformed += 1
            _log.warning("dropped a malformed entry of the prefill queue: %s", exc)
            await self._connection.publish(message.reply, b"+TERM")
            return None
        if stamp.num_delivered > self._max_deliveries:
            self.num_dead += 1
            _log.error(
                "prefill %s was delivered %d times without success; moved to the dead letters",
                request.handoff_id,
                stamp.num_delivered - 1,
            )
            await self._jetstream.publish(self._dead_subject, message.data)
            await self._connection.publish(message.reply, b"+TERM")
            return None
        is_expired = await self._is_expired(partition, request, stamp.timestamp_s)
        if is_expired:
            self.num_expired += 1
        return NatsPrefillDelivery(self._connection, message.reply, request, stamp.num_delivered, is_expired)


def _token(kv_compatibility: str) -> str:
    """The partition's part of a subject and of a consumer's name. Digests stay as they are."""
    encoded = encode_key(kv_compatibility).replace(".", "=2F")
    return encoded or "="


def _num_waiting(num_stored: int, consumers: Iterable[ConsumerInfo]) -> int:
    """How many of the stored entries no consumer has pulled. The consumers' own ``num_pending`` is not it: the server
    tells its consumers of a new entry only after it has confirmed it, so the count may lack what was just pushed."""
    return max(0, num_stored - sum(consumer.num_ack_pending for consumer in consumers))


def _nak(delay_s: float) -> bytes:
    return b"-NAK" if delay_s <= 0 else b"-NAK " + msgspec.json.encode({"delay": int(delay_s * 1e9)})


def _consumer(track: _Track, ack_wait_s: float) -> dict[str, Any]:
    return {
        "name": track.consumer,
        "durable_name": track.consumer,
        "filter_subject": track.subject,
        "ack_policy": "explicit",
        "ack_wait": int(ack_wait_s * 1e9),
        "max_ack_pending": MAX_ENTRIES,
        "deliver_policy": "all",
        "max_deliver": -1,
        # The consumers of a model that is no longer served.
        "inactive_threshold": 2 * MAX_AGE_S * 1_000_000_000,
    }


def _stream(name: str, subject: str, retention: str, discard: str, max_entries: int, max_age_s: int) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": [subject],
        "retention": retention,
        "storage": "file",
        "discard": discard,
        "max_msgs": max_entries,
        "max_age": max_age_s * 1_000_000_000,
    }
