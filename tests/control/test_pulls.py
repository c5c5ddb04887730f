"""One pull from several consumers: what is not taken goes back; no pull waits for a server that has forgotten it."""

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
    num_unsubscribed: int = 0
    may_drain: asyncio.Event = field(default_factory=asyncio.Event)

    def new_inbox(self) -> str:
        return "inbox"

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


async def waiting(consumers: list[str]) -> tuple[Connection, Pulls, asyncio.Task[tuple[object, bool]]]:
    """A pull whose requests have been sent."""
    connection = Connection()
    pulls = Pulls(connection, "s")  # type: ignore[arg-type]
    task = asyncio.create_task(pulls.next(consumers, WAIT_S))
    await eventually(lambda: len(connection.published) == len(consumers))
    return connection, pulls, task


async def test_every_consumer_is_asked_once_and_the_server_holds_the_request() -> None:
    connection, pulls, task = await waiting(["a", "b"])
    assert [subject for subject, _ in connection.published] == [
        "$JS.API.CONSUMER.MSG.NEXT.s.a",
        "$JS.API.CONSUMER.MSG.NEXT.s.b",
    ]
    assert all(msgspec.json.decode(data)["expires"] == WAIT_S * 1e9 for _, data in connection.published)
    await connection.arrive(Message("first"))
    message, is_sound = await task
    assert (message, is_sound) == (Message("first"), True)
    connection.may_drain.set()
    await pulls.close()
    assert (connection.given_back, connection.num_unsubscribed) == ([], 1)


async def test_of_several_that_arrive_together_the_first_is_taken_and_the_others_go_back() -> None:
    connection, pulls, task = await waiting(["a", "b", "c"])
    await connection.arrive(Message("first"), Message("second"))
    message, _ = await task
    assert message == Message("first")
    await connection.arrive(Message("third"))
    connection.may_drain.set()
    await pulls.close()
    assert connection.given_back == ["second", "third"]


async def test_what_arrives_for_a_cancelled_pull_goes_back() -> None:
    connection, pulls, task = await waiting(["a", "b"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await connection.arrive(Message("late"))
    connection.may_drain.set()
    await pulls.close()
    assert connection.given_back == ["late"]


async def test_a_wait_ends_when_every_consumer_has_said_that_it_has_nothing() -> None:
    connection, pulls, task = await waiting(["a", "b"])
    await connection.arrive(status("408"))
    assert not task.done()
    await connection.arrive(status("404"))
    assert await task == (None, True)
    connection.may_drain.set()
    await pulls.close()


@pytest.mark.parametrize("code", ["409", "503"])
async def test_a_consumer_in_trouble_ends_the_wait_for_all(code: str) -> None:
    connection, pulls, task = await waiting(["a", "b"])
    await connection.arrive(status(code))
    assert await task == (None, False)
    connection.may_drain.set()
    await pulls.close()


async def test_no_wait_outlives_the_connection() -> None:
    """The server may have forgotten who waits."""
    connection, pulls, task = await waiting(["a", "b"])
    pulls.interrupt()
    assert await task == (None, True)
    connection.may_drain.set()
    await pulls.close()
