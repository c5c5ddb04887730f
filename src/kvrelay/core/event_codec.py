"""Frames of the event plane: cache events, load samples, and the replay of events that were missed.

Each frame is one MessagePack struct with a version in it. What does not decode, or has no meaning, is refused with
ProtocolError. What it does not know: subjects, sockets, what the events do.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from kvrelay.core.events import BlockStored, KvEventBatch, LoadMetrics
from kvrelay.errors import ProtocolError

EVENT_PROTOCOL_VERSION = 1

_T = TypeVar("_T", KvEventBatch, LoadMetrics, "ReplayRequest", "ReplayReply")


class ReplayRequest(msgspec.Struct, frozen=True):
    """Index to worker: send your events from ``from_seq`` on; ``FULL_DUMP``: send what you hold instead.

    A dump may have several pages; ``dump_seq`` and ``page`` ask for a later page of the one that was begun.
    """

    from_seq: int
    dump_seq: int = -1
    page: int = 0
    version: int = 1


FULL_DUMP = -1


class ReplayReply(msgspec.Struct, frozen=True):
    """Worker to index: ``batches`` in order. ``next_seq`` is the number of the worker's next event.

    ``is_dump``: the events were too old or a dump was asked for; the batches say what is held, not what happened, and
    the index goes on at ``dump_seq`` behind the last page. Otherwise, if they end before ``next_seq``, ask again.
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


def encode_events(batch: KvEventBatch, *, include_tokens: bool = False) -> bytes:
    """One frame. Token ids stay at home unless asked for: local hashes name the tokens, in a tenth of the bytes."""
    return _encoder.encode(batch if include_tokens else without_tokens(batch))


def decode_events(frame: bytes) -> KvEventBatch:
    """Raises ProtocolError for a malformed frame, another version, or hashes that do not belong together."""
    batch = _decode(_batch_decoder, frame)
    _check_batch(batch)
    return batch


def encode_load(metrics: LoadMetrics) -> bytes:
    return _encoder.encode(metrics)


def decode_load(frame: bytes) -> LoadMetrics:
    """Raises ProtocolError for a malformed frame, another version, or numbers out of range."""
    metrics = _decode(_load_decoder, frame)
    counts = (
        metrics.request_active_slots,
        metrics.request_total_slots,
        metrics.kv_active_blocks,
        metrics.kv_total_blocks,
        metrics.num_requests_waiting,
        metrics.seq,
    )
    shares = (metrics.gpu_cache_usage_perc, metrics.gpu_prefix_cache_hit_rate)
    amounts = (metrics.kv_demand_perc, metrics.step_age_s)
    is_possible = all(0.0 <= share <= 1.0 for share in shares) and all(0.0 <= value < math.inf for value in amounts)
    if min(counts) < 0 or not is_possible:
        raise ProtocolError(f"load sample of {metrics.worker_id} is out of range")
    return metrics


def encode_replay_request(request: ReplayRequest) -> bytes:
    return _encoder.encode(request)


def decode_replay_request(frame: bytes) -> ReplayRequest:
    return _decode(_request_decoder, frame)


def encode_replay_reply(reply: ReplayReply) -> bytes:
    return _encoder.encode(reply)


def decode_replay_reply(frame: bytes) -> ReplayReply:
    """Raises ProtocolError as ``decode_events`` does."""
    reply = _decode(_reply_decoder, frame)
    if not 0 <= reply.page < reply.num_pages:
        raise ProtocolError(f"replay of {reply.worker_id} has page {reply.page} of {reply.num_pages}")
    for batch in reply.batches:
        _check_batch(batch)
    return reply


def without_tokens(batch: KvEventBatch) -> KvEventBatch:
    """The batch with its stored blocks' token ids left out."""
    if not any(isinstance(event, BlockStored) and event.token_ids for event in batch.events):
        return batch
    events = tuple(
        msgspec.structs.replace(event, token_ids=()) if isinstance(event, BlockStored) else event
        for event in batch.events
    )
    return msgspec.structs.replace(batch, events=events)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        message = decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"malformed frame: {exc}") from exc
    if message.version != EVENT_PROTOCOL_VERSION:
        raise ProtocolError(f"frame has version {message.version}, not {EVENT_PROTOCOL_VERSION}")
    return message


def _check_batch(batch: KvEventBatch) -> None:
    """The parts of every stored event belong together: as many local as sequence hashes, or none; likewise tokens."""
    if batch.version != EVENT_PROTOCOL_VERSION:
        raise ProtocolError(f"batch of {batch.worker_id} has version {batch.version}, not {EVENT_PROTOCOL_VERSION}")
    for event in batch.events:
        if not isinstance(event, BlockStored):
            continue
        num_blocks = len(event.block_hashes)
        if event.block_size < 1 or len(event.local_hashes) not in (0, num_blocks):
            raise ProtocolError(f"stored event of {batch.worker_id} is inconsistent")
        if len(event.token_ids) not in (0, num_blocks * event.block_size):
            raise ProtocolError(f"stored event of {batch.worker_id} has {len(event.token_ids)} token ids")
