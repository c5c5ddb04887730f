"""Work on clients' input: in place, on the event loop in a later turn, or on threads beside it.

Work on small bodies is done in place: a thread would cost more than the work. Completions up to LOOP_SIZE are parsed on
the loop too, a few per turn (``LoopTurns``): a thread would hold the interpreter's lock for as long, and the loop
would wait for the lock several times. Everything else runs on the threads, in pieces: parsing of larger bodies, chat
templates, tokenization. A piece is a few milliseconds of work, or a call that releases the lock. Requests take turns
piece by piece, shorter ones first, so a large request does not block the threads for others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec

from kvrelay.core.cores import usable_cores
from kvrelay.core.shortest_first import ShortestFirst
from kvrelay.frontend.loop_turns import LoopTurns

INLINE_SIZE = 4096
"""Bytes of a body, or tokens of an answer, that are processed in place. 4 kB of text take 1.3 ms."""
LOOP_SIZE = 2**16
"""Bytes of a body that is parsed on the loop. 10,000 token ids take 0.3 ms, the worst body 4 ms."""
BYTES_PER_COST = 8
"""Bytes that are parsed in the time of one unit of a turn's cost."""
NUM_THREADS = max(2, min(4, len(usable_cores())))
"""Most pieces hold the interpreter's lock: threads beyond the cores would only keep it from the event loop."""

T = TypeVar("T")
P = ParamSpec("P")

Pieces = Generator[None, None, T]
"""Work that can be interrupted at each yield; it returns its result."""


class _Done(msgspec.Struct, Generic[T], frozen=True):
    result: T


class _Piece(msgspec.Struct, frozen=True):
    """A call that waits for a thread."""

    function: Callable[[], Any]
    future: Future[Any] = msgspec.field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as exc:  # noqa: BLE001 - handed to the caller, whatever it is
            self.future.set_exception(exc)
        else:
            self.future.set_result(result)


class SideThreads:
    """A few threads, and the turns of the event loop, that all requests of a frontend share."""

    def __init__(self) -> None:
        self.turns = LoopTurns()
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="side")
        self._waiting = ShortestFirst[_Piece]()
        self._numbers = itertools.count()

    async def call(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` for a request of ``size`` as one piece."""
        if size <= INLINE_SIZE:
            return function(*args, **kwargs)
        return await self._beside(size, partial(function, *args, **kwargs))

    async def parse(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function``, whose time is that of parsing a body of ``size`` bytes: as ``call``, or on the loop."""
        if size > LOOP_SIZE:
            return await self._beside(size, partial(function, *args, **kwargs))
        if size > INLINE_SIZE:
            await self.turns.take(size // BYTES_PER_COST)
        return function(*args, **kwargs)

    async def run(
        self, size: int, work: Pieces[T], check: Callable[[], None] = lambda: None, *, is_light: bool = False
    ) -> T:
        """Run all pieces of the work on a request of ``size``. Before each piece, ``check`` may raise to end it.
        ``is_light``: all together take a fraction of the time of parsing the body."""
        if size <= (LOOP_SIZE if is_light else INLINE_SIZE):
            check()
            return complete(work)
        while True:
            check()
            done = await self._beside(size, partial(_advance, work))
            if done is not None:
                return done.result

    def close(self) -> None:
        """Drop waiting pieces; running ones end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for piece in self._waiting.clear():
            piece.future.cancel()

    def _beside(self, size: int, function: Callable[[], T]) -> asyncio.Future[T]:
        piece = _Piece(function)
        self._waiting.add(next(self._numbers), size, piece)
        self._executor.submit(self._run_next)
        return asyncio.wrap_future(piece.future)

    def _run_next(self) -> None:
        """On a side thread: run the next piece, not necessarily the one that was submitted."""
        piece = self._waiting.take()
        if piece is not None:
            piece.run()


def complete(work: Pieces[T]) -> T:
    """Run all pieces at once, on this thread."""
    while True:
        try:
            next(work)
        except StopIteration as exc:
            result: T = exc.value
            return result


def _advance(work: Pieces[T]) -> _Done[T] | None:
    """Run one piece; returns the work's result if it was the last one."""
    try:
        next(work)
    except StopIteration as exc:  # a future cannot carry this one
        return _Done(exc.value)
    return None
