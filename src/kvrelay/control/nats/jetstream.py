"""The part of JetStream's request-reply API that discovery and the queue need: streams, consumers, stored messages.

It owns the wire forms (JSON requests and replies, headers, the acknowledgement subject). It does not know what the
messages mean. It needs nats-server 2.11 or later (per-message time to live).
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from kvrelay.control.nats.connection import NatsConnection, NoRespondersError, RequestTimeoutError
from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import ControlUnavailableError

EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
MESSAGE_TTL = "Nats-TTL"
ROLLUP = "Nats-Rollup"

NO_SUITABLE_PEERS = 10005
NOT_CLUSTERED = 10074
STREAM_NAME_IN_USE = 10058
STREAM_NOT_FOUND = 10059
MESSAGE_NOT_FOUND = 10037
WRONG_SEQUENCES = (10071, 10164)

AUTO_REPLICAS = 3
STREAM_TIMEOUT_S = 5.0
STREAM_RETRY_S = 0.05
DIAGNOSIS_TIMEOUT_S = 0.2


class JetStreamError(ControlUnavailableError):
    """The server refused an API request. ``err_code`` is its number for the reason."""

    def __init__(self, message: str, err_code: int) -> None:
        super().__init__(message)
        self.err_code = err_code


class WrongSequenceError(JetStreamError):
    """A compare-and-swap found another last message on the subject."""


class NotStoredError(RequestTimeoutError):
    """The server answers, but does not confirm what is to be stored. Until it is restarted, it stores nothing more in a
    stream in which one write has failed."""


class _ApiError(msgspec.Struct):
    code: int
    err_code: int = 0
    description: str = ""


class _Failure(msgspec.Struct):
    error: _ApiError | None = None


class _PubAck(msgspec.Struct):
    seq: int


class _StreamState(msgspec.Struct):
    last_seq: int
    messages: int
    subjects: dict[str, int] | None = None


class StreamInfo(msgspec.Struct):
    """``state.subjects``: the number of messages on each subject that was asked for and has any. ``ts``: as in
    ConsumerInfo."""

    state: _StreamState
    ts: datetime.datetime | None = None


class _Delivered(msgspec.Struct):
    consumer_seq: int
    stream_seq: int


class ConsumerInfo(msgspec.Struct):
    """``created`` is a time of the server, close to now in the answer to a creation; ``ts`` is the time of the
    answer. ``num_waiting`` counts the pulls that wait."""

    created: datetime.datetime
    num_pending: int
    num_ack_pending: int
    delivered: _Delivered
    num_waiting: int = 0
    ts: datetime.datetime | None = None


class _ConsumerPage(msgspec.Struct):
    total: int
    offset: int
    consumers: list[ConsumerInfo] | None = None


class StoredMessage(msgspec.Struct):
    """What is asked of a message of a stream. ``headers`` is the raw header block."""

    seq: int
    headers: bytes = msgspec.field(name="hdrs", default=b"")


class _StoredMessageReply(msgspec.Struct):
    message: StoredMessage


class Delivery(msgspec.Struct, frozen=True):
    """The fields of a delivered message's reply subject. ``timestamp_s`` is when the server stored the message."""

    num_delivered: int
    stream_seq: int
    consumer_seq: int
    timestamp_s: float
    num_pending: int


T = TypeVar("T")


class JetStream:
    """The API over one connection. Raises ControlUnavailableError and its subclass JetStreamError.

    ``num_replicas``: number of servers that keep a copy of each stream made here; 0: three if the cluster has at least
    three servers, else one.
    """

    def __init__(self, connection: NatsConnection, num_replicas: int = 0) -> None:
        self._connection = connection
        self._num_replicas = num_replicas

    async def ensure_stream(self, config: Mapping[str, Any]) -> None:
        """Create the stream unless it exists in any configuration.

        Checks first, because not all credentials may create streams.
        """
        try:
            await self.stream_info(config["name"])
            return
        except JetStreamError as exc:
            if exc.err_code != STREAM_NOT_FOUND:
                raise
        try:
            await self._create_stream(config, self._num_replicas or AUTO_REPLICAS)
        except JetStreamError as exc:
            if self._num_replicas or exc.err_code not in (NO_SUITABLE_PEERS, NOT_CLUSTERED):
                raise
            await self._create_stream(config, 1)

    async def _create_stream(self, config: Mapping[str, Any], num_replicas: int) -> None:
        try:
            await self._api(f"STREAM.CREATE.{config['name']}", {**config, "num_replicas": num_replicas}, StreamInfo)
        except JetStreamError as exc:
            if exc.err_code != STREAM_NAME_IN_USE:
                raise

    async def stream_info(self, stream: str, subjects: str | None = None) -> StreamInfo:
        """``subjects``: a filter, with wildcards, of the subjects whose messages are to be counted."""
        body = None if subjects is None else {"subjects_filter": subjects}
        return await self._api(f"STREAM.INFO.{stream}", body, StreamInfo)

    async def create_consumer(self, stream: str, config: Mapping[str, Any]) -> ConsumerInfo:
        """Create a consumer. With ``durable_name`` an equal one may exist already."""
        name = config["name"]
        body = {"stream_name": stream, "config": config}
        return await self._api(f"CONSUMER.CREATE.{stream}.{name}", body, ConsumerInfo)

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo:
        return await self._api(f"CONSUMER.INFO.{stream}.{name}", None, ConsumerInfo)

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        """All consumers of the stream."""
        found: list[ConsumerInfo] = []
        while True:
            page = await self._api(f"CONSUMER.LIST.{stream}", {"offset": len(found)}, _ConsumerPage)
            found += page.consumers or []
            if not page.consumers or len(found) >= page.total:
                return found

    async def publish_again(
        self,
        stream: str,
        ensure: Callable[[], Awaitable[None]],
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Store a message as ``publish`` does. If no one takes it, ``ensure`` the stream and try again for
        STREAM_TIMEOUT_S: the server has lost the stream, or the servers of a cluster do not all know yet who has it.

        Raises NotStoredError if only the storage of ``stream`` fails to answer."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + STREAM_TIMEOUT_S
        while True:
            try:
                return await self.publish(subject, data, headers)
            except NoRespondersError:
                if loop.time() >= deadline_s:
                    raise
            except RequestTimeoutError as exc:
                if not await self._answers(stream):
                    raise
                raise NotStoredError(
                    f"the control server {self._connection.url} answers, but stores nothing in stream {stream}: its "
                    "disk may be full or broken; free space there, then restart that NATS server"
                ) from exc
            await ensure()
            await asyncio.sleep(STREAM_RETRY_S)

    async def _answers(self, stream: str) -> bool:
        try:
            await self._connection.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout_s=DIAGNOSIS_TIMEOUT_S)
        except ControlUnavailableError:
            return False
        return True

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> int:
        """Store a message and return its sequence number. Raises WrongSequenceError, or NoRespondersError (no such
        stream)."""
        reply = await self._connection.request(subject, data, headers=headers)
        return _decode(subject, reply.data, _PubAck).seq

    async def last_message(self, stream: str, subject: str) -> StoredMessage | None:
        """The last message on ``subject``, from the stream's leader, so it is never stale."""
        try:
            reply = await self._api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject}, _StoredMessageReply)
        except JetStreamError as exc:
            if exc.err_code == MESSAGE_NOT_FOUND:
                return None
            raise
        return reply.message

    async def _api(self, path: str, body: Mapping[str, Any] | None, reply_type: type[T]) -> T:
        data = msgspec.json.encode(body) if body is not None else b""
        try:
            reply = await self._connection.request(f"$JS.API.{path}", data)
        except NoRespondersError as exc:
            raise ControlUnavailableError(
                f"JetStream is not available at {self._connection.url}: the server runs without it, or has stopped it "
                "because its disk is full; see its log; after freeing space, restart it"
            ) from exc
        return _decode(path, reply.data, reply_type)


def _decode(what: str, data: bytes, reply_type: type[T]) -> T:
    try:
        failure = msgspec.json.decode(data, type=_Failure)
        if failure.error is None:
            return msgspec.json.decode(data, type=reply_type)
    except UNREADABLE as exc:
        raise ControlUnavailableError(f"cannot read the control server's answer to {what}: {exc}") from exc
    error = failure.error
    kind = WrongSequenceError if error.err_code in WRONG_SEQUENCES else JetStreamError
    raise kind(f"the control server refused {what}: {error.description}", error.err_code)


def parse_ack_subject(subject: str) -> Delivery:
    """Read ``$JS.ACK.[DOMAIN.ACCOUNT.]STREAM.CONSUMER.DELIVERED.SSEQ.CSEQ.TIME.PENDING[.TOKEN]``.

    Raises ValueError for any other subject.
    """
    tokens = subject.split(".")
    if tokens[:2] != ["$JS", "ACK"] or len(tokens) < 9:
        raise ValueError(f"{subject!r} is not an acknowledgement subject")
    first = 4 if len(tokens) == 9 else 6
    delivered, stream_seq, consumer_seq, time_ns, pending = (int(token) for token in tokens[first : first + 5])
    return Delivery(delivered, stream_seq, consumer_seq, time_ns / 1e9, pending)
