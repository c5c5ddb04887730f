"""A request to a JetStream consumer for one message. What arrives too late for its pull goes back.

    pull ──MSG.NEXT──> consumer
         <──message── the result; returned to the queue at once if the pull was cancelled meanwhile
         <──status─── nothing there (404), the wait is over (408), or the consumer is in trouble (anything else)

A pull asks one consumer: of two messages that arrive together one would have to go back, and the server would count
that as a failed delivery.

An inbox serves pull after pull, each of which ends with its one answer. One whose pull ended without an answer is given
up, so that the server forgets the pull and no later one gets its message.

It owns the inboxes. It does not know what a message means, nor which consumers exist.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvrelay.control.nats.connection import NatsConnection, NatsMessage, NatsSubscription
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import ControlUnavailableError

_log = logging.getLogger(__name__)

ANSWER_MARGIN_S = 0.5
NO_MESSAGES = ("404", "408")
GIVE_BACK = b"-NAK"


class _Inbox(msgspec.Struct, eq=False):
    name: str
    arrived: asyncio.Future[NatsMessage | None]
    subscription: NatsSubscription | None = None

    async def receive(self, message: NatsMessage) -> None:
        if not self.arrived.done():
            self.arrived.set_result(message)


class Pulls:
    """The pulls from the consumers of one stream."""

    def __init__(self, connection: NatsConnection, stream: str) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}."
        self._waiting: set[asyncio.Future[NatsMessage | None]] = set()
        self._free: list[_Inbox] = []
        self._background = TaskSet()

    async def close(self) -> None:
        """Return what has arrived too late."""
        await self._background.wait()
        for inbox in self._free:
            if inbox.subscription is not None:
                await self._connection.unsubscribe(inbox.subscription)
        self._free.clear()

    def interrupt(self) -> None:
        """End every wait: the server may have forgotten who waits."""
        for arrived in self._waiting:
            if not arrived.done():
                arrived.set_result(None)

    async def next(self, consumer: str, timeout_s: float) -> tuple[NatsMessage | None, bool]:
        """One message from the consumer, or None; and whether the consumer is as it should be.

        ``timeout_s`` 0: only what is there already. Safe to cancel: a message that arrives too late is returned to the
        queue at once. Raises ControlUnavailableError.
        """
        inbox = await self._open()
        arrived = inbox.arrived
        self._waiting.add(arrived)
        message = None
        try:
            await self._connection.publish(self._subject + consumer, _next_request(timeout_s), reply=inbox.name)
            async with asyncio.timeout(timeout_s + ANSWER_MARGIN_S):
                # Shielded: a cancelled future could not receive the message on its way, to return it to the queue.
                message = await asyncio.shield(arrived)
        except TimeoutError:
            self._connection.check_connected()
        finally:
            self._waiting.discard(arrived)
            if message is None:
                self._background.spawn(self._give_up(inbox))
            else:
                self._free.append(inbox)
        status = _status(message)
        # 503: no such consumer; 409: the consumer was deleted, or the server is leaving.
        return (message if status is None else None), status is None or status in NO_MESSAGES

    async def _open(self) -> _Inbox:
        """One on which nothing can arrive but the answer to the next pull."""
        arrived: asyncio.Future[NatsMessage | None] = asyncio.get_running_loop().create_future()
        if self._free:
            inbox = self._free.pop()
            inbox.arrived = arrived
        else:
            inbox = _Inbox(self._connection.new_inbox(), arrived)
            inbox.subscription = await self._connection.subscribe(inbox.name, inbox.receive)
        return inbox

    async def _give_up(self, inbox: _Inbox) -> None:
        assert inbox.subscription is not None
        try:
            # Unsubscribing ends with a round trip, after which nothing can arrive.
            await self._connection.drain(inbox.subscription)
            late = inbox.arrived.result() if inbox.arrived.done() else None
            if late is not None and _status(late) is None:
                await self._connection.publish(late.reply, GIVE_BACK)
        except ControlUnavailableError as exc:
            _log.debug("returning a late entry to the prefill queue failed (%s); it will be delivered again", exc)


def _status(message: NatsMessage | None) -> str | None:
    """The server's own word instead of a message; None for a message."""
    return message.headers.get("Status") if message is not None and message.headers else None


def _next_request(timeout_s: float) -> bytes:
    if timeout_s <= 0:
        return msgspec.json.encode({"batch": 1, "no_wait": True})
    return msgspec.json.encode({"batch": 1, "expires": int(timeout_s * 1e9)})
