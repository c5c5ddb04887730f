"""Pushing to a prefill queue that answers, fails, or does not answer."""

from __future__ import annotations

import asyncio

import pytest
from tests.contracts.waiting import eventually

from kvrelay.config import DisaggConfig
from kvrelay.control.base import PrefillDelivery
from kvrelay.core.clock import ManualClock
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.sampling import SamplingParams
from kvrelay.errors import ControlUnavailableError
from kvrelay.handoff import decode_events as de
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.worker.decode import queue as decode_queue
from kvrelay.worker.decode.queue import REST_S, STALL_S, QueuedPrefills


class SlowQueue:
    """Each push takes ``delay_s`` of the clock, and fails if ``is_broken``."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.delay_s = 0.0
        self.is_broken = False
        self.pushed: list[int] = []
        self.num_waiting = 0
        self.num_looks = 0

    async def push(self, request: RemotePrefillRequest) -> None:
        self.pushed.append(request.handoff_id.number)
        self.clock.advance(self.delay_s)
        if self.is_broken:
            raise ControlUnavailableError("no answer")

    async def pull(self, kv_compatibility: str, timeout_s: float) -> PrefillDelivery | None:
        raise NotImplementedError

    async def size(self, kv_compatibility: str | None = None) -> int:
        self.num_looks += 1
        return self.num_waiting


class Pushing:
    """The decode side's end of such a queue; ``failed`` has the numbers of the prefills to compute here."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queue = SlowQueue(self.clock)
        self.failed: list[int] = []
        self.queued = QueuedPrefills(
            self.queue,
            DisaggPolicy(DisaggConfig()),
            model="m",
            kv_compatibility="x",
            address=lambda: "tcp://127.0.0.1:1",
            num_prefill_workers=lambda: 1,
            handle=self._handle,
            clock=self.clock,
        )

    def _handle(self, event: de.DecodeEvent) -> None:
        assert isinstance(event, de.PushFailed)
        self.failed.append(event.handoff_id.number)

    async def push(self, *numbers: int) -> None:
        for number in numbers:
            handoff_id = HandoffId("d", number)
            prefill = RemotePrefillRequest(handoff_id, "d", f"r{number}", (1, 2), 0, SamplingParams(), (), 0)
            self.queued.push(prefill)
            await asyncio.sleep(0)  # the queue answers, or fails, in the first turn of the push


async def test_only_one_request_at_a_time_waits_for_a_queue_that_does_not_answer() -> None:
    one = Pushing()
    one.queue.is_broken, one.queue.delay_s = True, 2 * STALL_S
    await one.push(1, 2, 3)
    assert one.queue.pushed == [1]
    assert one.failed == [1, 2, 3]
    one.clock.advance(REST_S)
    await one.push(4, 5)
    assert one.queue.pushed == [1, 4]
    assert one.failed == [1, 2, 3, 4, 5]


async def test_a_queue_that_answers_again_gets_everything() -> None:
    one = Pushing()
    one.queue.is_broken, one.queue.delay_s = True, 2 * STALL_S
    await one.push(1)
    one.queue.is_broken, one.queue.delay_s = False, 0.0
    one.clock.advance(REST_S)
    await one.push(2, 3, 4)
    assert one.queue.pushed == [1, 2, 3, 4]
    assert one.failed == [1]


@pytest.mark.parametrize("delay_s", [0.0, STALL_S / 2])
async def test_a_failure_that_comes_at_once_keeps_no_other_prefill_from_the_queue(delay_s: float) -> None:
    one = Pushing()
    one.queue.is_broken, one.queue.delay_s = True, delay_s
    await one.push(1, 2)
    one.queue.is_broken = False
    await one.push(3)
    assert one.queue.pushed == [1, 2, 3]
    assert one.failed == [1, 2]


async def test_a_slow_queue_that_takes_entries_is_used() -> None:
    one = Pushing()
    one.queue.delay_s = 2 * STALL_S
    await one.push(1, 2)
    assert one.queue.pushed == [1, 2]
    assert one.failed == []


async def test_operators_are_told_why_the_last_push_failed() -> None:
    one = Pushing()
    assert one.queued.push_error is None
    one.queue.is_broken = True
    await one.push(1)
    one.clock.advance(7.0)
    assert (one.queued.push_error, one.queued.push_error_age_s) == ("no answer", 7.0)
    one.queue.is_broken = False
    await one.push(2)
    assert (one.queued.push_error, one.queued.push_error_age_s) == (None, 0.0)


async def test_an_empty_queue_is_looked_at_after_a_push_and_else_rarely(monkeypatch) -> None:
    monkeypatch.setattr(decode_queue, "QUIET_INTERVAL_S", 3600.0)
    monkeypatch.setattr(decode_queue, "WATCH_FOR_S", 3600.0)
    one = Pushing()
    one.queued.watch()
    await eventually(lambda: one.queue.num_looks == 1)
    await asyncio.sleep(5 * decode_queue.SIZE_INTERVAL_S)
    assert one.queue.num_looks == 1
    await one.push(1)
    await eventually(lambda: one.queue.num_looks == 2)
    await one.queued.close()


async def test_a_queue_in_which_entries_wait_is_watched_closely(monkeypatch) -> None:
    monkeypatch.setattr(decode_queue, "QUIET_INTERVAL_S", 3600.0)
    monkeypatch.setattr(decode_queue, "WATCH_FOR_S", 3600.0)
    one = Pushing()
    one.queue.num_waiting = 3
    one.queued.watch()
    await eventually(lambda: one.queue.num_looks > 3)
    assert one.queued.prefill_side().queue_size == 3
    one.queue.num_waiting = 0
    await eventually(lambda: one.queued.prefill_side().queue_size == 0)
    await one.queued.close()
