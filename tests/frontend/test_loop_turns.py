"""Large work on the event loop: a bounded amount per turn, the shortest first, rests between turns, none forgotten."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.frontend.doubles import Script, running
from tests.frontend.raw_http import RawClient, request_bytes

from kvrelay.frontend import loop_turns
from kvrelay.frontend.loop_turns import TURN_COST, LoopTurns

LARGE = TURN_COST // 2 + 1


class LoopCounter:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.now = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.now += 1


@asynccontextmanager
async def counting() -> AsyncIterator[LoopCounter]:
    counter = LoopCounter()
    task = asyncio.create_task(counter.run())
    yield counter
    task.cancel()


async def test_a_turn_does_no_more_than_it_has_room_for() -> None:
    turns, done_at = LoopTurns(), []

    async def work(cost: int) -> None:
        await turns.take(cost)
        done_at.append(counter.now)

    async with counting() as counter:
        await asyncio.gather(*(work(LARGE) for _ in range(20)), *(work(TURN_COST // 4) for _ in range(40)))
    assert turns.num_turns >= 20 * LARGE // TURN_COST
    for turn in set(done_at):
        # Work is woken until the turn is full, so the last one may go beyond.
        assert done_at.count(turn) <= 4
    assert len(done_at) == 60


async def test_work_that_fits_does_not_wait() -> None:
    turns = LoopTurns()
    coroutines = [turns.take(TURN_COST // 4) for _ in range(4)]
    for coroutine in coroutines:
        with pytest.raises(StopIteration):
            coroutine.send(None)


async def test_any_cost_is_possible_in_an_empty_turn() -> None:
    turns = LoopTurns()
    async with asyncio.timeout(60):
        for _ in range(3):
            await turns.take(100 * TURN_COST)


async def test_short_work_goes_before_long_work_that_waits() -> None:
    turns, order = LoopTurns(), []

    async def work(name: str, cost: int) -> None:
        await turns.take(cost)
        order.append(name)

    await turns.take(TURN_COST)
    long = [asyncio.create_task(work("long", LARGE)) for _ in range(20)]
    await asyncio.sleep(0)
    short = asyncio.create_task(work("short", 1024))
    await asyncio.gather(*long, short)
    # The first long one has a turn of its own before the short one arrives.
    assert order.index("short") <= 1


async def test_cancelled_work_takes_nobodys_turn() -> None:
    turns, order = LoopTurns(), []

    async def work(name: int) -> None:
        await turns.take(TURN_COST)
        order.append(name)

    tasks = [asyncio.create_task(work(number)) for number in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1:5]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 5]
    await turns.take(TURN_COST)


async def test_the_loop_rests_for_as_long_as_it_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, rests_s = 0.0, []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def at_once(delay_s: float, callback: object, *args: object) -> object:
        rests_s.append(delay_s)
        return call_later(0, callback, *args)  # type: ignore[arg-type]

    turns = LoopTurns(lambda: now_s)

    async def work(seconds: float) -> None:
        nonlocal now_s
        await turns.take(TURN_COST)
        now_s += seconds

    monkeypatch.setattr(loop, "call_later", at_once)
    await asyncio.gather(work(1.0), work(2.0), work(4.0))
    monkeypatch.undo()
    # After the last one nothing waits, and nothing rests.
    assert rests_s == [1.0, 2.0]


async def test_a_chat_passes_a_burst_of_long_prompts(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over real sockets: all has arrived before the frontend reads any of it, the chat last."""
    monkeypatch.setattr(loop_turns, "TURN_COST", 1)
    num_long = 30
    async with running(model_dir, Script((10,))) as cluster:
        assert cluster.frontend is not None
        await cluster.register(cluster.workers["w0"], max_model_len=8192)
        model = cluster.frontend.cluster.model(None)
        await cluster.until(lambda: model.max_model_len == 8192)
        clients = [await RawClient.connect(cluster.frontend.port) for _ in range(num_long + 1)]
        await cluster.until(lambda: len(cluster.frontend.server.connections) == num_long + 1)
        for client, length in zip(clients, [6000] * num_long + [30]):
            body = json.dumps({"prompt": [5] * length, "max_tokens": 1}).encode()
            client.writer.write(request_bytes("POST", "/v1/completions", body))
        answers = [await client.read_answer() for client in clients]
        assert [answer.status for answer in answers] == [200] * (num_long + 1)
        lengths = [len(request.prompt_token_ids) for request in cluster.workers["w0"].requests]
        assert lengths.count(30) == 1
        assert lengths.index(30) <= 1
        for client in clients:
            await client.close()
