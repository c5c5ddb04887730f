"""Background tasks: kept, told of when they fail, ended together."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from kvrelay.core.tasks import TaskSet, end_tasks


async def test_a_failed_task_is_logged_with_its_name_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    tasks, go_on = TaskSet(), asyncio.Event()

    async def fails() -> None:
        raise ValueError("broken")

    async def goes_on() -> None:
        await go_on.wait()

    other = tasks.spawn(goes_on())
    with caplog.at_level(logging.ERROR):
        failed = tasks.spawn(fails())
        await asyncio.wait([failed])
    assert [(record.exc_info is not None, "fails failed" in record.message) for record in caplog.records] == [
        (True, True)
    ]
    assert list(tasks) == [other]
    go_on.set()
    await tasks.wait()
    assert len(tasks) == 0
    assert not other.cancelled()


async def test_a_task_is_not_garbage_collected() -> None:
    tasks, ended = TaskSet(), asyncio.Event()

    async def waits_for_itself() -> None:
        # Only the future knows the task, and only the task the future.
        await asyncio.wait_for(asyncio.get_running_loop().create_future(), None)

    task = tasks.spawn(waits_for_itself())
    task.add_done_callback(lambda _: ended.set())
    del task
    await asyncio.sleep(0)
    gc.collect()
    assert len(tasks) == 1
    assert not ended.is_set()
    await tasks.close()
    assert ended.is_set()


async def test_wait_lasts_until_what_is_spawned_meanwhile_has_ended() -> None:
    tasks = TaskSet()
    ended: list[str] = []

    async def second() -> None:
        await asyncio.sleep(0)
        ended.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        tasks.spawn(second())
        ended.append("first")

    tasks.spawn(first())
    await tasks.wait()
    assert ended == ["first", "second"]


async def test_close_returns_when_the_tasks_have_cleaned_up(caplog: pytest.LogCaptureFixture) -> None:
    tasks = TaskSet()
    ended: list[int] = []

    async def cleans_up(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    for number in range(3):
        tasks.spawn(cleans_up(number))
    await asyncio.sleep(0)
    await tasks.close()
    assert sorted(ended) == [0, 1, 2]
    assert not caplog.records


async def test_a_task_that_swallows_its_cancellation_does_not_keep_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``asyncio.wait_for`` in 3.11 does with one that arrives together with the result."""
    monkeypatch.setattr("kvrelay.core.tasks.CANCEL_INTERVAL_S", 0.01)
    tasks = TaskSet()
    num_swallowed = 0

    async def loops() -> None:
        nonlocal num_swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if num_swallowed == 2:
                    raise
                num_swallowed += 1

    task = tasks.spawn(loops())
    await asyncio.sleep(0)
    await tasks.close()
    assert task.cancelled()
    assert num_swallowed == 2


async def test_ending_a_task_that_fails_meanwhile_raises_nothing() -> None:
    async def fails() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("broken")

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert isinstance(task.exception(), ValueError)
