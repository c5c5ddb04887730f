"""Work on clients' input on threads beside the event loop, in pieces: parsing, chat templates, tokenization.

A piece is a few milliseconds of work, or a call that releases the interpreter's lock. Requests take turns piece by
piece, so a large request does not block the threads for others. Work on small bodies is done in place: a thread would
cost more than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

INLINE_SIZE = 4096
"""Bytes of a body, or tokens of an answer, that are processed in place. 4 kB of text take 1.3 ms."""
NUM_THREADS = 4

T = TypeVar("T")
P = ParamSpec("P")

Pieces = Generator[None, None, T]
"""Work that can be interrupted at each yield; it returns its result."""


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    result: T


class SideThreads:
    """A few threads that all requests of a frontend share."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="side")

    async def call(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` for a request of ``size`` as one piece."""
        if size <= INLINE_SIZE:
            return function(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def run(self, size: int, work: Pieces[T], check: Callable[[], None] = lambda: None) -> T:
        """Run all pieces of the work on a request of ``size``. Before each piece, ``check`` may raise to end it."""
        if size <= INLINE_SIZE:
            check()
            return complete(work)
        loop = asyncio.get_running_loop()
        while True:
            check()
            done = await loop.run_in_executor(self._executor, _advance, work)
            if done is not None:
                return done.result

    def close(self) -> None:
        """Drop waiting pieces; running ones end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)


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
