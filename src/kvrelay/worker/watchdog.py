"""Ends a worker whose engine hangs.

    a turn runs for --step-timeout-s ──> stacks of all threads on stderr, a line in the log
                                     ──> on_hang: the worker closes its connections (requests migrate), leaves
                                         discovery, and the process ends with EngineHungError's exit code
    it has not ended GRACE_S later   ──> killed here: the event loop hangs as well

It has its own thread, because a hang may block any other. Native code that keeps the interpreter's lock stops this
thread too; ``launch/process.py`` covers that case.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable

from kvrelay.core.clock import Clock
from kvrelay.engine.progress import REST_TICKS, Progress, StallDetector
from kvrelay.errors import EngineHungError

_log = logging.getLogger(__name__)

MAX_TICK_S = 3.0
TICKS_PER_TIMEOUT = 10
GRACE_S = 15.0


def dump_stacks() -> None:
    """The stacks of all threads, on stderr."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)


class Watchdog:
    """Watches ``progress`` from ``start`` to ``stop``. ``on_hang`` is called once, on the watchdog's thread.

    ``end_process`` gets the exit code if ``stop`` has not been called ``grace_s`` later.
    """

    def __init__(
        self,
        progress: Progress,
        timeout_s: float,
        on_hang: Callable[[EngineHungError], None],
        clock: Clock,
        *,
        grace_s: float = GRACE_S,
        dump: Callable[[], None] = dump_stacks,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._clock = clock
        self._grace_s = grace_s
        self._dump = dump
        self._end_process = end_process
        self._tick_s = min(MAX_TICK_S, timeout_s / TICKS_PER_TIMEOUT) if timeout_s else MAX_TICK_S
        self._detector = StallDetector(timeout_s, self._tick_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has been at one turn for so long that this worker is not healthy."""
        return self._detector.is_stalled

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent; from any thread."""
        self._stopped.set()

    def tick(self) -> bool:
        """Check once. True if the engine hangs; ``on_hang`` has been called then."""
        self._detector.observe(self._progress.iteration, self._clock.now())
        if not self._detector.is_hung:
            return False
        error = EngineHungError(
            f"the engine has been at one step for {self._detector.watched_s:.0f} s (--step-timeout-s "
            f"{self._timeout_s:g}): it hangs"
        )
        _log.critical("%s; this worker ends, its requests go on elsewhere; all stacks are on stderr", error.message)
        self._dump()
        self._on_hang(error)
        return True

    @property
    def _wait_s(self) -> float:
        """An iteration that begins during a rest is counted from its beginning."""
        return self._tick_s * (REST_TICKS if self._progress.iteration is None else 1)

    def _run(self) -> None:
        while not self._stopped.wait(self._wait_s):
            if self.tick():
                if not self._stopped.wait(self._grace_s):
                    _log.critical("the worker has not ended %g s after its engine hung: ending it", self._grace_s)
                    self._end_process(EngineHungError.exit_code)
                return
