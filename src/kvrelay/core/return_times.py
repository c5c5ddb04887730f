"""When each refused client should come back: at the time at which there is room for it and for those told before. Pure.

Without this, all clients of a burst are told the same time, and all but a few are refused again. Each refusal takes a
place in the future, ``spacing_s`` after the previous one. A place that has passed is free again: its client has come
back, or will not.
"""

from __future__ import annotations

import math

from kvrelay.core.clock import Clock

MARGIN = 1.1
"""Places are this much further apart than the rate says: the rate is an estimate, and new clients come, too."""
MAX_RETURN_S = 600.0


class ReturnTimes:
    """The places given to refused clients of one queue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s = -math.inf
        """The latest place."""

    def restart(self) -> None:
        """The queue was idle: there is room for all who were told to come back."""
        self._last_s = -math.inf

    def next_s(self, room_in_s: float, spacing_s: float) -> float:
        """Seconds from now until the next client should come back.

        ``room_in_s``: when there would be room for it alone; ``spacing_s``: in which room for one such client arises.
        Zero or impossible values say nothing about others.
        """
        now_s = self._clock.now()
        spacing_s = spacing_s * MARGIN if 0.0 < spacing_s < math.inf else 0.0
        if not 0.0 <= room_in_s < math.inf:
            room_in_s = 1.0
        place_s = max(now_s + room_in_s, self._last_s + spacing_s)
        # Beyond the bound the order is lost, but the places must not run away from what clients are told.
        self._last_s = min(place_s, now_s + MAX_RETURN_S)
        return self._last_s - now_s
