from __future__ import annotations

from kvrelay.core.clock import ManualClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RequestStatus
from kvrelay.engine.admission.fair import OVERTAKE
from kvrelay.engine.admission.queue import AdmissionQueue, Backlog, EngineLoad
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.request import PrefillMode, Request

IDLE = EngineLoad(0, 0)
CLOCK = ManualClock()


def request(name: str, length: int, arrival: int, mode: PrefillMode = PrefillMode.LOCAL) -> Request:
    made = Request(name, [arrival] * length, SamplingParams(), mode=mode)
    made.arrival = arrival
    return made


def test_a_preempted_request_needs_room_for_everybody_to_grow() -> None:
    pool = BlockPool(20, 4)
    admission = AdmissionQueue(pool, 64, CLOCK)
    returning = request("returning", 40, 1)
    returning.status = RequestStatus.PREEMPTED
    admission.push(returning)
    assert admission.admit(EngineLoad(10, 10)) is None, "20 - 10 leaves 10; the watermark and ten more are wanted"
    assert admission.is_short_of_blocks
    assert not admission.may_admit(EngineLoad(10, 10))
    assert admission.may_admit(EngineLoad(9, 9)), "one has ended"
    assert admission.admit(EngineLoad(9, 9)) is returning
    assert not admission.is_short_of_blocks


def pass_by(admission: AdmissionQueue, pool: BlockPool, first_arrival: int) -> int:
    """Offer short requests until none is admitted; how many blocks they took, one after another."""
    passed = 0
    for arrival in range(first_arrival, first_arrival + 200):
        short = request(f"short{arrival}", 8, arrival)
        admission.push(short)
        admitted = admission.admit(EngineLoad(1, 1))
        if admitted is None:
            return passed
        assert admitted.num_queued_tokens == 8
        passed += len(admitted.block_ids)
        pool.release(admitted.block_ids)
    raise AssertionError("short requests pass for ever")


def test_what_does_not_fit_is_passed_to_a_bound_and_then_gets_the_next_blocks() -> None:
    pool = BlockPool(20, 4)
    admission = AdmissionQueue(pool, 64, CLOCK)
    held = pool.allocate(12)
    assert held is not None
    long = request("long", 44, 0)
    admission.push(long)
    passed = pass_by(admission, pool, 1)
    assert 11 <= passed <= OVERTAKE * 11 + 11 + 2, "overtaken by its size so many times, then by its blocks once"
    assert admission.is_short_of_blocks
    pool.release(held[:2])
    assert admission.admit(EngineLoad(1, 1)) is None, "what becomes free is kept for it"
    pool.release(held[2:])
    assert admission.admit(EngineLoad(1, 1)) is long
    assert not admission.is_short_of_blocks


def test_a_full_budget_keeps_out_only_who_must_compute() -> None:
    admission = AdmissionQueue(BlockPool(40, 4), 64, CLOCK)
    here, remote = request("here", 8, 1), request("remote", 8, 2, PrefillMode.REMOTE)
    admission.push(here)
    admission.push(remote)
    assert admission.admit(EngineLoad(1, 1, (Backlog(8, 0),) * 8)) is remote
    assert admission.admit(EngineLoad(2, 1, (Backlog(8, 0),) * 8)) is None
    assert admission.admit(EngineLoad(2, 1, (Backlog(8, 0),) * 7)) is here


def test_a_long_prompt_that_is_computed_keeps_out_long_ones_only() -> None:
    admission = AdmissionQueue(BlockPool(400, 4), 64, CLOCK)
    chat, long = request("chat", 8, 2), request("long", 800, 1)
    admission.push(long)
    load = EngineLoad(1, 1, (Backlog(500, 0),))
    assert admission.admit(load) is None
    admission.push(chat)
    assert admission.admit(load) is chat
    assert admission.admit(EngineLoad(1, 1, (Backlog(63, 0),))) is long


def test_discarding_what_does_not_fit_lets_the_others_in() -> None:
    pool = BlockPool(20, 4)
    admission = AdmissionQueue(pool, 64, CLOCK)
    assert pool.allocate(12) is not None
    first = request("first", 44, 0)
    admission.push(first)
    pass_by(admission, pool, 1)
    admission.discard(first)
    admission.discard(first)
    assert not admission.is_short_of_blocks
    assert admission.admit(EngineLoad(1, 1)) is not None
