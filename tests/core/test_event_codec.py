"""Frames of the event plane: round trips, and everything malformed is a ProtocolError."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from kvrelay.core.event_codec import (
    ReplayReply,
    ReplayRequest,
    decode_events,
    decode_load,
    decode_replay_reply,
    decode_replay_request,
    encode_frame,
)
from kvrelay.core.events import (
    MAX_FLOWS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Flow,
    KvEventBatch,
    LoadMetrics,
    TokenCounts,
    TransferCost,
)
from kvrelay.errors import ProtocolError

STORED = BlockStored(None, (2**64 - 1, 5), 2, "adapter")
BATCH = KvEventBatch("w", 3, 17, (STORED, BlockRemoved((5,)), AllBlocksCleared()))
LOAD = LoadMetrics("w", 1, 8, 10, 100, 2, 0.1, 0.5, seq=4)


def test_events_round_trip() -> None:
    assert decode_events(encode_frame(BATCH)) == BATCH


def test_load_samples_and_replays_round_trip() -> None:
    assert decode_load(encode_frame(LOAD)) == LOAD
    request = ReplayRequest(5, dump_seq=9, page=2)
    assert decode_replay_request(encode_frame(request)) == request
    reply = ReplayReply("w", 0, 20, (BATCH,), is_dump=True, dump_seq=20, page=1, num_pages=2)
    assert decode_replay_reply(encode_frame(reply)) == reply


def test_a_load_sample_has_the_names_of_the_first_release_on_the_wire() -> None:
    """Workers, frontends and ``kvrelay status`` of other releases read and write these."""
    first = {
        "worker_id": "w",
        "request_active_slots": 1,
        "request_total_slots": 8,
        "kv_active_blocks": 10,
        "kv_total_blocks": 100,
        "num_requests_waiting": 2,
        "gpu_cache_usage_perc": 0.1,
        "gpu_prefix_cache_hit_rate": 0.5,
        "seq": 4,
        "version": 1,
    }
    later = {"kv_demand_perc": 0.25, "step_age_s": 0.5, "num_decoding": 3, "num_prefill_tokens": 7}
    assert decode_load(msgspec.msgpack.encode(first)) == LOAD
    load = msgspec.structs.replace(LOAD, kv_demand=0.25, step_age_s=0.5, num_running=3, num_prefill_tokens=7)
    assert decode_load(msgspec.msgpack.encode(first | later)) == load
    sent = msgspec.msgpack.decode(encode_frame(load))
    assert first | later == {name: sent[name] for name in first | later}


@pytest.mark.parametrize(
    "batch", [KvEventBatch("w", 0, 0, (), version=2), KvEventBatch("w", 0, 0, (BlockStored(None, (1,), 0),))]
)
def test_inconsistent_events_are_refused(batch: KvEventBatch) -> None:
    with pytest.raises(ProtocolError):
        decode_events(msgspec.msgpack.encode(batch))
    with pytest.raises(ProtocolError):
        decode_replay_reply(encode_frame(ReplayReply("w", 0, 0, (batch,))))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks_in_use": -1},
        {"num_blocks_in_use": 2**63},
        {"num_waiting": 2**63},
        {"num_prefill_tokens": 2**64 - 1},
        {"seq": -1},
        {"step_age_s": 1e300},
        {"cache_usage": 1.5},
        {"cache_usage": float("nan")},
        {"version": 0},
        {"num_slots": -1},
        {"num_admitted": -1},
        {"prefix_hit_rate": float("nan")},
        {"kv_demand": float("inf")},
    ],
)
def test_load_out_of_range_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ProtocolError):
        decode_load(encode_frame(msgspec.structs.replace(LOAD, **changes)))


def test_impossible_transfer_costs_are_dropped_and_the_rest_of_the_sample_counts() -> None:
    costs = [TransferCost(f"d{number}", token_s) for number, token_s in enumerate((1e-6, math.nan, -1.0, 0.0, 1e9))]
    load = decode_load(encode_frame(msgspec.structs.replace(LOAD, transfer_costs=tuple(costs))))
    assert load == msgspec.structs.replace(LOAD, transfer_costs=(costs[0],))
    many = tuple(TransferCost(f"d{number}", 1e-6) for number in range(1000))
    assert len(decode_load(encode_frame(msgspec.structs.replace(LOAD, transfer_costs=many))).transfer_costs) == 16


def test_a_sample_names_a_bounded_number_of_avoided_workers() -> None:
    names = tuple(map(str, range(1000)))
    assert decode_load(encode_frame(msgspec.structs.replace(LOAD, avoided=names))).avoided == names[:64]


def test_a_page_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_replay_reply(encode_frame(ReplayReply("w", 0, 0, (), page=1)))


def test_garbage_is_a_protocol_error_and_nothing_else() -> None:
    rng = random.Random(1)
    frames = [b"", b"\xc1", encode_frame(LOAD), msgspec.msgpack.encode([[1] * 3] * 3), b"\x91" * 100_000]
    good = encode_frame(BATCH)
    frames += [good[:cut] for cut in range(len(good))]
    frames += [bytes(rng.randrange(256) for _ in range(rng.randrange(40))) for _ in range(300)]
    for frame in frames:
        for decode in (decode_events, decode_replay_request, decode_replay_reply):
            with pytest.raises(ProtocolError):
                decode(frame)


def test_flows_of_a_load_sample_are_bounded_and_sound() -> None:
    flows = [Flow("d", False, 1, 2, 0.5), Flow("d", True, -1, 2, 0.5), Flow("d", True, 1, 2, math.nan)]
    load = LoadMetrics("w", 0, 1, 0, 1, 0, 0.0, 0.0, flows=tuple(flows), tokens=TokenCounts(3, 4))
    assert decode_load(encode_frame(load)) == msgspec.structs.replace(load, flows=(flows[0],))
    many = tuple(Flow(f"d{number}", False, 1, 2, 0.5) for number in range(1000))
    assert len(decode_load(encode_frame(msgspec.structs.replace(load, flows=many))).flows) == MAX_FLOWS
