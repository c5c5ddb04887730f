"""Scale to zero, as a frontend sees it: whether requests may wait for a first worker, and how many do.

    planner ──"I can start workers"──> frontend     requests without any worker wait, for at most ``limit_s``
            <── how many wait ──────────            the planner asks every few seconds, and starts a worker

The waiting itself is that of any request without a worker (``generate/sequence.py``). As many may wait as may be in
flight (admission control).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.core.clock import Clock, MonotonicClock

ASKED_FOR_S = 20.0
"""So long a request counts as waiting that was refused because this frontend knows no model yet: its client retries,
and planners look less often than that."""
RETRY_AFTER_S = 5.0
"""For a request whose wait was in vain."""


class ColdStart:
    """``limit_s``: how long a request waits for a first worker; 0: not at all. ``can_start``: a planner says that it
    starts one."""

    def __init__(self, limit_s: float, clock: Clock | None = None) -> None:
        self._limit_s, self._clock = limit_s, clock or MonotonicClock()
        self._num_waiting = 0
        self._asked_s: float | None = None
        self.can_start = False

    @property
    def wait_s(self) -> float:
        """How long a request may wait now; 0: it is refused at once."""
        return self._limit_s if self.can_start else 0.0

    @property
    def num_unplaced(self) -> int:
        """Sequences that wait for a worker. A model that was asked for, and is not known yet, counts as one."""
        is_asked = self._asked_s is not None and self._clock.now() - self._asked_s < ASKED_FOR_S
        return self._num_waiting + is_asked

    def asked(self) -> None:
        """A request was refused for a model that this frontend does not know yet."""
        self._asked_s = self._clock.now()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A sequence waits for a worker while the block runs."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
