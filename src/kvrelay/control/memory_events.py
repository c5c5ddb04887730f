"""The in-memory plane's events. Subscribers are called on the next turn of the event loop; services are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from kvrelay.control.base import Subscription
from kvrelay.errors import KvrelayError, RetryElsewhereError

T = TypeVar("T")


class Connected(Protocol):
    """A process that may be cut off from the network."""

    @property
    def is_connected(self) -> bool: ...

    def check_connected(self) -> None:
        """Raises ControlUnavailableError."""


class _Listener(msgspec.Struct, Generic[T], eq=False):
    """``handler`` hears what is sent to ``subject``, which a subscriber's may match by a pattern."""

    plane: Connected
    subject: str
    handler: T


class MemoryExchange:
    """The server's side: the subscriptions."""

    def __init__(self) -> None:
        self.subscribers: list[_Listener[Callable[[str, bytes], None]]] = []
        self.services: list[_Listener[Callable[[bytes], Awaitable[bytes]]]] = []

    def forget(self, plane: Connected) -> None:
        """A process has left."""
        self.subscribers = [item for item in self.subscribers if item.plane is not plane]
        self.services = [item for item in self.services if item.plane is not plane]


class MemorySubscription(msgspec.Struct):
    """A subscription that ``end`` ends."""

    end: Callable[[], None]

    async def unsubscribe(self) -> None:
        self.end()


class MemoryEventBus:
    """One process's EventBus."""

    def __init__(self, plane: Connected, exchange: MemoryExchange) -> None:
        self._plane = plane
        self._exchange = exchange

    async def publish(self, subject: str, data: bytes) -> None:
        self._plane.check_connected()
        for subscriber in self._exchange.subscribers:
            if subscriber.plane.is_connected and subject_matches(subscriber.subject, subject):
                asyncio.get_running_loop().call_soon(self._deliver, subscriber, subject, data)

    async def subscribe(self, subject: str, handler: Callable[[str, bytes], None]) -> Subscription:
        self._plane.check_connected()
        subscriber = _Listener(self._plane, subject, handler)
        self._exchange.subscribers.append(subscriber)
        return MemorySubscription(lambda: _remove(self._exchange.subscribers, subscriber))

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        self._plane.check_connected()
        for service in self._exchange.services:
            if service.plane.is_connected and service.subject == subject:
                break
        else:
            raise RetryElsewhereError(f"no service answers {subject}")
        try:
            async with asyncio.timeout(timeout_s):
                return await service.handler(data)
        except TimeoutError as exc:
            raise RetryElsewhereError(f"no answer to {subject} in {timeout_s:g} s") from exc
        except KvrelayError as exc:
            raise RetryElsewhereError(f"{subject} failed: {exc}") from exc

    async def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> Subscription:
        self._plane.check_connected()
        service = _Listener(self._plane, subject, handler)
        self._exchange.services.append(service)
        return MemorySubscription(lambda: _remove(self._exchange.services, service))

    def _deliver(self, subscriber: _Listener[Callable[[str, bytes], None]], subject: str, data: bytes) -> None:
        if subscriber in self._exchange.subscribers:
            subscriber.handler(subject, data)


def subject_matches(pattern: str, subject: str) -> bool:
    """NATS's rule: ``*`` is one token, a last ``>`` is one token or more."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        if len(given) < len(wanted):
            return False
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(token in ("*", other) for token, other in zip(wanted, given))


def _remove(items: list[T], item: T) -> None:
    if item in items:
        items.remove(item)
