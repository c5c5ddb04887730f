"""Entries that count only under a lease and have none: refused, logged once each, and counted.

An entry without a lease would outlive its process for ever. Peers would grant hand-offs to a worker that nothing can
declare dead, and never get the blocks back. Only an operator's settings and adapters have no lease.
"""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
_LASTING = ("config", "adapters")


def needs_lease(key: str) -> bool:
    """Whether an entry under this key, ``kvrelay/NAMESPACE/KIND/...``, counts only while its lease lives: every kind
    but settings and adapters."""
    parts = key.split("/", 3)
    return len(parts) < 4 or parts[2] not in _LASTING


class UnleasedEntries:
    """What one watcher of discovery has refused. ``num_refused`` counts entries, not how often they were seen."""

    def __init__(self) -> None:
        self.num_refused = 0
        self._refused: set[str] = set()

    def refuses(self, key: str, *, has_lease: bool) -> bool:
        """Whether the entry must be treated as if it were not there."""
        if has_lease or not needs_lease(key):
            self._refused.discard(key)
            return False
        if key not in self._refused:
            if len(self._refused) >= MAX_REMEMBERED:
                self._refused.clear()
            self._refused.add(key)
            self.num_refused += 1
            _log.warning(
                "discovery entry %s has no lease and is ignored: no process would ever end it. Delete it, and find out "
                "who holds the login that wrote it",
                key,
            )
        return True
