"""Faults on a fake accelerator: certify finds each, and names most; of sound runs it never says that one is broken."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.certify.fakes import RATE, Fault, fake_ends

from kvrelay.certify import kv
from kvrelay.certify.counters import Octets, judge_way
from kvrelay.certify.findings import Verdict
from kvrelay.certify.pattern import Cause, UInt8Array
from kvrelay.core.layout import KVLayout, paged_kv

LAYOUT = paged_kv(num_layers=3, num_kv_heads=4, block_size=4, head_dim=16, dtype="float32")
RANKED = paged_kv(num_layers=3, num_kv_heads=4, block_size=4, head_dim=16, dtype="float32", tp_size=2)
CARRIED_BYTES = 1 << 20


def cells(data: UInt8Array, layout: KVLayout) -> UInt8Array:
    """[block, layer, vector, head, token, byte]; the tests' pieces are whole blocks."""
    return data.reshape(-1, 3, 2, 4, 4, 64)


def swapped_vectors(data: UInt8Array, layout: KVLayout) -> UInt8Array:
    return cells(data, layout)[:, :, ::-1].reshape(-1)


def wrong_heads(data: UInt8Array, layout: KVLayout) -> UInt8Array:
    return np.roll(cells(data, layout), 1, axis=3).reshape(-1)


def wrong_layers(data: UInt8Array, layout: KVLayout) -> UInt8Array:
    return np.roll(cells(data, layout), 1, axis=1).reshape(-1)


def wrong_tokens(data: UInt8Array, layout: KVLayout) -> UInt8Array:
    return cells(data, layout)[:, :, :, :, ::-1].reshape(-1)


def wrong_stride(data: UInt8Array, layout: KVLayout) -> UInt8Array:
    """Cells of heads are taken for cells that are 32 bytes longer."""
    return np.roll(data.reshape(-1, layout.block_bytes), 32, axis=1).reshape(-1)


def reversed_bytes(data: UInt8Array, layout: KVLayout) -> UInt8Array:
    return data.view(np.uint64).byteswap().view(np.uint8)


def flipped_bits(data: UInt8Array, layout: KVLayout) -> UInt8Array:
    data[:: layout.block_bytes] ^= 4
    return data


def noise(data: UInt8Array, layout: KVLayout) -> UInt8Array:
    data[:256] = np.random.default_rng(1).integers(0, 256, 256, dtype=np.uint8)
    return data


FAULTS = {
    "the sender does not wait for its kernel": (Fault(sends_unwaited=True), Cause.SENT_EARLY),
    "the receiver does not wait for its memory": (Fault(reads_unwaited=True), Cause.READ_EARLY),
    "the notification overtakes the bytes": (Fault(ends_early=True), Cause.READ_EARLY),
    "swapped K and V": (Fault(mangle=swapped_vectors), Cause.SWAPPED_VECTORS),
    "a wrong head map": (Fault(mangle=wrong_heads), Cause.HEADS),
    "a wrong rank map": (Fault(swaps_ranks=True), Cause.RANKS),
    "a wrong layer offset": (Fault(mangle=wrong_layers), Cause.LAYERS),
    "tokens reversed within blocks": (Fault(mangle=wrong_tokens), Cause.TOKENS),
    "a wrong stride": (Fault(mangle=wrong_stride), Cause.STRIDE),
    "an off-by-one block": (Fault(shift_blocks=1), Cause.BLOCKS),
    "byte order": (Fault(mangle=reversed_bytes), Cause.BYTE_ORDER),
    "a stale registration": (Fault(is_unregistered=True), Cause.NOT_ARRIVED),
    "a lost piece": (Fault(loses_last=True), Cause.NOT_ARRIVED),
    "flipped bits": (Fault(mangle=flipped_bits), Cause.CORRUPT),
    "noise": (Fault(mangle=noise), Cause.CORRUPT),
    "a write beyond its block": (Fault(spills=True), "bytes outside of the blocks"),
    "a lease that ends early": (Fault(ends_early=True, only_unnotified=True, late_looks=8), Cause.LATE_WRITE),
    "a transfer that never ends": (Fault(never_ends=True), "deadline"),
    "a lost notification": (Fault(loses_notification=True), "the notification of hand-off 1 had not come"),
    "TCP instead of RDMA": (Fault(is_tcp=True), "went by TCP: eth0"),
    "half the bandwidth": (Fault(rate=0.5), "of the link"),
    "everything is sent twice": (Fault(octets=2.0), "sent more than once"),
}


def certified(
    layouts: tuple[KVLayout, KVLayout], fault: Fault, seed: int = 0, num_handoffs: int = 40
) -> list[tuple[Verdict, str]]:
    """The KV rows, up to the first that fails: verdict and reason."""
    found: list[tuple[Verdict, str]] = []
    with fake_ends(*layouts, fault) as (giver, taker, link):
        for prove in (
            lambda: kv.prove_blocks(giver, taker, "fake", seed),
            lambda: kv.prove_reuse(giver, taker, "fake", num_handoffs, seed),
            lambda: kv.measure_path(giver, taker, "fake", link_bytes_per_s=RATE, num_rounds=1),
        ):
            row = prove()
            found.append((row.verdict, row.reason))
            if row.verdict is not Verdict.PASS and row.title != "bandwidth":
                return found
        evidence = kv.carry(giver, taker, CARRIED_BYTES, link.read)
    return [*found, judge_way(evidence, is_same_host=False, has_rdma=True, transport="nixl")]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, cause = FAULTS[name]
    if fault.loses_notification:
        monkeypatch.setattr(kv, "AWAIT_S", 2.0)
    layout = RANKED if fault.swaps_ranks else LAYOUT
    failed = [reason for verdict, reason in certified((layout, layout), fault) if verdict is Verdict.FAIL]
    assert failed, "it was not found"
    assert any(str(cause) in reason for reason in failed), failed


SOUND = [
    (paged_kv(2, 2, 16, 16, "bfloat16"), paged_kv(2, 2, 16, 16, "bfloat16")),
    (paged_kv(2, 4, 8, 8, "float32", tp_size=2), paged_kv(2, 4, 8, 8, "float32")),
    (paged_kv(4, 2, 8, 8, "float32", pp_size=2), paged_kv(4, 2, 16, 8, "float32", tp_size=2)),
    (paged_kv(2, 2, 8, 8, "float32"), paged_kv(2, 4, 4, 8, "float32", tp_size=4, head_replicas=2)),
]


def check_sound(seed: int, num_handoffs: int) -> None:
    layouts = SOUND[seed % len(SOUND)]
    found = certified(layouts, Fault(), seed, num_handoffs)
    assert [verdict for verdict, _ in found] == [Verdict.PASS] * 4, found


@pytest.mark.parametrize("seed", range(len(SOUND)))
def test_a_sound_machine_passes(seed: int) -> None:
    check_sound(seed, num_handoffs=30)


@pytest.mark.matrix
def test_no_alarm_is_false_in_200_sound_runs() -> None:
    for seed in range(200):
        check_sound(random.Random(seed).randrange(10**6) * 4 + seed, num_handoffs=12)


def test_traffic_of_others_is_not_taken_for_kv() -> None:
    """Sent by memory, while another process sends as much at the first look."""
    with fake_ends(LAYOUT, LAYOUT) as (giver, taker, _):
        octets = iter([0, 10 * CARRIED_BYTES, 10 * CARRIED_BYTES, 10 * CARRIED_BYTES])
        evidence = kv.carry(giver, taker, CARRIED_BYTES, lambda: Octets({"lo": next(octets)}, {}))
    verdict, _ = judge_way(evidence, is_same_host=True, has_rdma=False, transport="shm")
    assert verdict is Verdict.PASS
