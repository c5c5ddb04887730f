"""What comes too late for its pull goes back; no pull waits for a server that has forgotten it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import pytest
from tests.contracts.waiting import eventually

from kvrelay.control.nats.pulls import GIVE_BACK, Pulls

WAIT_S = 60.0


@dataclass
class Message:
    reply: str
    headers: Mapping[str, str] | None = None


@dataclass
class Connection:
    """Keeps what is published. ``drain`` ends when the test lets it."""

    published: list[tuple[str, bytes]] = field(default_factory=list)
    handler: Callable[[Message], Awaitable[None]] | None = None
    num_inboxes: int = 0
    num_unsubscribed: int = 0
    may_drain: asyncio.Event = field(default_factory=asyncio.Event)

    def new_inbox(self) -> str:
        self.num_inboxes += 1
        return f"inbox {self.num_inboxes}"

    def check_connected(self) -> None:
        pass

    async def subscribe(self, subject: str, handler: Callable[[Message], Awaitable[None]]) -> str:
        self.handler = handler
        return "subscription"

    async def unsubscribe(self, subscription: str) -> None:
        self.num_unsubscribed += 1

    async def drain(self, subscription: str) -> None:
        await self.may_drain.wait()
        self.num_unsubscribed += 1

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        self.published.append((subject, data))

    async def arrive(self, *messages: Message) -> None:
        assert self.handler is not None
        for message in messages:
            await self.handler(message)

    @property
    def given_back(self) -> list[str]:
        return [subject for subject, data in self.published if data == GIVE_BACK]


def status(code: str) -> Message:
    return Message("", {"Status": code})


async def waiting() -> tuple[Connection, Pulls, asyncio.Task[tuple[object, bool]]]:
    """A pull whose request has been sent."""
    connection = Connection()
    pulls = Pulls(connection, "s")  # type: ignore[arg-type]
    task = asyncio.create_task(pulls.next("a", WAIT_S))
    await eventually(lambda: len(connection.published) == 1)
    return connection, pulls, task


async def ended(connection: Connection, pulls: Pulls) -> None:
    connection.may_drain.set()
    await pulls.close()
    assert connection.num_unsubscribed == 1


async def test_the_server_holds_the_request_until_a_message_comes() -> None:
    connection, pulls, task = await waiting()
    ((subject, data),) = connection.published
    assert subject == "$JS.API.CONSUMER.MSG.NEXT.s.a"
    assert msgspec.json.decode(data)["expires"] == WAIT_S * 1e9
    await connection.arrive(Message("first"))
    assert await task == (Message("first"), True)
    await ended(connection, pulls)
    assert connection.given_back == []


async def test_what_arrives_for_a_cancelled_pull_goes_back() -> None:
    connection, pulls, task = await waiting()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await connection.arrive(Message("late"))
    await ended(connection, pulls)
    assert connection.given_back == ["late"]


async def test_an_inbox_serves_pull_after_pull() -> None:
    """A server has one subscription less to make and to forget for each entry."""
    connection, pulls, task = await waiting()
    for number in range(3):
        await connection.arrive(Message(f"m{number}"))
        assert await task == (Message(f"m{number}"), True)
        task = asyncio.create_task(pulls.next("a", WAIT_S))
        await eventually(lambda number=number: len(connection.published) == number + 2)
    await connection.arrive(status("408"))
    assert await task == (None, True)
    assert (connection.num_inboxes, connection.num_unsubscribed) == (1, 0)
    await ended(connection, pulls)


async def test_a_later_pull_never_gets_what_an_abandoned_one_asked_for() -> None:
    connection, pulls, task = await waiting()
    abandoned = connection.handler
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    task = asyncio.create_task(pulls.next("a", WAIT_S))
    await eventually(lambda: len(connection.published) == 2)
    assert abandoned is not None
    await abandoned(Message("late"))
    await connection.arrive(Message("next"))
    assert await task == (Message("next"), True)
    connection.may_drain.set()
    await pulls.close()
    assert connection.given_back == ["late"]
    assert connection.num_unsubscribed == connection.num_inboxes == 2


@pytest.mark.parametrize(("code", "is_sound"), [("404", True), ("408", True), ("409", False), ("503", False)])
async def test_a_status_ends_the_wait(code: str, is_sound: bool) -> None:
    connection, pulls, task = await waiting()
    await connection.arrive(status(code))
    assert await task == (None, is_sound)
    await ended(connection, pulls)
    assert connection.given_back == []


async def test_no_wait_outlives_the_connection() -> None:
    """The server may have forgotten who waits."""
    connection, pulls, task = await waiting()
    pulls.interrupt()
    assert await task == (None, True)
    await ended(connection, pulls)
