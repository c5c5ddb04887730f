"""Which workers have been at one engine step for long, according to their load samples: an early sign of a hang.

Such workers are avoided, not excluded: if all workers are at a long step, long steps are normal in this cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

MIN_AGE_S = 0.5
"""Shorter steps are not remembered."""


class Stalls:
    """The age of each worker's running step in its last sample. A worker that falls silent keeps that age."""

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
        """Rows to avoid besides ``excluded``: those of workers that have been at one step for ``after_s`` seconds
        (0: none). Empty if that would leave none of the ``num_rows``."""
        if not self._age_s or not after_s:
            return []
        rows = {row_of(worker_id) for worker_id, age_s in self._age_s.items() if age_s >= after_s}
        stalled = [row for row in rows if row is not None and row not in excluded]
        return stalled if len(stalled) + len(excluded) < num_rows else []
