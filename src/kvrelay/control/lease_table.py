"""What a watcher believes about keys and leases: pure policy, with an injected clock.

    server's messages ──> LeaseTable ──> WatchEvents (what has become visible, changed, or gone)
                              ^
                            clock: leases that were not refreshed

It owns visibility: an entry is visible while its lease lives; a setting needs no lease. It does not know the server,
and it never ends a lease by itself: it names the suspects (``due``), and its owner asks the server, which decides.

After a gap in the connection the server may have lost everything, and holders may have been unable to refresh their
leases. So a resynchronisation ends leases with a deletion marker at once. Leases that are merely missing or old stay
for one more time to live, in which their holders can come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvrelay.control.base import WatchEvent, WatchKind
from kvrelay.control.unleased import UnleasedEntries
from kvrelay.core.clock import Clock

HEARD_SHARE = 0.5
"""Share of its time to live within which a living lease is heard. Keepalives come more often."""


class KvEntry(msgspec.Struct):
    """A key's value, the lease it hangs on, and its sequence number on the server."""

    value: bytes
    lease_id: str | None
    seq: int


class LeaseState(msgspec.Struct):
    """The last known state of a lease. ``refreshed_s`` is on the watcher's own clock.

    A lease that was overdue when this watcher first saw it belongs to a process that died before, unless the server's
    clock was set: ``is_proven`` is False, its entries are not shown, and its end is due if no keepalive comes within
    HEARD_SHARE of its time to live.
    """

    ttl_s: float
    seq: int
    refreshed_s: float
    is_proven: bool
    is_missing: bool = False
    """The server did not have the lease in the last listing, so it will not announce the lease's end."""
    num_slow_answers: int = 0
    """How often the server was slow to tell that there is no newer keepalive."""


class LeaseTable:
    """Entries and leases, and the events that follow from changes to them. Every method that makes a change returns the
    events in order."""

    def __init__(self, clock: Clock) -> None:
        self.unleased = UnleasedEntries()
        self._clock = clock
        self._entries: dict[str, KvEntry] = {}
        self._leases: dict[str, LeaseState] = {}
        self._keys_of: dict[str, set[str]] = {}
        self._visible: dict[str, bytes] = {}
        self._is_resyncing = False
        self._seen_keys: set[str] = set()
        self._seen_leases: set[str] = set()
        self._known_leases: set[str] = set()
        """The entries from before the resynchronisation."""

    def __repr__(self) -> str:
        return f"LeaseTable(entries={len(self._entries)}, visible={len(self._visible)}, leases={len(self._leases)})"

    @property
    def visible(self) -> dict[str, bytes]:
        """The keys and values that watchers see."""
        return self._visible

    def lease(self, lease_id: str) -> LeaseState | None:
        return self._leases.get(lease_id)

    def lease_id_of(self, key: str) -> str | None:
        """The lease that an entry hangs on; None if it has none, or there is no such entry."""
        entry = self._entries.get(key)
        return None if entry is None else entry.lease_id

    def entries_of(self, lease_id: str) -> dict[str, KvEntry]:
        return {key: self._entries[key] for key in self._keys_of.get(lease_id, ())}

    def strays(self) -> dict[str, KvEntry]:
        """Entries under a lease that does not exist: left behind by a process that died during its clean-up."""
        return {
            key: entry
            for key, entry in self._entries.items()
            if entry.lease_id is not None and entry.lease_id not in self._leases
        }

    # -- changes ------------------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, lease_id: str | None, seq: int) -> list[WatchEvent]:
        if self.unleased.refuses(key, has_lease=lease_id is not None):
            return self.delete(key)
        self._seen_keys.add(key)
        self._unlink(key)
        self._entries[key] = KvEntry(value, lease_id, seq)
        if lease_id is not None:
            self._keys_of.setdefault(lease_id, set()).add(key)
        return self._reconcile([key])

    def delete(self, key: str) -> list[WatchEvent]:
        self._unlink(key)
        return self._reconcile([key])

    def refresh(self, lease_id: str, ttl_s: float, seq: int, age_s: float = 0.0) -> list[WatchEvent]:
        """The lease was granted or refreshed, ``age_s`` ago by the server's clock.

        While resynchronising, the age counts only for a lease that was not known before.
        """
        self._seen_leases.add(lease_id)
        if lease_id in self._known_leases and self._is_resyncing:
            age_s = 0.0
        age_s = max(age_s, 0.0)
        is_proven = age_s < ttl_s
        if not is_proven:
            age_s = ttl_s * (1.0 - HEARD_SHARE)
        self._leases[lease_id] = LeaseState(ttl_s, seq, self._clock.now() - age_s, is_proven)
        return self._reconcile(sorted(self._keys_of.get(lease_id, ())))

    def end(self, lease_id: str) -> list[WatchEvent]:
        """The lease has ended, and its entries with it."""
        self._leases.pop(lease_id, None)
        keys = self._keys_of.get(lease_id, set()).copy()
        events = self._reconcile(sorted(keys))
        if not self._is_resyncing:
            for key in keys:
                self._unlink(key)
        return events

    def begin_resync(self) -> None:
        """The server's whole state follows, then ``end_resync``. Events are held back until then."""
        if not self._is_resyncing:
            self._known_leases = set(self._leases)
        self._is_resyncing = True
        self._seen_keys.clear()
        self._seen_leases.clear()

    def end_resync(self) -> list[WatchEvent]:
        """The difference between the entries that were visible before and the server's entries now."""
        self._is_resyncing = False
        now = self._clock.now()
        for lease_id, state in self._leases.items():
            state.is_missing = lease_id not in self._seen_leases
            if state.is_missing:
                state.refreshed_s = now
        for key in self._entries.keys() - self._seen_keys:
            holder = self._entries[key].lease_id
            if holder not in self._leases or holder in self._seen_leases:
                self._unlink(key)
        return self._reconcile(sorted(self._entries.keys() | self._visible.keys()))

    # -- time ---------------------------------------------------------------------------------------------------------

    def due(self, *, only_missing: bool = False) -> list[str]:
        """Leases that were not refreshed within their time to live. ``only_missing``: for a watcher that hears no
        keepalives; only leases that the server no longer has."""
        now = self._clock.now()
        return [lease_id for lease_id, due_s in self._due_times(only_missing) if now >= due_s]

    def next_due_s(self, *, only_missing: bool = False) -> float | None:
        """The time on the clock at which the next lease becomes due; None without leases."""
        return min((due_s for _, due_s in self._due_times(only_missing)), default=None)

    def trust_all(self) -> None:
        """Keepalives were not heard for a while: every lease has HEARD_SHARE of its time to live left from now on."""
        for state in self._leases.values():
            state.refreshed_s = self._clock.now() - state.ttl_s * (1.0 - HEARD_SHARE)

    @property
    def has_unproven(self) -> bool:
        return not all(state.is_proven for state in self._leases.values())

    @property
    def shortest_ttl_s(self) -> float | None:
        return min((state.ttl_s for state in self._leases.values()), default=None)

    def postpone(self, lease_id: str, delay_s: float) -> None:
        """Ask again about this lease in ``delay_s``."""
        state = self._leases.get(lease_id)
        if state is not None:
            state.refreshed_s = self._clock.now() - state.ttl_s + delay_s

    # -- inside -------------------------------------------------------------------------------------------------------

    def _due_times(self, only_missing: bool) -> Iterator[tuple[str, float]]:
        for lease_id, state in self._leases.items():
            if state.is_missing or not only_missing:
                yield lease_id, state.refreshed_s + state.ttl_s

    def _unlink(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None or entry.lease_id is None:
            return
        keys = self._keys_of[entry.lease_id]
        keys.discard(key)
        if not keys:
            del self._keys_of[entry.lease_id]

    def _reconcile(self, keys: Iterable[str]) -> list[WatchEvent]:
        if self._is_resyncing:
            return []
        events = []
        for key in keys:
            wanted = self._wanted(key)
            if wanted == self._visible.get(key):
                continue
            if wanted is None:
                del self._visible[key]
                events.append(WatchEvent(WatchKind.DELETE, key))
            else:
                self._visible[key] = wanted
                events.append(WatchEvent(WatchKind.PUT, key, wanted))
        return events

    def _wanted(self, key: str) -> bytes | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.lease_id is None:
            return entry.value
        lease = self._leases.get(entry.lease_id)
        return entry.value if lease is not None and lease.is_proven else None
