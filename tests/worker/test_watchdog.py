"""A worker whose engine hangs: told, ended, and by force if need be."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest
from tests.worker.cluster import Node, cluster, expected, prompt

from kvrelay.config import WorkerRole
from kvrelay.core.clock import Clock, ManualClock, MonotonicClock
from kvrelay.engine.progress import Progress
from kvrelay.errors import EngineHungError
from kvrelay.worker import worker as worker_module
from kvrelay.worker.reporting import publisher
from kvrelay.worker.watchdog import Watchdog

WAIT_S = 20.0


def never(_: object) -> None:
    raise AssertionError("this must not be called")


def test_a_hang_is_told_once_with_the_stacks(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    progress = Progress(clock)
    said: list[object] = []
    watchdog = Watchdog(
        progress, 10.0, lambda error: said.append(error.message), clock, dump=lambda: said.append("stacks")
    )
    progress.begin()
    for _ in range(9):
        clock.advance(1.0)
        assert not watchdog.tick()
    assert watchdog.is_stalled
    assert said == []
    clock.advance(1.0)
    with caplog.at_level(logging.CRITICAL):
        assert watchdog.tick()
    assert said[0] == "stacks"
    assert said[1:] == [
        message for message in said if str(message).startswith("the engine has been at one step for 10")
    ]
    assert "--step-timeout-s 10" in caplog.text


@pytest.mark.parametrize("leaves", [True, False])
def test_a_worker_that_does_not_leave_is_ended_by_force(leaves: bool) -> None:
    progress = Progress(MonotonicClock())
    progress.begin()
    told, ended = threading.Event(), threading.Event()
    codes: list[int] = []
    watchdog = Watchdog(
        progress,
        0.05,
        lambda error: told.set() or (watchdog.stop() if leaves else None),
        MonotonicClock(),
        grace_s=0.05,
        dump=lambda: None,
        end_process=lambda code: codes.append(code) or ended.set(),
    )
    others = set(threading.enumerate())
    watchdog.start()
    (thread,) = set(threading.enumerate()) - others
    assert told.wait(WAIT_S)
    if leaves:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    else:
        assert ended.wait(WAIT_S)
    assert codes == ([] if leaves else [EngineHungError.exit_code])


def hang(node: Node) -> tuple[threading.Event, threading.Event]:
    """The next step hangs: the first event tells that it does, the second lets it go on."""
    execute = node.core.executor.execute
    entered, go_on = threading.Event(), threading.Event()

    def hanging(work: object) -> object:
        entered.set()
        go_on.wait(WAIT_S)
        return execute(work)

    node.core.executor.execute = hanging
    return entered, go_on


async def test_a_worker_whose_engine_hangs_leaves_and_its_frontends_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    watchdogs: list[Watchdog] = []

    def manual(progress: Progress, timeout_s: float, on_hang: Callable[[EngineHungError], None], _: Clock) -> Watchdog:
        """Without its thread: the test takes its ticks."""
        watchdogs.append(Watchdog(progress, 10.0, on_hang, clock, dump=lambda: None, end_process=never))
        watchdogs[-1].start = lambda: None  # type: ignore[method-assign]
        return watchdogs[-1]

    async with cluster() as c:
        with monkeypatch.context() as patch:
            patch.setattr(worker_module, "Watchdog", manual)
            node = await c.join(WorkerRole.BOTH)
        other = await c.join(WorkerRole.BOTH)
        (watchdog,) = watchdogs
        client, spared = await c.client(node), await c.client(other)
        losses: list[str] = []
        client.connection.on_disconnect(lambda: losses.append("lost"))
        entered, go_on = hang(node)
        client.send("a", prompt(20))
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        assert not watchdog.tick()  # sees the turn for the first time
        for _ in range(5):
            clock.advance(1.0)
            assert not watchdog.tick()
        assert not node.worker.is_ready
        assert losses == []
        for _ in range(4):
            clock.advance(1.0)
            assert not watchdog.tick()
        clock.advance(1.0)
        assert watchdog.tick()
        error = await c.gone(node)
        assert isinstance(error, EngineHungError)
        assert losses == ["lost"]
        listed = await other.control.discovery.list("kvrelay/default/workers/")
        assert [key.rsplit("/", 1)[1] for key in listed] == [other.id]
        spared.send("b", prompt(20))
        assert await spared.answer("b") == expected(prompt(20), 8)
        go_on.set()
        await asyncio.to_thread(node.engine.close)


async def test_load_samples_say_how_long_the_step_has_been_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "IDLE_INTERVAL_S", publisher.MIN_INTERVAL_S)
    monkeypatch.setattr(publisher, "MAX_INTERVAL_S", publisher.MIN_INTERVAL_S)
    async with cluster() as c:
        node = await c.join(WorkerRole.BOTH)
        client = await c.client(node)
        samples = await client.loads(node)
        entered, go_on = hang(node)
        client.send("a", prompt(20))
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        await c.until(lambda: bool(samples) and samples[-1].step_age_s > 0)
        await c.until(lambda: samples[-1].step_age_s > 0.5)
        go_on.set()
        assert await client.answer("a") == expected(prompt(20), 8)
        await c.until(lambda: samples[-1].step_age_s == 0)
