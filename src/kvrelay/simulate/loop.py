"""Virtual time: a heap of callbacks, and the clock that shows when the present one is due.

    at(time, callback) ──> heap ──run──> clock.move_to(time); callback()

Nothing here reads the host's time. Callbacks due at the same time run in the order of their ranks, of one rank in the
order of their workers' numbers, and else in the order in which they were added.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from kvrelay.core.clock import ManualClock

Callback = Callable[[], None]


class Rank(enum.IntEnum):
    """What comes first at the same time."""

    EVENT = 0
    STEP_END = 1
    DELIVERY = 2
    TURN = 3
    END = 4


class Position(NamedTuple):
    """A place in the order of all callbacks. ``number``: of the worker, for ranks other than EVENT."""

    time_s: float
    rank: Rank = Rank.EVENT
    number: int = 0


class EventLoop:
    """The only loop of a simulation. ``position``: all that comes before it has happened."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.num_events = 0
        """Callbacks that were added."""
        self.position = Position(0.0)
        self._heap: list[tuple[float, Rank, int, int, Callback]] = []
        self._is_stopped = False

    def at(self, time_s: float, callback: Callback, rank: Rank = Rank.EVENT, number: int = 0) -> None:
        """Call back at ``time_s``, or now if that has passed."""
        self.num_events += 1
        heapq.heappush(self._heap, (max(time_s, self.clock.now()), rank, number, self.num_events, callback))

    def after(self, delay_s: float, callback: Callback, rank: Rank = Rank.EVENT, number: int = 0) -> None:
        """Call back ``delay_s`` from now."""
        self.at(self.clock.now() + delay_s, callback, rank, number)

    @property
    def is_over(self) -> bool:
        """Whether nothing will happen any more."""
        return not self._heap

    def stop(self) -> None:
        """Let ``run`` return after the present callback."""
        self._is_stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Until nothing is due by ``until_s``, or until ``stop``."""
        heap, clock = self._heap, self.clock
        while heap and heap[0][0] <= until_s and not self._is_stopped:
            time_s, rank, number, _, callback = heapq.heappop(heap)
            clock.move_to(time_s)
            # What a turn adds for now comes after it, whatever its rank.
            self.position = max(self.position, Position(time_s, rank, number))
            callback()
        if not self._is_stopped and until_s < math.inf:
            self.position = Position(until_s, Rank.END)


class StepClock:
    """An engine's clock: the loop's, and ahead of it by what the step has taken so far: the copies of what it evicts,
    and the executor's time.

    ``EngineCore.step`` schedules, executes and updates in one call, so the simulator makes the call when the step
    begins, and shows its update the time at which the step will end. What the step has put out is delivered then.
    """

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.ahead_s = 0.0

    def now(self) -> float:
        return self._clock.now() + self.ahead_s
