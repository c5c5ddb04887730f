"""What every EventBus does. A subclass brings the fixture ``open_server``; see ``BusServer``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pytest
from tests.contracts.waiting import eventually
from tests.patience import PATIENCE_S

from kvrelay.control.base import EventBus
from kvrelay.errors import ControlUnavailableError, RetryElsewhereError


class BusServer(Protocol):
    """A server that may be taken away."""

    async def connect(self) -> EventBus:
        """As another process."""

    async def go_away(self) -> None: ...

    async def come_back(self, *, is_wiped: bool) -> None: ...


OpenServer = Callable[[], AbstractAsyncContextManager[BusServer]]


async def collect(bus: EventBus, subject: str) -> list[tuple[str, bytes]]:
    received: list[tuple[str, bytes]] = []
    await bus.subscribe(subject, lambda name, data: received.append((name, data)))
    return received


class EventBusContract:
    """The suite."""

    def test_events_arrive_in_order_at_every_subscriber(self, open_server: OpenServer) -> None:
        async def scenario(server: BusServer) -> None:
            one, two, three = await server.connect(), await server.connect(), await server.connect()
            at_two, at_three = await collect(two, "k.ns.load.*"), await collect(three, "k.ns.load.*")
            sent = [("k.ns.load.w1", str(number).encode()) for number in range(200)]
            for subject, data in sent:
                await one.publish(subject, data)
            await eventually(lambda: len(at_two) == len(at_three) == 200)
            assert at_two == at_three == sent

        run(open_server, scenario)

    def test_subjects_match_by_token(self, open_server: OpenServer) -> None:
        async def scenario(server: BusServer) -> None:
            one, two = await server.connect(), await server.connect()
            exact, star, tail = await collect(two, "a.b.c"), await collect(two, "a.*.c"), await collect(two, "a.b.>")
            for subject in ("a.b.c", "a.x.c", "a.b", "a.b.c.d", "a.bb.c", "z"):
                await one.publish(subject, b"")
            await one.publish("a.b.c", b"end")
            await eventually(lambda: exact[-1:] == star[-1:] == tail[-1:] == [("a.b.c", b"end")])
            assert [name for name, _ in exact] == ["a.b.c", "a.b.c"]
            assert [name for name, _ in star] == ["a.b.c", "a.x.c", "a.bb.c", "a.b.c"]
            assert [name for name, _ in tail] == ["a.b.c", "a.b.c.d", "a.b.c"]

        run(open_server, scenario)

    def test_unsubscribing_ends_it(self, open_server: OpenServer) -> None:
        async def scenario(server: BusServer) -> None:
            one = await server.connect()
            received: list[bytes] = []
            subscription = await one.subscribe("a", lambda _, data: received.append(data))
            kept = await collect(one, "a")
            await one.publish("a", b"1")
            await eventually(lambda: len(kept) == 1)
            await subscription.unsubscribe()
            await one.publish("a", b"2")
            await eventually(lambda: len(kept) == 2)
            assert received == [b"1"]

        run(open_server, scenario)

    def test_requests_are_answered(self, open_server: OpenServer) -> None:
        async def scenario(server: BusServer) -> None:
            one, two = await server.connect(), await server.connect()

            async def double(data: bytes) -> bytes:
                await asyncio.sleep(0.05)
                return data * 2

            service = await two.serve("double", double)
            answers = await asyncio.gather(*(one.request("double", bytes([n]), PATIENCE_S) for n in range(20)))
            assert answers == [bytes([n, n]) for n in range(20)]
            await service.unsubscribe()
            with pytest.raises(RetryElsewhereError):
                await one.request("double", b"x", 0.5)

        run(open_server, scenario)

    def test_a_failed_or_slow_service_is_an_error(self, open_server: OpenServer) -> None:
        async def scenario(server: BusServer) -> None:
            one, two = await server.connect(), await server.connect()

            async def fail(data: bytes) -> bytes:
                raise RetryElsewhereError("too old\nby far")

            async def hang(data: bytes) -> bytes:
                await asyncio.sleep(60.0)
                return data

            await two.serve("fail", fail)
            hanging = await two.serve("hang", hang)
            with pytest.raises(RetryElsewhereError, match="too old"):
                await one.request("fail", b"", PATIENCE_S)
            with pytest.raises(RetryElsewhereError):
                await one.request("hang", b"", 0.1)
            with pytest.raises(RetryElsewhereError):
                await one.request("nobody", b"", 0.1)
            await hanging.unsubscribe()

        run(open_server, scenario)

    @pytest.mark.parametrize("is_wiped", [False, True])
    def test_subscriptions_come_back(self, open_server: OpenServer, is_wiped: bool) -> None:
        async def scenario(server: BusServer) -> None:
            one, two = await server.connect(), await server.connect()
            received = await collect(two, "a")
            await server.go_away()
            await asyncio.sleep(0.1)
            with pytest.raises(ControlUnavailableError):
                await one.publish("a", b"lost")
            with pytest.raises(ControlUnavailableError):
                await one.request("a", b"lost", 0.5)
            await server.come_back(is_wiped=is_wiped)
            async with asyncio.timeout(PATIENCE_S):
                while not received:
                    with contextlib.suppress(ControlUnavailableError):
                        await one.publish("a", b"again")
                    await asyncio.sleep(0.02)
            assert set(received) == {("a", b"again")}

        run(open_server, scenario)


def run(open_server: OpenServer, scenario: Callable[[BusServer], Awaitable[None]]) -> None:
    """Play a scenario with a server of its own."""

    async def play() -> None:
        async with open_server() as server:
            await scenario(server)

    asyncio.run(play())
