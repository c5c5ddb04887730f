"""A MemoryBroker with a server's faults: it goes away, and loses its data."""

from __future__ import annotations

from kvrelay.control.memory import MemoryBroker


class FaultyBroker(MemoryBroker):
    def go_offline(self) -> None:
        """Every call fails, and nothing expires."""
        self.is_online = False

    def go_online(self, *, is_wiped: bool = False) -> None:
        """``is_wiped``: without its data. Live processes register again before watchers hear anything."""
        if is_wiped:
            self.entries.clear()
            self.leases.clear()
            self.revoked.clear()
            self.queue.wipe()
        self.is_online = True
        now = self.clock.now()
        for lease in self.leases.values():
            lease.renewed_s = now
        self.tick()
        self.notify()
