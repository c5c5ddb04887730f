"""Which claimants have failed the hand-offs that they were granted, and so get no more for a while.

    failed, failed ──> avoided for avoid_s ──> one more chance ──failed──> avoided again
                                                     └──done──> as if nothing had happened

It knows no clock: time is an argument.
"""

from __future__ import annotations

from kvrelay.core.latest import Latest

MAX_REMEMBERED = 4096
MAX_FAILURES = 2


class Conduct:
    """By worker id."""

    def __init__(self) -> None:
        self.failures: Latest[str, int] = Latest(MAX_REMEMBERED)
        """In a row."""
        self.until_s: Latest[str, float] = Latest(MAX_REMEMBERED)
        """Workers that are avoided, or were."""
        self.new: frozenset[str] = frozenset()

    def failed(self, worker_id: str, now_s: float, avoid_s: float) -> None:
        """A granted hand-off has ended without *done*. From the second in a row on, avoid the worker."""
        failures = min(self.failures.get(worker_id, 0) + 1, MAX_FAILURES)
        self.failures[worker_id] = failures
        if failures == MAX_FAILURES:
            self.until_s[worker_id] = now_s + avoid_s
            self.new |= {worker_id}

    def done(self, worker_id: str) -> None:
        """A granted hand-off has been finished."""
        self.failures.pop(worker_id, None)
        self.until_s.pop(worker_id, None)

    def take_new(self) -> frozenset[str]:
        """The workers that are avoided since the last call: do not wait for what they hold."""
        new, self.new = self.new, frozenset()
        return new

    def is_avoided(self, worker_id: str, now_s: float) -> bool:
        """Whether it gets no grant now."""
        until_s = self.until_s.get(worker_id)
        return until_s is not None and now_s < until_s

    def avoided(self, now_s: float) -> frozenset[str]:
        """The workers that get no grant now."""
        return frozenset(worker_id for worker_id, until_s in self.until_s.items() if now_s < until_s)
