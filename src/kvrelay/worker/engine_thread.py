"""The thread that an engine lives on.

It owns the loop "drain the inbox, step, deliver". It does not know what the orders in the inbox do: they are functions
of the EngineCore, run between two steps, so that nothing else ever touches the engine and it needs no locks.
When there is nothing to step the thread sleeps on its inbox. When it ends, who waits for an order's result hears so.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.engine.base import StepOutput
from kvrelay.engine.core import EngineCore
from kvrelay.errors import EngineDeadError
from kvrelay.worker.progress import Progress

T = TypeVar("T")
Order = Callable[[EngineCore], object]

_log = logging.getLogger(__name__)


def _ignore(error: EngineDeadError) -> None:
    """Nobody waits."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An order in the inbox; ``fail`` is called instead when the thread has ended before it."""

    order: Order
    fail: Callable[[EngineDeadError], None] = _ignore


class EngineThread:
    """Runs ``core`` until closed. ``on_step`` is called on this thread with what each step produced, in one part or
    two; ``on_dead`` once, if the engine fails, after the step output that fails its requests has been delivered."""

    def __init__(
        self,
        core: EngineCore,
        on_step: Callable[[StepOutput], None],
        on_dead: Callable[[EngineDeadError], None],
        idle_wait_s: float = 0.5,
        clock: Clock | None = None,
    ) -> None:
        self.progress = Progress(clock or MonotonicClock())
        """How long the thread has been at what it does."""
        self._core = core
        self._on_step = on_step
        self._on_dead = on_dead
        self._idle_wait_s = idle_wait_s
        self._inbox: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._dead: EngineDeadError | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop after the current step and wait for the thread. Idempotent. False when it has not ended in time."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def look(self, read: Callable[[EngineCore], T]) -> T:
        """Give what ``read`` finds, at once, on the caller's thread: a step may be running, so it may read single
        numbers and nothing that has to fit together, and must change nothing."""
        return read(self._core)

    def post(self, order: Order) -> None:
        """Run ``order`` before the next step; from any thread. Its exceptions are logged."""
        self._inbox.put(_Entry(order))

    async def call(self, order: Callable[[EngineCore], T]) -> T:
        """Run ``order`` before the next step and give its result, or raise what it raised; EngineDeadError when the
        thread ends first."""
        dead = self._dead
        if dead is not None:
            raise dead
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run(core: EngineCore) -> None:
            try:
                result = order(core)
            except Exception as exc:  # noqa: BLE001 - handed to the caller, whatever it is
                loop.call_soon_threadsafe(_fail, future, exc)
            else:
                loop.call_soon_threadsafe(_resolve, future, result)

        def fail(error: EngineDeadError) -> None:
            loop.call_soon_threadsafe(_fail, future, error)

        self._inbox.put(_Entry(run, fail))
        if self._dead is not None:
            self._fail_waiting(self._dead)
        return await future

    def _run(self) -> None:
        try:
            while self._take_orders():
                # A step may end with outputs even when no forward pass ran: aborts, remote prefills, events.
                self._on_step(self._core.step(announce=self._on_step))
        except EngineDeadError as exc:
            self._die(exc)
        except Exception as exc:  # noqa: BLE001 - the thread's outermost loop
            _log.exception("the engine failed")
            error = EngineDeadError(f"the engine failed: {exc}")
            error.__cause__ = exc
            self._die(error)
        else:
            self._dead = EngineDeadError("the engine is closed")
            self._fail_waiting(self._dead)
        finally:
            self.progress.rest()

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        self._fail_waiting(error)
        self._on_dead(error)

    def _fail_waiting(self, error: EngineDeadError) -> None:
        """The thread has ended: nobody runs what is in the inbox."""
        while True:
            try:
                entry = self._inbox.get_nowait()
            except queue.Empty:
                return
            if entry is not None:
                entry.fail(error)

    def _take_orders(self) -> bool:
        """Run what is in the inbox; wait for an order only when the engine has nothing to step. False: closed."""
        self.progress.begin()
        wait = not self._core.has_work()
        while True:
            try:
                entry = self._wait_for_entry() if wait else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if entry is None:
                return False
            self._perform(entry.order)
            wait = False

    def _wait_for_entry(self) -> _Entry | None:
        """Raises queue.Empty when none comes for a while."""
        self.progress.rest()
        try:
            return self._inbox.get(timeout=self._idle_wait_s)
        finally:
            self.progress.begin()

    def _perform(self, order: Order) -> None:
        try:
            order(self._core)
        except EngineDeadError:
            raise
        except Exception:  # noqa: BLE001 - one bad order must not end the engine
            _log.exception("an order to the engine failed")


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
