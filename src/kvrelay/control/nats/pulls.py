"""One request to JetStream consumers for one message: whichever arrives first is taken, every other one goes back.

    pull ──MSG.NEXT──> consumer, consumer, ...      all answer to one inbox
         <──message── the first is the result; a later one is returned to the queue at once
         <──status─── nothing there (404), the wait is over (408), or the consumer is in trouble (anything else)

It owns the inbox. It does not know what a message means, nor which consumers exist.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from kvrelay.control.nats.connection import NatsConnection, NatsMessage, NatsSubscription
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import ControlUnavailableError

_log = logging.getLogger(__name__)

ANSWER_MARGIN_S = 0.5
NO_MESSAGES = ("404", "408")
GIVE_BACK = b"-NAK"


class Pulls:
    """The pulls of one queue's consumers on ``stream``."""

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

    async def next(self, consumers: Sequence[str], timeout_s: float) -> tuple[NatsMessage | None, bool]:
        """One message from one of the consumers, or None; and whether each of them is as it should be.

        ``timeout_s`` 0: only what is there already. Safe to cancel: a message that arrives too late is returned to the
        queue at once. Raises ControlUnavailableError.
        """
        inbox = self._connection.new_inbox()
        pull = _Pull(len(consumers))
        subscription = await self._connection.subscribe(inbox, pull.receive)
        self._waiting.add(pull.arrived)
        try:
            request = _next_request(timeout_s)
            for consumer in consumers:
                await self._connection.publish(self._subject + consumer, request, reply=inbox)
            async with asyncio.timeout(timeout_s + ANSWER_MARGIN_S):
                # Shielded: a cancelled future could not receive the message on its way, to return it to the queue.
                pull.taken = await asyncio.shield(pull.arrived)
        except TimeoutError:
            self._connection.check_connected()
        finally:
            self._waiting.discard(pull.arrived)
            if pull.taken is not None and len(consumers) == 1:
                await self._connection.unsubscribe(subscription)
            else:
                self._background.spawn(self._end(pull, subscription))
        return pull.taken, pull.is_sound

    async def _end(self, pull: _Pull, subscription: NatsSubscription) -> None:
        try:
            # Unsubscribing ends with a round trip, after which nothing can arrive.
            await self._connection.drain(subscription)
            for message in pull.messages:
                if message is not pull.taken:
                    await self._connection.publish(message.reply, GIVE_BACK)
        except ControlUnavailableError as exc:
            _log.debug("returning a late entry to the prefill queue failed (%s); it will be delivered again", exc)


class _Pull:
    """The answers to one request. ``messages``: all that have arrived; ``taken``: the one that the caller has got."""

    def __init__(self, num_consumers: int) -> None:
        self.arrived: asyncio.Future[NatsMessage | None] = asyncio.get_running_loop().create_future()
        self.messages: list[NatsMessage] = []
        self.taken: NatsMessage | None = None
        self.is_sound = True
        self._num_silent = num_consumers

    async def receive(self, message: NatsMessage) -> None:
        status = message.headers.get("Status") if message.headers else None
        if status is None:
            self.messages.append(message)
            self._answer(message)
            return
        self._num_silent -= 1
        if status not in NO_MESSAGES:
            # 503: no such consumer; 409: the consumer was deleted, or the server is leaving.
            self.is_sound = False
        if not self._num_silent or not self.is_sound:
            self._answer(None)

    def _answer(self, message: NatsMessage | None) -> None:
        if not self.arrived.done():
            self.arrived.set_result(message)


def _next_request(timeout_s: float) -> bytes:
    if timeout_s <= 0:
        return msgspec.json.encode({"batch": 1, "no_wait": True})
    return msgspec.json.encode({"batch": 1, "expires": int(timeout_s * 1e9)})
