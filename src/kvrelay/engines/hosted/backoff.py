"""How long a full backend is left alone: pauses that grow from refusal to refusal, and a probe after each.

    refused ──> pause ──> one request tries ──answered──> as before
                  ^              │
                  └── refused, or no answer within PROBE_S: the next one may try

What the backend asks for is an upper bound: it may have room long before, and it may ask for a year. Pure.
"""

from __future__ import annotations

from kvrelay.core.clock import Clock

FIRST_S = 1.0
LONGEST_S = 30.0
PROBE_S = 1.0


class Backoff:
    """Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pause_s = 0.0
        """0: the backend has answered a request since it refused one."""
        self._until_s = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until a new request may try; 0: now."""
        return max(self._until_s - self._clock.now(), 0.0)

    def tries(self) -> bool:
        """A request is sent to the backend. Whether it is the probe after a pause."""
        is_probe = self._pause_s > 0 and not self.wait_s
        if is_probe:
            self._until_s = self._clock.now() + PROBE_S
        return is_probe

    def refused(self, retry_after_s: float, *, is_probe: bool) -> None:
        """The refusals of one burst count once."""
        if is_probe or not self._pause_s:
            self._pause_s = min(2 * self._pause_s or FIRST_S, LONGEST_S)
        self._until_s = self._clock.now() + min(retry_after_s, self._pause_s)

    def answered(self, *, is_probe: bool) -> None:
        """The backend computes the request. One that was sent before a refusal proves nothing."""
        if is_probe:
            self._pause_s = self._until_s = 0.0
