"""How many sequences a frontend has in flight at once: the bound, and when there will be room again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.core.clock import Clock
from kvrelay.core.relief import ReliefRate
from kvrelay.errors import InvalidInputError, OverloadedError
from kvrelay.frontend.metrics import FrontendMetrics


class InFlight:
    """Lets at most ``limit`` sequences through, which ``metrics`` counts."""

    def __init__(self, limit: int, metrics: FrontendMetrics, clock: Clock) -> None:
        self._limit = limit
        self._metrics = metrics
        self._ended = ReliefRate(clock)

    def __repr__(self) -> str:
        return f"InFlight({self._metrics.num_in_flight} of {self._limit})"

    @contextmanager
    def admitted(self, num_sequences: int) -> Iterator[None]:
        """Count the sequences as in flight. Raises OverloadedError at once when there are too many, InvalidInputError
        when there are more than there may ever be."""
        if num_sequences > self._limit:
            raise InvalidInputError(f"prompts times n is {num_sequences}, above {self._limit}", param="n")
        excess = self._metrics.num_in_flight + num_sequences - self._limit
        if excess > 0:
            raise OverloadedError(
                f"{self._metrics.num_in_flight} requests are in flight already",
                retry_after_s=self._ended.retry_after_s(excess),
            )
        if not self._metrics.num_in_flight:
            # What did not end while nothing ran was not asked for.
            self._ended.restart()
        self._metrics.num_in_flight += num_sequences
        try:
            yield
        finally:
            self._metrics.num_in_flight -= num_sequences
            self._ended.add(num_sequences)
