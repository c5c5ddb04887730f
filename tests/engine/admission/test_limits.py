"""The bounds on what an engine is asked for: what it refuses, what it never refuses, and when to come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.completion_rate import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.core import EngineCore
from kvrelay.engine.limits import PendingArrivals
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.errors import OverloadedError

MakeEngine = Callable[..., EngineCore]
NUM_BLOCKS, BLOCK_SIZE = 16, 4


def prompt(name: int, num_blocks: int) -> list[int]:
    return [(name * 7 + position) % 400 + 10 for position in range(num_blocks * BLOCK_SIZE - 1)]


def request(name: int, num_blocks: int, **settings: object) -> Request:
    return Request(str(name), prompt(name, num_blocks), SamplingParams(max_tokens=2, ignore_eos=True), **settings)


@pytest.fixture
def engine(make_engine: MakeEngine) -> EngineCore:
    """Room for two pools' worth of requests, one sequence at a time."""
    return make_engine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_watermark=2, max_num_seqs=1)


def demand(engine: EngineCore) -> float:
    return engine.metrics().kv_demand


def run(engine: EngineCore) -> None:
    while engine.has_work():
        engine.step()
        engine.check_integrity()


def test_no_key_fills_the_queue_for_another(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1, max_num_waiting=4)
    for name in range(5):
        engine.add_request(request(name, 1, tenant="a"))
    engine.step()
    with pytest.raises(OverloadedError):
        engine.add_request(request(6, 1, tenant="a"))
    for name in (7, 8):
        engine.add_request(request(name, 1, tenant="b"))
    for name, tenant in ((9, "b"), (10, "")):
        with pytest.raises(OverloadedError):
            engine.add_request(request(name, 1, tenant=tenant))
    engine.add_request(request(11, 1, tenant="c"))
    run(engine)
    assert engine.num_requests == 0


def test_above_the_watermark_each_key_may_send_one_request(engine: EngineCore) -> None:
    for name in range(4):
        engine.add_request(request(name, 8, tenant="a"))
    engine.add_request(request(5, 8, tenant="b"))
    for name, tenant in ((6, "a"), (7, "b"), (8, "")):
        with pytest.raises(OverloadedError, match="watermark"):
            engine.add_request(request(name, 1, tenant=tenant))


def test_demand_above_the_watermark_is_refused_until_some_of_it_has_ended(engine: EngineCore) -> None:
    for name in range(4):
        engine.add_request(request(name, 8))
    assert demand(engine) == 2
    with pytest.raises(OverloadedError, match="wait for 32 KV blocks") as caught:
        engine.add_request(request(9, 1))
    assert caught.value.status == 429
    assert "9" not in engine.scheduler.requests
    engine.step()
    assert demand(engine) == 2, "the same blocks, now held by the first"
    with pytest.raises(OverloadedError):
        engine.add_request(request(9, 1))
    engine.abort("1")
    assert demand(engine) == 1.5
    engine.add_request(request(9, 8))
    run(engine)
    assert demand(engine) == 0
    engine.add_request(request(10, 8))
    run(engine)


@pytest.mark.parametrize("ratio", [0.01, 2])
def test_an_idle_engine_takes_whatever_fits(make_engine: MakeEngine, ratio: float) -> None:
    engine = make_engine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_watermark=ratio)
    for name in range(3):
        engine.add_request(request(name, NUM_BLOCKS))
        run(engine)
    assert not engine.has_unfinished()


def test_without_a_watermark_nothing_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_watermark=0)
    for name in range(50):
        engine.add_request(request(name, 8))
    assert demand(engine) == 25
    run(engine)


@pytest.mark.parametrize("settings", [{"output_token_ids": [5]}, {"mode": PrefillMode.HANDOFF}])
def test_what_was_begun_elsewhere_is_not_refused(engine: EngineCore, settings: dict[str, object]) -> None:
    for name in range(4):
        engine.add_request(request(name, 8))
    engine.add_request(request(9, 8, **settings))
    assert demand(engine) > 2


def test_the_count_follows_requests_that_go_and_come_back(make_engine: MakeEngine) -> None:
    """Preempted and taken back from remote prefill, requests wait for their blocks again."""
    engine = make_engine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_watermark=4, max_num_seqs=4)
    engine.add_request(request(0, 4, mode=PrefillMode.REMOTE))
    (start,) = engine.step().remote_prefills
    assert (engine.scheduler.admission.num_waiting_blocks, demand(engine)) == (0, 0.25)
    engine.end_loan(start.handoff_id, 1)
    engine.compute_handoff_here(start.handoff_id)
    assert (engine.scheduler.admission.num_waiting_blocks, demand(engine)) == (4, 0.25)
    for name in range(1, 4):
        engine.add_request(Request(str(name), prompt(name, 4), SamplingParams(max_tokens=12, ignore_eos=True)))
    run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert demand(engine) == 0


def test_who_is_on_the_way_counts_as_well(engine: EngineCore) -> None:
    check = engine.limits.check
    check(NUM_BLOCKS * BLOCK_SIZE, is_new=True)
    check(BLOCK_SIZE, is_new=True, ahead=PendingArrivals(2, 31 * BLOCK_SIZE))
    with pytest.raises(OverloadedError, match="wait for 32 KV blocks"):
        check(BLOCK_SIZE, is_new=True, ahead=PendingArrivals(2, 32 * BLOCK_SIZE))
    check(BLOCK_SIZE, is_new=False, ahead=PendingArrivals(2, 32 * BLOCK_SIZE))
    with pytest.raises(OverloadedError, match="1001 requests are waiting already"):
        check(BLOCK_SIZE, is_new=False, ahead=PendingArrivals(1001, 0))


# -- Retry-After ------------------------------------------------------------------------------------------------------


def retry_after_s(engine: EngineCore, num_blocks: int) -> float:
    with pytest.raises(OverloadedError) as caught:
        engine.limits.check(num_blocks * BLOCK_SIZE, is_new=True)
    return caught.value.retry_after_s


def test_retry_after_is_the_excess_over_the_rate_at_which_demand_ends(make_engine: MakeEngine) -> None:
    """Of 200 blocks, which is all there may be, the demand for two ends every second."""
    clock = ManualClock()
    engine = make_engine(num_blocks=100, block_size=BLOCK_SIZE, kv_watermark=2, max_num_seqs=1, clock=clock)
    for name in range(100):
        engine.add_request(Request(str(name), prompt(name, 2), SamplingParams(max_tokens=1, ignore_eos=True)))
    assert retry_after_s(engine, 20) == MIN_RETRY_AFTER_S, "nothing has ended yet: nothing is known"
    for _ in range(20):
        clock.advance(1.0)
        engine.step()
    assert demand(engine) == 1.6
    assert retry_after_s(engine, 60) == pytest.approx(10.0, rel=0.05)
    assert retry_after_s(engine, 41) == MIN_RETRY_AFTER_S
    assert retry_after_s(engine, 1000) == MAX_RETRY_AFTER_S
    run(engine)
    clock.advance(10.0)
    for name in range(100):
        engine.add_request(Request(str(name), prompt(name, 2), SamplingParams(max_tokens=1, ignore_eos=True)))
    assert retry_after_s(engine, 60) == MIN_RETRY_AFTER_S, "what was before the engine was idle says nothing"


def test_the_retry_after_of_the_waiting_line_is_how_long_it_takes_to_get_in(make_engine: MakeEngine) -> None:
    """One place, five may wait; a request ends every four seconds."""
    clock = ManualClock()
    engine = make_engine(
        num_blocks=100, block_size=BLOCK_SIZE, kv_watermark=0, max_num_seqs=1, max_num_waiting=5, clock=clock
    )
    for name in range(6):
        engine.add_request(Request(str(name), prompt(name, 2), SamplingParams(max_tokens=1, ignore_eos=True)))
    assert retry_after_s(engine, 1) == MIN_RETRY_AFTER_S, "nothing has ended yet: nothing is known"
    for name in range(6, 12):
        clock.advance(4.0)
        engine.step()
        engine.add_request(Request(str(name), prompt(name, 2), SamplingParams(max_tokens=1, ignore_eos=True)))
    assert retry_after_s(engine, 1) == pytest.approx(4.0, rel=0.2)
    with pytest.raises(OverloadedError, match="8 requests are waiting") as caught:
        engine.limits.check(BLOCK_SIZE, is_new=True, ahead=PendingArrivals(2, BLOCK_SIZE))
    assert caught.value.retry_after_s == pytest.approx(12.0, rel=0.2)
