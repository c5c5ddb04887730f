"""Callbacks for an engine's thread, from any thread, and the results that their callers wait for.

It does not know when the callbacks run: the host takes them out between two steps. After the engine's end every caller
gets an error, also one that comes later.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from kvrelay.engine.contract import Engine
from kvrelay.errors import EngineDeadError

T = TypeVar("T")
EngineCallback = Callable[[Engine], object]


def _ignore(error: EngineDeadError) -> None:
    """No caller waits for the result."""


def _stay() -> None:
    """The thread waits in ``take``."""


class Entry(msgspec.Struct, frozen=True):
    """``fail`` is called instead of ``callback`` if the engine ends first."""

    callback: EngineCallback
    fail: Callable[[EngineDeadError], None] = _ignore


class EngineInbox:
    """``wake`` is called after each entry, on the thread that posts, possibly during the engine's end."""

    def __init__(self, wake: Callable[[], None] = _stay) -> None:
        self._wake = wake
        self._entries: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._dead: EngineDeadError | None = None

    def post(self, callback: EngineCallback) -> None:
        self._put(Entry(callback))

    async def call(self, callback: Callable[[Engine], T]) -> T:
        """What ``callback`` returns or raises; EngineDeadError if the engine ends first."""
        if self._dead is not None:
            raise self._dead
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run(engine: Engine) -> None:
            try:
                result = callback(engine)
            except Exception as exc:  # noqa: BLE001 - handed to the caller, whatever it is
                loop.call_soon_threadsafe(_fail, future, exc)
            else:
                loop.call_soon_threadsafe(_resolve, future, result)

        def fail(error: EngineDeadError) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(_fail, future, error)

        self._put(Entry(run, fail))
        return await future

    def stop(self) -> None:
        """``take`` gives None when the entries before are taken."""
        self._put(None)

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return self._dead is not None or self._entries.empty()

    def take(self, wait_s: float = 0.0) -> Entry | None:
        """The next entry; None: ``stop``. Raises queue.Empty if none comes for ``wait_s``."""
        return self._entries.get(timeout=wait_s) if wait_s else self._entries.get_nowait()

    def end(self, error: EngineDeadError) -> None:
        """No entry is taken any more."""
        self._dead = error
        while True:
            try:
                entry = self._entries.get_nowait()
            except queue.Empty:
                return
            if entry is not None:
                entry.fail(error)

    def _put(self, entry: Entry | None) -> None:
        self._entries.put(entry)
        if self._dead is None:
            self._wake()
        else:
            self.end(self._dead)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
