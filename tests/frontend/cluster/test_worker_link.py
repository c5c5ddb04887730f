"""A lost connection tells its requests in order, a few per turn of the loop, and forgets none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.contracts.waiting import eventually

from kvrelay.config import WorkerRole
from kvrelay.core.clock import ManualClock
from kvrelay.core.handoff import HandoffOrder
from kvrelay.core.messages import GenerateRequest, RequestRefused, TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.token_ids import to_bytes
from kvrelay.core.workers import WorkerInfo
from kvrelay.frontend.cluster.worker_link import LOSS_TURN_S, WorkerLink
from kvrelay.rpc.wire import Message

NUM_REQUESTS = 200
PER_TURN = 4


class Client:
    """A connection that ``lose`` ends."""

    is_connected = True

    def __init__(self) -> None:
        self.lose: Callable[[], None] = lambda: None

    def on_message(self, handler: Callable[[Message], None]) -> None: ...

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        self.lose = handler

    def send(self, message: Message) -> None: ...

    async def close(self) -> None:
        self.is_connected = False


class Receivers:
    """Requests on one connection. Moving one takes a part of a turn by the clock's hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.client = Client()
        info = WorkerInfo(
            worker_id="w",
            epoch=1,
            role=WorkerRole.DECODE,
            model="tiny",
            model_path="",
            address="tcp://loopback:1",
            max_model_len=512,
            block_size=16,
            num_blocks=100,
            vocab_size=400,
            kv_compatibility="x",
        )
        self.link = WorkerLink(info, self.client, self.clock.now)  # type: ignore[arg-type]
        self.told: list[int] = []
        self.broken: list[int] = []
        self.defect_at: int | None = None
        for number in range(NUM_REQUESTS):
            request = GenerateRequest(
                str(number), "w", to_bytes((1, 2)), SamplingParams(), order=HandoffOrder.DECODE_FIRST
            )
            self.link.submit(request, _Receiver(self, number))


class _Receiver:
    def __init__(self, all_of: Receivers, number: int) -> None:
        self._all, self._number = all_of, number

    def deliver(self, output: TokenOutput, now_s: float) -> None:
        raise NotImplementedError

    def refused(self, refusal: RequestRefused) -> None:
        raise NotImplementedError

    def worker_lost(self, worker_id: str) -> None:
        self._all.clock.advance(LOSS_TURN_S / (PER_TURN - 0.5))
        if self._number == self._all.defect_at:
            raise ZeroDivisionError
        self._all.told.append(self._number)

    def broken(self) -> None:
        self._all.broken.append(self._number)


async def test_requests_are_told_in_order_and_a_few_per_turn() -> None:
    one = Receivers()
    one.client.lose()
    assert one.told == list(range(PER_TURN))
    assert not one.link.is_open
    per_turn, before = [], PER_TURN
    while len(one.told) < NUM_REQUESTS:
        await asyncio.sleep(0)
        per_turn.append(len(one.told) - before)
        before = len(one.told)
    assert one.told == list(range(NUM_REQUESTS))
    assert max(per_turn) <= PER_TURN
    assert one.link.num_requests == 0


async def test_a_request_that_ends_meanwhile_is_not_told() -> None:
    one = Receivers()
    one.client.lose()
    one.link.abort(str(NUM_REQUESTS - 1))
    one.link.release(str(NUM_REQUESTS - 2))
    await one.link.close()
    assert one.told == list(range(NUM_REQUESTS - 2))


async def test_one_requests_defect_does_not_keep_the_others() -> None:
    one = Receivers()
    one.defect_at = PER_TURN + 1
    one.client.lose()
    await eventually(lambda: one.link.num_requests == 0)
    assert one.told == [number for number in range(NUM_REQUESTS) if number != one.defect_at]
    assert one.broken == [one.defect_at]


async def test_closing_returns_when_all_are_told() -> None:
    one = Receivers()
    await one.link.close()
    assert one.told == list(range(NUM_REQUESTS))


async def test_a_close_that_is_cancelled_forgets_none() -> None:
    one = Receivers()
    closing = asyncio.create_task(one.link.close())
    while not one.told:
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert one.told == list(range(NUM_REQUESTS))
