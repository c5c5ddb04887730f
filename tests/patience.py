"""How tests wait: for a condition, for as long as even a busy machine may need, and not for a fixed time.

A deadline is there to end a test that has gone wrong; no test may fail because the machine had something else to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

_IPV6 = Path("/proc/net/if_inet6")
HAS_IPV6 = _IPV6.exists() and " lo\n" in _IPV6.read_text()
PATIENCE_S = 60.0
"""Nothing that a test waits for takes nearly so long, unless it never happens."""


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Return when the condition holds."""
    start = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start
        assert waited_s < timeout_s, "the condition did not come true in time"
        # Asking costs time that what is waited for needs itself.
        time.sleep(min(max(0.02, waited_s / 10), 0.5))


class AskingSelector(selectors.DefaultSelector):
    """``asked`` is called after each turn of the loop, before it waits for news."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Callable[[], bool]] = []
        """True: there is more to do at once."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(0 if any([ask() for ask in self.asked]) else timeout)


class AskingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = AskingSelector()
        super().__init__(self.selector)


class AskingPolicy(asyncio.DefaultEventLoopPolicy):
    """The suite's (tests/conftest.py), for tests that are coroutines and for those that run some."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return AskingLoop()


async def noticed(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Return when the condition holds, or has held for as little as one turn of the running event loop.

    A state that passes is not missed, however long the machine leaves this process alone: the condition is asked after
    each turn, and what one turn begins no earlier turn can end. What other threads do by themselves is looked at every
    10 ms; a test that waits for such a state holds it. On a loop that is not the suite's, everything is.
    """
    loop = asyncio.get_running_loop()
    came = loop.create_future()

    def ask() -> bool:
        if came.done():
            return False
        try:
            if not condition():
                return False
            came.set_result(None)
        except Exception as error:  # noqa: BLE001 - the waiting test gets it
            came.set_exception(error)
        return True

    asked = loop.selector.asked if isinstance(loop, AskingLoop) else list[Callable[[], bool]]()
    asked.append(ask)
    try:
        async with asyncio.timeout(timeout_s):
            while not ask() and not came.done():
                await asyncio.wait([came], timeout=0.01)
    finally:
        asked.remove(ask)
    came.result()


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], port: int = 0
) -> AsyncIterator[int]:
    """A server of the test's own on loopback: gives its port. Each connection is served to its end, which the other
    side's brings about; otherwise the end of the event loop would meet what is still open."""
    before = asyncio.all_tasks()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(served, "127.0.0.1", port) as server:
        yield server.sockets[0].getsockname()[1]
    while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        done, _ = await asyncio.wait(left, timeout=PATIENCE_S)
        assert done, left


def skip(seconds: float) -> None:
    """Timers of the running event loop that are due within so many seconds are due now."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


def stop(pid: int) -> None:
    """Send SIGSTOP and return when every thread of the process has stopped, which ``kill`` does not wait for."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _thread_states(pid) <= set("TtXZ"))


def _thread_states(pid: int) -> set[str]:
    found = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add(stat.read_text().rpartition(")")[2].split()[0])
    return found
