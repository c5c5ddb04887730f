"""Publish/subscribe and request/reply on core NATS: at most once, nothing is stored.

It owns subscriptions and the error header that tells a caller that a service failed. Subscriptions are renewed after a
gap; messages published during the gap are lost, as the contract says.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec

from kvrelay.control.base import Subscription
from kvrelay.control.nats.connection import (
    NatsConnection,
    NatsMessage,
    NatsSubscription,
    NoRespondersError,
    RequestTimeoutError,
)
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import ControlUnavailableError, KvrelayError, RetryElsewhereError

_log = logging.getLogger(__name__)

ERROR_HEADER = "Kvrelay-Error"
MAX_CONCURRENT_REQUESTS = 256
"""Per service; more are refused."""


class NatsEventSubscription(msgspec.Struct, frozen=True):
    """A subscription, with its answers in flight."""

    connection: NatsConnection
    subscription: NatsSubscription
    tasks: TaskSet

    async def unsubscribe(self) -> None:
        await self.connection.unsubscribe(self.subscription)
        await self.tasks.close()


class NatsEventBus:
    """EventBus over one connection."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection

    async def publish(self, subject: str, data: bytes) -> None:
        await self._connection.publish(subject, data)

    async def subscribe(self, subject: str, handler: Callable[[str, bytes], None]) -> Subscription:
        async def receive(message: NatsMessage) -> None:
            handler(message.subject, message.data)

        return await self._subscribe(subject, receive, TaskSet())

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        try:
            reply = await self._connection.request(subject, data, timeout_s=timeout_s)
        except NoRespondersError as exc:
            raise RetryElsewhereError(f"no service answers {subject}") from exc
        except RequestTimeoutError as exc:
            raise RetryElsewhereError(f"no answer to {subject} in {timeout_s:g} s") from exc
        error = (reply.headers or {}).get(ERROR_HEADER)
        if error is not None:
            raise RetryElsewhereError(f"{subject} failed: {error}")
        return reply.data

    async def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> Subscription:
        tasks = TaskSet()

        async def receive(message: NatsMessage) -> None:
            if len(tasks) >= MAX_CONCURRENT_REQUESTS:
                await self._connection.publish(message.reply, b"", headers={ERROR_HEADER: "too many requests"})
                return
            tasks.spawn(self._answer(message, handler))

        return await self._subscribe(subject, receive, tasks, queue="service")

    async def _subscribe(
        self, subject: str, receive: Callable[[NatsMessage], Awaitable[None]], tasks: TaskSet, queue: str = ""
    ) -> NatsEventSubscription:
        """The server knows of it. If that is not certain in time, there is none: the caller may try again."""
        subscription = NatsEventSubscription(
            self._connection, await self._connection.subscribe(subject, receive, queue=queue), tasks
        )
        try:
            await self._connection.flush()
        except BaseException:
            await subscription.unsubscribe()
            raise
        return subscription

    async def _answer(self, message: NatsMessage, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        try:
            try:
                await self._connection.publish(message.reply, await handler(message.data))
            except KvrelayError as exc:  # also of an answer that is too large
                error = " ".join(str(exc).split())
                await self._connection.publish(message.reply, b"", headers={ERROR_HEADER: error})
        except ControlUnavailableError as exc:
            _log.debug("sending an answer on %s failed: %s", message.subject, exc)
