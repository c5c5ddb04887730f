from __future__ import annotations

from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RequestStatus
from kvrelay.engine.admission.queue import AdmissionQueue, EngineLoad
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.request import PrefillMode, Request

IDLE = EngineLoad(0, 0, 0)


def request(name: str, length: int, arrival: int, mode: PrefillMode = PrefillMode.LOCAL) -> Request:
    made = Request(name, [arrival] * length, SamplingParams(), mode=mode)
    made.arrival = arrival
    return made


def test_a_preempted_request_needs_room_for_everybody_to_grow() -> None:
    pool = BlockPool(20, 4)
    admission = AdmissionQueue(pool, 64)
    returning = request("returning", 40, 1)
    returning.status = RequestStatus.PREEMPTED
    admission.push(returning)
    assert admission.admit(EngineLoad(10, 10, 0)) is None, "20 - 10 leaves 10; the watermark and ten more are wanted"
    assert admission.is_short_of_blocks
    assert not admission.may_admit(EngineLoad(10, 10, 0))
    assert admission.may_admit(EngineLoad(9, 9, 0)), "one has ended"
    assert admission.admit(EngineLoad(9, 9, 0)) is returning
    assert not admission.is_short_of_blocks


def test_nobody_overtakes_who_waits_for_blocks() -> None:
    pool = BlockPool(20, 4)
    admission = AdmissionQueue(pool, 64)
    held = pool.allocate(10)
    assert held is not None
    long, short = request("long", 44, 1), request("short", 4, 2)
    admission.push(long)
    admission.push(short)
    load = EngineLoad(1, 1, 0)
    assert admission.admit(load) is None
    assert admission.admit(load) is None
    pool.release(held)
    assert admission.admit(load) is long
    assert admission.admit(load) is short
    assert len(admission) == 0


def test_a_full_budget_keeps_out_only_who_must_compute() -> None:
    admission = AdmissionQueue(BlockPool(40, 4), 64)
    here, remote = request("here", 8, 1), request("remote", 8, 2, PrefillMode.REMOTE)
    admission.push(here)
    admission.push(remote)
    assert admission.admit(EngineLoad(1, 1, 64)) is remote
    assert admission.admit(EngineLoad(2, 1, 64)) is None
    assert admission.admit(EngineLoad(2, 1, 63)) is here


def test_discarding_unblocks_the_next() -> None:
    pool = BlockPool(8, 4)
    admission = AdmissionQueue(pool, 64)
    held = pool.allocate(4)
    assert held is not None
    first, second = request("first", 30, 1), request("second", 4, 2)
    admission.push(first)
    admission.push(second)
    assert admission.admit(IDLE) is None
    admission.discard(first)
    admission.discard(first)
    assert admission.admit(IDLE) is second
