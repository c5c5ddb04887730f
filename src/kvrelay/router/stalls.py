"""Which workers have been at one engine step for long, by what they publish: perhaps a hang, long before that is sure.

They are avoided, not excluded: when all others are at a long step as well, long steps are what this cluster does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

MIN_AGE_S = 0.5
"""Shorter steps are not remembered."""


class Stalls:
    """The age of each worker's running step, as its last sample said. One that falls silent keeps it."""

    def __init__(self) -> None:
        self._age_s: dict[str, float] = {}

    def heard(self, worker_id: str, step_age_s: float) -> None:
        if step_age_s >= MIN_AGE_S:
            self._age_s[worker_id] = step_age_s
        else:
            self._age_s.pop(worker_id, None)

    def forget(self, worker_id: str) -> None:
        self._age_s.pop(worker_id, None)

    def avoidable(
        self, after_s: float, row_of: Callable[[str], int | None], excluded: Collection[int], num_rows: int
    ) -> list[int]:
        """Rows to avoid besides ``excluded``: those of workers that have been at one step for ``after_s`` (0: none).
        Empty when that would leave none of the ``num_rows``."""
        if not self._age_s or not after_s:
            return []
        rows = {row_of(worker_id) for worker_id, age_s in self._age_s.items() if age_s >= after_s}
        stalled = [row for row in rows if row is not None and row not in excluded]
        return stalled if len(stalled) + len(excluded) < num_rows else []
