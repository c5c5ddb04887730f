"""A request to a JetStream consumer for one message. What arrives too late for its pull goes back.

    pull ──MSG.NEXT──> consumer
         <──message── the result; returned to the queue at once if the pull was cancelled meanwhile
         <──status─── nothing there (404), the wait is over (408), or the consumer is in trouble (anything else)

A pull asks one consumer: of two messages that arrive together one would have to go back, and the server would count
that as a failed delivery.

It owns the inbox. It does not know what a message means, nor which consumers exist.
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


class Pulls:
    """The pulls from the consumers of one stream."""

    def __init__(self, connection: NatsConnection, stream: str) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}."
        self._waiting: set[asyncio.Future[NatsMessage | None]] = set()
        self._background = TaskSet()

    async def close(self) -> None:
        """Return what has arrived too late."""
        await self._background.wait()

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
        inbox = self._connection.new_inbox()
        arrived: asyncio.Future[NatsMessage | None] = asyncio.get_running_loop().create_future()

        async def receive(message: NatsMessage) -> None:
            if not arrived.done():
                arrived.set_result(message)

        subscription = await self._connection.subscribe(inbox, receive)
        self._waiting.add(arrived)
        message = None
        try:
            await self._connection.publish(self._subject + consumer, _next_request(timeout_s), reply=inbox)
            async with asyncio.timeout(timeout_s + ANSWER_MARGIN_S):
                # Shielded: a cancelled future could not receive the message on its way, to return it to the queue.
                message = await asyncio.shield(arrived)
        except TimeoutError:
            self._connection.check_connected()
        finally:
            self._waiting.discard(arrived)
            if message is None:
                self._background.spawn(self._give_back(subscription, arrived))
            else:
                await self._connection.unsubscribe(subscription)
        status = _status(message)
        # 503: no such consumer; 409: the consumer was deleted, or the server is leaving.
        return (message if status is None else None), status is None or status in NO_MESSAGES

    async def _give_back(self, subscription: NatsSubscription, arrived: asyncio.Future[NatsMessage | None]) -> None:
        try:
            # Unsubscribing ends with a round trip, after which nothing can arrive.
            await self._connection.drain(subscription)
            late = arrived.result() if arrived.done() else None
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
