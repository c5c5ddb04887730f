"""Whether the engine gets on with its work: how long its turn has been going on, and from when on that is a hang.

A turn is what the engine's thread does between two reads of its inbox: callbacks, one step, and telling what the step
produced. Pure policy over an injected clock; threads and processes are the watchdog's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvrelay.core.clock import Clock

MAX_STALL_S = 30.0
STALL_SHARE = 0.5
"""A turn counts as a stall (``/health`` says 503) after MAX_STALL_S, or this share of the time to a hang if sooner."""
MAX_MISSED_TICKS = 2


class Turn(NamedTuple):
    """A turn that is running: its number, and when it began."""

    number: int
    began_s: float


class Progress:
    """The running turn. Written by the engine's thread, read from any thread: one attribute, replaced as a whole."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn: Turn | None = None
        self._number = 0

    @property
    def turn(self) -> Turn | None:
        """None while the thread waits for work."""
        return self._turn

    @property
    def age_s(self) -> float:
        """How long the running turn has been going on; 0 while there is none."""
        turn = self._turn
        return 0.0 if turn is None else max(self._clock.now() - turn.began_s, 0.0)

    def begin(self) -> None:
        """A turn begins; the one before, if any, is done."""
        self._number += 1
        self._turn = Turn(self._number, self._clock.now())

    def rest(self) -> None:
        """There is nothing to do."""
        self._turn = None


class HangDetector:
    """Adds up for how long one turn has been watched. To be asked every ``tick_s``.

    Time in which nobody asked counts for MAX_MISSED_TICKS at most: a process that was stopped, or a machine that was
    suspended, has not hung. ``timeout_s`` 0: nothing is ever a hang, but a stall still is one.
    """

    def __init__(self, timeout_s: float, tick_s: float) -> None:
        self._timeout_s = timeout_s or math.inf
        self._stall_s = min(MAX_STALL_S, STALL_SHARE * self._timeout_s)
        self._max_gap_s = MAX_MISSED_TICKS * tick_s
        self._number = 0
        self._asked_s = 0.0
        self.watched_s = 0.0
        """Of the turn that was running when ``observe`` was last called."""

    @property
    def is_stalled(self) -> bool:
        return self.watched_s >= self._stall_s

    @property
    def is_hung(self) -> bool:
        return self.watched_s >= self._timeout_s

    def observe(self, turn: Turn | None, now_s: float) -> None:
        """``turn`` is running at ``now_s``."""
        if turn is None:
            self._number, self.watched_s = 0, 0.0
        elif turn.number != self._number:
            self._number = turn.number
            self.watched_s = min(max(now_s - turn.began_s, 0.0), self._max_gap_s)
        else:
            self.watched_s += min(max(now_s - self._asked_s, 0.0), self._max_gap_s)
        self._asked_s = now_s
