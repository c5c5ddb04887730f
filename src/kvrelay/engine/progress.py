"""Whether the engine makes progress: how long its current iteration has lasted, and when that counts as a hang.

An iteration is the work of the engine's thread between two reads of its inbox: callbacks, one step, and the delivery of
its output. Pure policy over an injected clock; the watchdog knows threads and processes.
"""

from __future__ import annotations

import math

import msgspec

from kvrelay.core.clock import Clock

MAX_STALL_S = 30.0
STALL_SHARE = 0.5
"""An iteration counts as a stall (``/health`` says 503) after MAX_STALL_S, or this share of the time to a hang if
sooner."""
MAX_MISSED_TICKS = 2
REST_TICKS = 4
"""Between two observations while the engine rests. Fewer than the ticks to a stall."""


class Iteration(msgspec.Struct, frozen=True):
    """A running iteration: its number and the time of its beginning."""

    number: int
    began_s: float


class Progress:
    """The running iteration. The engine's thread writes it, any thread reads it: one attribute, replaced as a whole."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.iteration: Iteration | None = None
        """None while the thread waits for work."""
        self._number = 0

    @property
    def age_s(self) -> float:
        """How long the running iteration has lasted; 0 if no iteration runs."""
        iteration = self.iteration
        return 0.0 if iteration is None else max(self._clock.now() - iteration.began_s, 0.0)

    def begin(self) -> None:
        """Begin an iteration and end the one before, if any."""
        self._number += 1
        self.iteration = Iteration(self._number, self._clock.now())

    def rest(self) -> None:
        """The thread has nothing to do."""
        self.iteration = None


class StallDetector:
    """Sums the time for which one iteration has been observed. Call ``observe`` every ``tick_s``, or every REST_TICKS
    while there is none.

    Time between two calls counts as MAX_MISSED_TICKS at most, after a rest as REST_TICKS: a stopped process or a
    suspended machine has not hung.
    With ``timeout_s`` 0 no iteration is a hang, but stalls are still reported.
    """

    def __init__(self, timeout_s: float, tick_s: float) -> None:
        self._timeout_s = timeout_s or math.inf
        self._stall_s = min(MAX_STALL_S, STALL_SHARE * self._timeout_s)
        self._max_gap_s, self._max_rest_s = MAX_MISSED_TICKS * tick_s, REST_TICKS * tick_s
        self._number = 0
        self._asked_s = 0.0
        self.watched_s = 0.0
        """The observed time of the iteration that ran at the last call of ``observe``."""

    @property
    def is_stalled(self) -> bool:
        return self.watched_s >= self._stall_s

    @property
    def is_hung(self) -> bool:
        return self.watched_s >= self._timeout_s

    def observe(self, iteration: Iteration | None, now_s: float) -> None:
        """``turn`` is running at ``now_s``."""
        if iteration is None:
            self._number, self.watched_s = 0, 0.0
        elif iteration.number != self._number:
            max_gap_s = self._max_gap_s if self._number else self._max_rest_s
            self._number = iteration.number
            self.watched_s = min(max(now_s - iteration.began_s, 0.0), max_gap_s)
        else:
            self.watched_s += min(max(now_s - self._asked_s, 0.0), self._max_gap_s)
        self._asked_s = now_s
