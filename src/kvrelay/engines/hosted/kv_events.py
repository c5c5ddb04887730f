"""Subscribes to the cache events that vLLM publishes over ZMQ, and requests a replay of missed ones.

    SUB    <── [topic, number (u64), batch]                        the numbers have no gaps
    DEALER ──> ["", first number]   <── ["", topic, number, batch] ...   until number -1

Without a replay endpoint, or if the server no longer has the missed events, all known blocks are forgotten: later
events rebuild the state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from kvrelay.core.events import KvEvent
from kvrelay.engines.hosted.cache import EventsError, MirroredCache

_log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 1.0
MAX_FRAME_BYTES = 64 << 20
END = 2**64 - 1
"""The number -1 after the last batch of a replay."""


class KvEventReader(msgspec.Struct, eq=False):
    """Keeps ``cache`` equal to the server's. ``on_events`` gets the changes, in the event loop that runs ``run``."""

    _endpoint: str
    _replay_endpoint: str
    _cache: MirroredCache
    _on_events: Callable[[list[KvEvent]], None]
    _next: int = 0
    """Number of the next batch."""

    async def run(self) -> None:
        """Until cancelled. A server that was started again counts from 0: its cache is empty then."""
        context = zmq.asyncio.Context()
        try:
            while True:
                try:
                    await self._read(context)
                except (EventsError, zmq.ZMQError) as exc:
                    _log.warning("cache events of %s: %s; forgetting the known blocks", self._endpoint, exc)
                    self._forget()
                    await asyncio.sleep(RETRY_INTERVAL_S)
        finally:
            context.destroy(linger=0)

    async def _read(self, context: zmq.asyncio.Context) -> None:
        with context.socket(zmq.SUB) as subscriber:
            _prepare(subscriber, self._endpoint)
            subscriber.connect(self._endpoint)
            subscriber.subscribe(b"")
            if self._replay_endpoint:
                self._forget()
                await self._replay(context, 0)
            latest = -1
            while True:
                number, payload = _numbered(await subscriber.recv_multipart())
                if number <= latest:
                    # The server was started again.
                    self._forget()
                    self._next = number
                latest = number
                if number > self._next:
                    await self._missed(context, number)
                # A replay may have contained it already.
                if number >= self._next:
                    self._apply(number, payload)

    async def _missed(self, context: zmq.asyncio.Context, number: int) -> None:
        """Batch ``number`` came, and an earlier one is due."""
        if self._replay_endpoint:
            await self._replay(context, self._next)
        if self._next < number:
            _log.warning("cache events %d to %d of %s are lost", self._next, number - 1, self._endpoint)
            self._forget()
            self._next = number

    async def _replay(self, context: zmq.asyncio.Context, first: int) -> None:
        """Request the batches from ``first`` on. If the server does not answer, nothing changes."""
        with context.socket(zmq.DEALER) as asking:
            _prepare(asking, self._replay_endpoint)
            asking.connect(self._replay_endpoint)
            try:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    await asking.send_multipart([b"", first.to_bytes(8, "big")])
                    while True:
                        number, payload = _numbered((await asking.recv_multipart())[1:])
                        if number == END:
                            return
                        if number > self._next:
                            self._forget()
                        if number >= self._next:
                            self._apply(number, payload)
            except TimeoutError:
                _log.warning("%s does not replay cache events", self._replay_endpoint)

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._tell(self._cache.apply(payload))

    def _forget(self) -> None:
        self._next = 0
        self._tell(self._cache.clear())

    def _tell(self, events: list[KvEvent]) -> None:
        if events:
            self._on_events(events)


def _prepare(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RCVHWM, 100_000)


def _numbered(frames: list[bytes]) -> tuple[int, bytes]:
    """Number and batch. The topic before them is left out of replays by older versions."""
    if len(frames) not in (2, 3) or len(frames[-2]) != 8:
        raise EventsError(f"a message of {len(frames)} parts")
    return int.from_bytes(frames[-2], "big"), frames[-1]
