"""One process's marks of its latest requests: a flat list of numbers per request, three for each mark.

    request ──> [phase, seconds, value,  phase, seconds, value,  ...]

A mark is one tuple copied into a list: no object of its own, no lock, about a third of what a preallocated ring with
links costs in Python. Both the number of requests and the marks of each are bounded. Every operation is one step for
the interpreter, so any thread may call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from kvrelay.marks.phases import Phase

MAX_REQUESTS = 8192
MAX_NUMBERS = 3 * 200
"""Of one request; later marks are dropped."""

MAX_AT_S = 1e9
"""No machine has run for so long."""
MAX_VALUE = 2.0**48
"""Bytes of one transfer, for example."""


class Mark(NamedTuple):
    """``at_s`` is by the monotonic clock of the process that made it."""

    phase: Phase
    at_s: float
    value: float


class Recorder:
    """Marks by key, which names a request."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._numbers: dict[str, list[float]] = {}

    def __repr__(self) -> str:
        return f"Recorder({len(self._numbers)} requests)"

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, key: str, *numbers: float) -> None:
        """Add the numbers of one or more marks."""
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers.setdefault(key, [])
            if len(self._numbers) > self._max_requests:
                with suppress(RuntimeError, StopIteration):  # another thread has changed it: the next call does this
                    self._numbers.pop(next(iter(self._numbers)), None)
        if len(known) < MAX_NUMBERS:
            known += numbers

    def read(self, key: str) -> Sequence[float]:
        """The request's numbers. They stay."""
        return self._numbers.get(key, ())

    def take(self, key: str) -> Sequence[float]:
        """The same; the request has none from then on."""
        return self._numbers.pop(key, ())


def marks_of(numbers: Sequence[float]) -> list[Mark]:
    """In order of time. What another version has made is left out, and what is no time or no amount."""
    marks = [
        Mark(_PHASES[phase], at_s, value)
        for phase, at_s, value in zip(numbers[::3], numbers[1::3], numbers[2::3])
        if phase in _PHASES and 0.0 <= at_s < MAX_AT_S and 0.0 <= value < MAX_VALUE
    ]
    return sorted(marks, key=lambda mark: mark.at_s)


_PHASES: dict[float, Phase] = {int(phase): phase for phase in Phase}
