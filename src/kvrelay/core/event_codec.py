"""Frames of the event plane: cache events, load samples, and the replay of missed events.

Each frame is one MessagePack struct with a version. A malformed or inconsistent frame raises ProtocolError. This module
does not know subjects, sockets or the effect of events.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.events import BlockStored, KvEventBatch, LoadMetrics
from kvrelay.errors import ProtocolError

EVENT_PROTOCOL_VERSION = 1

_T = TypeVar("_T", KvEventBatch, LoadMetrics, "ReplayRequest", "ReplayReply")


class ReplayRequest(msgspec.Struct, frozen=True):
    """Index to worker: send your events from ``from_seq`` on; ``FULL_DUMP``: send the blocks that you hold instead.

    A dump may have several pages; ``dump_seq`` and ``page`` ask for a later page of a dump in progress.
    """

    from_seq: int
    dump_seq: int = -1
    page: int = 0
    version: int = 1


FULL_DUMP = -1


class ReplayReply(msgspec.Struct, frozen=True):
    """Worker to index: ``batches`` in order. ``next_seq`` is the number of the worker's next event.

    ``is_dump``: the ring no longer has the events, or the index asked for a dump. The batches then list the blocks
    held, not past events, and after the last page the index continues at event ``dump_seq``. Otherwise, if the batches
    end before ``next_seq``, the index asks again.
    """

    worker_id: str
    epoch: int
    next_seq: int
    batches: tuple[KvEventBatch, ...]
    is_dump: bool = False
    dump_seq: int = -1
    page: int = 0
    num_pages: int = 1
    version: int = 1


_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(KvEventBatch)
_load_decoder = msgspec.msgpack.Decoder(LoadMetrics)
_request_decoder = msgspec.msgpack.Decoder(ReplayRequest)
_reply_decoder = msgspec.msgpack.Decoder(ReplayReply)


def encode_frame(message: KvEventBatch | LoadMetrics | ReplayRequest | ReplayReply) -> bytes:
    return _encoder.encode(message)


def decode_events(frame: bytes) -> KvEventBatch:
    """Raises ProtocolError for a malformed frame, another version, or inconsistent hashes."""
    batch = _decode(_batch_decoder, frame)
    _check_batch(batch)
    return batch


def decode_load(frame: bytes) -> LoadMetrics:
    """Raises ProtocolError for a malformed frame, another version, or numbers out of range."""
    return _decode(_load_decoder, frame).sound


def decode_replay_request(frame: bytes) -> ReplayRequest:
    return _decode(_request_decoder, frame)


def decode_replay_reply(frame: bytes) -> ReplayReply:
    """Raises ProtocolError as ``decode_events`` does."""
    reply = _decode(_reply_decoder, frame)
    if not 0 <= reply.page < reply.num_pages:
        raise ProtocolError(f"replay of {reply.worker_id} has page {reply.page} of {reply.num_pages}")
    for batch in reply.batches:
        _check_batch(batch)
    return reply


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        message = decoder.decode(frame)
    except UNREADABLE as exc:
        raise ProtocolError(f"malformed frame: {exc}") from exc
    if message.version != EVENT_PROTOCOL_VERSION:
        raise ProtocolError(f"frame has version {message.version}, not {EVENT_PROTOCOL_VERSION}")
    return message


def _check_batch(batch: KvEventBatch) -> None:
    """Check that every stored event has a possible size of blocks."""
    if batch.version != EVENT_PROTOCOL_VERSION:
        raise ProtocolError(f"batch of {batch.worker_id} has version {batch.version}, not {EVENT_PROTOCOL_VERSION}")
    for event in batch.events:
        if isinstance(event, BlockStored) and event.block_size < 1:
            raise ProtocolError(f"stored event of {batch.worker_id} has blocks of {event.block_size} tokens")
