"""Large batches of events, and a bus that refuses."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.contracts.waiting import eventually

from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.event_codec import decode_events, decode_load
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import STALE_AFTER_S, AllBlocksCleared, BlockRemoved, KvEvent, LoadMetrics
from kvrelay.errors import ControlUnavailableError, KvrelayError, PayloadTooLargeError
from kvrelay.worker.reporting.publisher import (
    IDLE_INTERVAL_S,
    MAX_BATCH_BLOCKS,
    MAX_INTERVAL_S,
    Publisher,
    repeat_interval_s,
    split_events,
)

LOAD = LoadMetrics("w", 0, 4, 0, 100, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("load", "step_age_s", "interval_s"),
    [
        (LOAD, 0.0, IDLE_INTERVAL_S),
        (LOAD, 0.1, MAX_INTERVAL_S),
        (msgspec.structs.replace(LOAD, num_admitted=1), 0.0, MAX_INTERVAL_S),
        (msgspec.structs.replace(LOAD, num_waiting=1), 0.0, MAX_INTERVAL_S),
    ],
    ids=["idle", "at its first step", "running", "waiting"],
)
def test_only_an_idle_worker_repeats_its_load_slowly(load: LoadMetrics, step_age_s: float, interval_s: float):
    assert repeat_interval_s(load, step_age_s) == interval_s


def test_a_lost_sample_makes_no_idle_worker_stale():
    assert 2 * IDLE_INTERVAL_S < STALE_AFTER_S


async def test_idle_workers_of_a_host_repeat_their_loads_together(monkeypatch: pytest.MonkeyPatch):
    loop = asyncio.get_running_loop()
    call_at, due_s = loop.call_at, []
    monkeypatch.setattr(loop, "call_at", lambda when, *rest, **more: due_s.append(when) or call_at(when, *rest, **more))
    plane = MemoryBroker().plane()
    publisher = Publisher("w", plane.events, Keys("test"), KvEventLog("w", 0))
    await publisher.start(LOAD)
    await eventually(lambda: any(when % IDLE_INTERVAL_S == 0 for when in due_s))
    await publisher.close()
    await plane.close()


async def test_changes_within_the_interval_are_one_sample_and_none_is_lost():
    plane = MemoryBroker().plane()
    keys = Keys("test")
    samples: list[LoadMetrics] = []
    await plane.events.subscribe(keys.load_metrics, lambda subject, data: samples.append(decode_load(data)))
    publisher = Publisher("w", plane.events, keys, KvEventLog("w", 0))
    await publisher.start(LOAD)
    for number in range(1, 101):
        publisher.update([], msgspec.structs.replace(LOAD, num_blocks_in_use=number))
    await eventually(lambda: bool(samples) and samples[-1].num_blocks_in_use == 100)
    assert len(samples) == 2
    await publisher.close()
    await plane.close()


async def test_an_idle_worker_repeats_a_refused_sample_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers would count what has ended until its next sample, 15 s later."""
    monkeypatch.setattr("kvrelay.worker.reporting.publisher.MAX_INTERVAL_S", 0.01)
    monkeypatch.setattr("kvrelay.worker.reporting.publisher.IDLE_INTERVAL_S", 3600.0)
    plane = MemoryBroker().plane()
    keys = Keys("test")
    samples: list[LoadMetrics] = []
    await plane.events.subscribe(keys.load_metrics, lambda subject, data: samples.append(decode_load(data)))
    publish, refused = plane.events.publish, []

    async def refuse(subject: str, data: bytes) -> None:
        if len(refused) < 3:
            refused.append(subject)
            raise ControlUnavailableError("no connection")
        await publish(subject, data)

    plane.events.publish = refuse
    publisher = Publisher("w", plane.events, keys, KvEventLog("w", 0))
    await publisher.start(LOAD)
    await eventually(lambda: [sample.seq for sample in samples] == [4])
    await publisher.close()
    await plane.close()


def removed(*blocks: int) -> BlockRemoved:
    return BlockRemoved(tuple(blocks))


@pytest.mark.parametrize(
    ("events", "runs"),
    [
        ([], []),
        ([removed(1), AllBlocksCleared()], [2]),
        ([removed(1, 2), removed(3), removed(4)], [2, 1]),
        ([removed(1, 2, 3, 4, 5), removed(6)], [1, 1]),
        ([removed(1, 2), removed(3, 4), removed(5, 6)], [1, 1, 1]),
    ],
)
def test_events_are_split_between_events(events: list[KvEvent], runs: list[int]):
    split = list(split_events(events, 3))
    assert [len(some) for some in split] == runs
    assert [event for some in split for event in some] == events


@pytest.mark.parametrize("error", [None, PayloadTooLargeError("too large"), KvrelayError("whatever")])
async def test_frames_fit_and_a_bus_that_refuses_ends_nothing(error: KvrelayError | None):
    broker = MemoryBroker()
    plane = broker.plane()
    keys = Keys("test")
    frames: list[bytes] = []
    await plane.events.subscribe(keys.kv_events, lambda subject, data: frames.append(data))
    publisher = Publisher("w", plane.events, keys, KvEventLog("w", 0))
    await publisher.start(LOAD)
    publish = plane.events.publish

    async def refuse(subject: str, data: bytes) -> None:
        plane.events.publish = publish
        if error is not None:
            raise error
        await publish(subject, data)

    plane.events.publish = refuse
    huge = [BlockRemoved(tuple(range(2**63, 2**63 + 9_000))) for _ in range(5)]
    publisher.update(huge, LOAD)
    async with asyncio.timeout(60):
        while len(frames) < 2 + (error is None):
            await asyncio.sleep(0.01)
    assert all(len(frame) < 19 * MAX_BATCH_BLOCKS for frame in frames)
    # A refused frame leaves a gap in the numbers, by which indexes know that they have missed something.
    assert [decode_events(frame).first_seq for frame in frames] == ([0, 2, 4] if error is None else [2, 4])
    await publisher.close()
    await plane.close()
