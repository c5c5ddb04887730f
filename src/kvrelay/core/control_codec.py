"""Decodes and checks all values read from the control plane: registrations, settings, entries of the prefill queue.

Any holder of control-plane credentials can write anything there, so no value is used before these checks: types,
ranges, nesting, and that the id in a key equals the id in its value. A value that fails raises ProtocolError; no other
exception leaves this module. ``event_codec`` does the same for events and load samples.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvrelay.core.adapters import AdapterEntry
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.handoff import RemotePrefillRequest
from kvrelay.core.workers import CallerInfo, KvMetadata, WorkerInfo
from kvrelay.errors import InvalidInputError, ProtocolError

MAX_ENTRY_BYTES = 1 << 20
MAX_SETTING_BYTES = 4096
MAX_TOKEN_ID = 2**31 - 1
MAX_TIMEOUT_S = 86_400.0
VERSION = 1
"""The version of every struct in this module."""

Setting = int | float | str | bool
"""Bytes of a run-time setting's value, which is a scalar."""

_T = TypeVar("_T")
_Entry = TypeVar("_Entry", WorkerInfo, KvMetadata, CallerInfo, AdapterEntry)

_worker_decoder = msgspec.json.Decoder(WorkerInfo)
_metadata_decoder = msgspec.json.Decoder(KvMetadata)
_caller_decoder = msgspec.json.Decoder(CallerInfo)
_adapter_decoder = msgspec.json.Decoder(AdapterEntry)
_setting_decoder: msgspec.json.Decoder[Setting] = msgspec.json.Decoder(Setting)
_prefill_decoder = msgspec.msgpack.Decoder(RemotePrefillRequest)


def decode_worker(worker_id: str, value: bytes) -> WorkerInfo:
    """The registration of the worker with the id in the key. Raises ProtocolError."""
    return _entry(_worker_decoder, "entry of worker", "worker_id", worker_id, value)


def decode_kv_metadata(place: str, value: bytes) -> KvMetadata:
    """The KV memory under the key ``WORKER_ID/RANK``. Raises ProtocolError."""
    worker_id, _, rank = place.partition("/")
    metadata = _entry(_metadata_decoder, "KV metadata of", "worker_id", worker_id, value)
    if str(metadata.rank) != rank:
        raise ProtocolError(f"KV metadata of {worker_id} under the key of rank {rank!r} names rank {metadata.rank}")
    return metadata


def decode_caller(caller_id: str, value: bytes) -> CallerInfo:
    """The frontend or operator with the id in the key. Raises ProtocolError."""
    return _entry(_caller_decoder, "entry of caller", "caller_id", caller_id, value)


def decode_adapter(name: str, value: bytes) -> AdapterEntry:
    """The adapter with the name in the key. Raises ProtocolError."""
    return _entry(_adapter_decoder, "entry of adapter", "name", name, value)


def decode_setting(name: str, value: bytes) -> Setting:
    """A run-time setting: one JSON scalar, never nested. Raises ProtocolError."""
    return _decoded(_setting_decoder, f"setting {name}", value, MAX_SETTING_BYTES)


def decode_prefill(data: bytes) -> RemotePrefillRequest:
    """An entry of the prefill queue. Raises ProtocolError."""
    try:
        request = _prefill_decoder.decode(data)
    except (*UNREADABLE, ValueError) as exc:
        raise ProtocolError(f"malformed prefill: {exc}") from exc
    if request.version != VERSION:
        raise ProtocolError(f"prefill {request.handoff_id!r} has version {request.version}, not {VERSION}")
    if not (request.decode_address and request.model):
        raise ProtocolError(f"prefill {request.handoff_id!r} has no decode address or no model")
    num_tokens = len(request.token_ids)
    if not (
        num_tokens
        and min(request.token_ids) >= 0
        and max(request.token_ids) <= MAX_TOKEN_ID
        and 0 <= request.num_output_tokens < num_tokens
        and 0 <= request.num_cached_tokens <= num_tokens
        and 0.0 <= request.timeout_s <= MAX_TIMEOUT_S
        and all(block_id >= 0 for block_id in request.block_ids)
    ):
        raise ProtocolError(f"prefill {request.handoff_id!r} has numbers out of range")
    try:
        request.sampling.validate()
    except InvalidInputError as exc:
        raise ProtocolError(f"prefill {request.handoff_id!r}: {exc}") from exc
    return request


def _decoded(decoder: msgspec.json.Decoder[_T], what: str, value: bytes, max_bytes: int = MAX_ENTRY_BYTES) -> _T:
    if len(value) > max_bytes:
        raise ProtocolError(f"{what} has {len(value)} bytes")
    try:
        return decoder.decode(value)
    except UNREADABLE as exc:
        raise ProtocolError(f"{what} is malformed: {exc}") from exc


def _entry(decoder: msgspec.json.Decoder[_Entry], what: str, field: str, name: str, value: bytes) -> _Entry:
    """Of the process or adapter whose ``field`` is ``name``, as the key says."""
    found = _decoded(decoder, f"{what} {name}", value)
    if getattr(found, field) != name:
        raise ProtocolError(f"{what} {name} names another one, {getattr(found, field)}")
    if found.version != VERSION:
        raise ProtocolError(f"{what} {name} has version {found.version}, not {VERSION}")
    return found
