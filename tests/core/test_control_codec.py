"""The door for what is read from the control plane: it lets good entries in, and raises nothing but ProtocolError."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config import WorkerRole
from kvrelay.core.control_codec import MAX_TOKEN_ID, decode_kv_metadata, decode_prefill, decode_setting, decode_worker
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.workers import KvMetadata, WorkerInfo
from kvrelay.errors import ProtocolError

WORKER = WorkerInfo("w-1", 0, WorkerRole.DECODE, "m", "/m", "tcp://127.0.0.1:1", 4096, 16, 100, 1000, "hash")
METADATA = KvMetadata("w-1", 0, "nixl", b"agent", 4096, 1600, 16, "cpu", 0, "hash")
PREFILL = RemotePrefillRequest(
    HandoffId("w-1", 1),
    "w-1",
    "r",
    (1, 2, 3),
    0,
    SamplingParams(),
    (0,),
    0,
    decode_address="tcp://h:1",
    model="m",
    kv_compatibility="hash",
)
NESTED = b"[" * 100_000
GARBAGE = [b"", b"{", NESTED, b'{"x":' + NESTED, b'"\xff"', b"null", b"[]", b"{}", b'{"worker_id": 1}']


def changed(value: msgspec.Struct, **fields: object) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(value) | fields)


def test_valid_entries_are_decoded() -> None:
    assert decode_worker("w-1", msgspec.json.encode(WORKER)) == WORKER
    assert decode_kv_metadata("w-1/0", msgspec.json.encode(METADATA)) == METADATA
    for prefill in (PREFILL, msgspec.structs.replace(PREFILL, token_ids=(0, MAX_TOKEN_ID))):
        assert decode_prefill(msgspec.msgpack.encode(prefill)) == prefill
    assert [decode_setting("x", value) for value in (b"1", b"0.5", b'"kv"', b"true")] == [1, 0.5, "kv", True]


@pytest.mark.parametrize("value", GARBAGE)
def test_every_decoder_refuses_garbage(value: bytes) -> None:
    for decode in (
        lambda: decode_worker("w-1", value),
        lambda: decode_kv_metadata("w-1/0", value),
        lambda: decode_setting("x", value),
        lambda: decode_prefill(value),
    ):
        with pytest.raises(ProtocolError):
            decode()


@pytest.mark.parametrize(
    "fields",
    [
        {"worker_id": "other"},
        {"worker_id": "w 1"},
        {"vocab_size": 0},
        {"vocab_size": -1},
        {"vocab_size": 10**30},
        {"vocab_size": "1000"},
        {"max_model_len": 0},
        {"max_model_len": 2**40},
        {"block_size": 0},
        {"num_blocks": -1},
        {"lease_ttl_s": 0},
        {"lease_ttl_s": 1e9},
        {"epoch": -1},
        {"role": "king"},
        {"model": ""},
        {"model": "m" * 2000},
        {"address": "a" * 2000},
        {"version": 2},
        {"host": "h" * (2 << 20)},
    ],
)
def test_a_worker_out_of_range_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        decode_worker("w-1", changed(WORKER, **fields))


@pytest.mark.parametrize(
    ("place", "fields"),
    [
        ("w-2/0", {}),
        ("w-1/1", {}),
        ("w-1", {}),
        ("w-1/0/0", {}),
        ("w-1/00", {}),
        ("w-1/0", {"lease_ttl_s": 0}),
        ("w-1/0", {"lease_ttl_s": -5.0}),
        ("w-1/0", {"address": -1}),
        ("w-1/0", {"num_bytes": 2**70}),
        ("w-1/0", {"agent": "no base64!"}),
        ("w-1/0", {"version": 0}),
    ],
)
def test_kv_metadata_out_of_place_is_refused(place: str, fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        decode_kv_metadata(place, changed(METADATA, **fields))


@pytest.mark.parametrize("value", [b"[1]", b'{"a": 1}', b"null", b'"' + b"x" * 5000 + b'"', b"1e999", b"NaN"])
def test_a_setting_is_one_scalar(value: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_setting("x", value)


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": ()},
        {"token_ids": (-1,)},
        {"token_ids": (-1, 2, 3)},
        {"token_ids": (2**31,)},
        {"num_output_tokens": 3},
        {"num_output_tokens": -1},
        {"num_cached_tokens": 4},
        {"block_ids": (-1,)},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": -1.0},
        {"decode_address": ""},
        {"model": ""},
        {"version": 9},
        {"sampling": SamplingParams(top_p=float("nan"))},
        {"sampling": SamplingParams(max_tokens=-1)},
    ],
)
def test_a_prefill_out_of_range_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        decode_prefill(msgspec.msgpack.encode(msgspec.structs.replace(PREFILL, **fields)))


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_protocol_errors(value: bytes) -> None:
    for decode in (
        lambda: decode_worker("w", value),
        lambda: decode_setting("x", value),
        lambda: decode_prefill(value),
    ):
        try:
            decode()
        except ProtocolError:
            pass
