"""The one door for what is read from the control plane: registrations, settings, entries of the prefill queue.

Whoever holds credentials of the control plane can write anything there, so nothing is believed before it has passed
here: types, ranges, nesting, and that a key's id is the id in its value. What is refused raises ProtocolError, and
nothing else is ever raised. Events and load samples have a door of their own (``event_codec``).
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from kvrelay.core.handoff import RemotePrefillRequest
from kvrelay.core.workers import CallerInfo, KvMetadata, WorkerInfo
from kvrelay.errors import InvalidInputError, ProtocolError

MAX_ENTRY_BYTES = 1 << 20
MAX_SETTING_BYTES = 4096
MAX_TOKEN_ID = 2**31 - 1
MAX_TIMEOUT_S = 86_400.0
VERSION = 1
"""Of every struct that passes here."""

Setting = int | float | str | bool
"""A run-time setting's value. Nothing nested."""

_Struct = TypeVar("_Struct", WorkerInfo, KvMetadata)

_worker_decoder = msgspec.json.Decoder(WorkerInfo)
_metadata_decoder = msgspec.json.Decoder(KvMetadata)
_caller_decoder = msgspec.json.Decoder(CallerInfo)
_setting_decoder: msgspec.json.Decoder[Setting] = msgspec.json.Decoder(Setting)
_prefill_decoder = msgspec.msgpack.Decoder(RemotePrefillRequest)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_worker(worker_id: str, value: bytes) -> WorkerInfo:
    """The entry of the worker whose id the key names. Raises ProtocolError."""
    return _registration(_worker_decoder, "entry", worker_id, value)


def decode_kv_metadata(place: str, value: bytes) -> KvMetadata:
    """The KV memory whose ``WORKER_ID/RANK`` the key names. Raises ProtocolError."""
    worker_id, _, rank = place.partition("/")
    metadata = _registration(_metadata_decoder, "KV metadata", worker_id, value)
    if str(metadata.rank) != rank:
        raise ProtocolError(f"KV metadata of {worker_id} is under rank {rank!r}, and says {metadata.rank}")
    return metadata


def decode_caller(caller_id: str, value: bytes) -> CallerInfo:
    """The frontend or operator whose id the key names. Raises ProtocolError."""
    if len(value) > MAX_ENTRY_BYTES:
        raise ProtocolError(f"entry of caller {caller_id} has {len(value)} bytes")
    try:
        caller = _caller_decoder.decode(value)
    except _UNREADABLE as exc:
        raise ProtocolError(f"entry of caller {caller_id} is malformed: {exc}") from exc
    if caller.caller_id != caller_id or caller.version != VERSION:
        raise ProtocolError(f"entry of caller {caller_id} is of {caller.caller_id}, version {caller.version}")
    return caller


def decode_setting(name: str, value: bytes) -> Setting:
    """A run-time setting: one JSON scalar, never nested. Raises ProtocolError."""
    if len(value) > MAX_SETTING_BYTES:
        raise ProtocolError(f"setting {name} has {len(value)} bytes")
    try:
        setting = _setting_decoder.decode(value)
    except _UNREADABLE as exc:
        raise ProtocolError(f"setting {name} is malformed: {exc}") from exc
    if isinstance(setting, float) and not math.isfinite(setting):
        raise ProtocolError(f"setting {name} is not a finite number")
    return setting


def decode_prefill(data: bytes) -> RemotePrefillRequest:
    """An entry of the prefill queue. Raises ProtocolError."""
    try:
        request = _prefill_decoder.decode(data)
    except (*_UNREADABLE, ValueError) as exc:
        raise ProtocolError(f"malformed prefill: {exc}") from exc
    if request.version != VERSION:
        raise ProtocolError(f"prefill {request.handoff_id!r} has version {request.version}, not {VERSION}")
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


def _registration(decoder: msgspec.json.Decoder[_Struct], what: str, worker_id: str, value: bytes) -> _Struct:
    if len(value) > MAX_ENTRY_BYTES:
        raise ProtocolError(f"{what} of {worker_id} has {len(value)} bytes")
    try:
        found = decoder.decode(value)
    except _UNREADABLE as exc:
        raise ProtocolError(f"{what} of {worker_id} is malformed: {exc}") from exc
    if found.worker_id != worker_id:
        raise ProtocolError(f"{what} of {worker_id} names another worker, {found.worker_id}")
    if found.version != VERSION:
        raise ProtocolError(f"{what} of {worker_id} has version {found.version}, not {VERSION}")
    return found
