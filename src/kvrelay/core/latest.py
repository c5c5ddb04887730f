"""A record of the latest entries: what a process remembers of ids that others choose, within a bound. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(MutableMapping[K, V]):
    """At most ``capacity`` entries, in the order in which they were set. Setting an entry makes it the latest, also if
    it is there already; reading it does not. Beyond the capacity the oldest entry is dropped. Not thread-safe."""

    def __init__(self, capacity: int, entries: Mapping[K, V] | None = None) -> None:
        """``entries``: the oldest first, at most ``capacity``."""
        self.capacity = capacity
        self._entries: OrderedDict[K, V] = OrderedDict(entries or ())

    def __repr__(self) -> str:
        return f"Latest({len(self._entries)} of {self.capacity})"

    def __copy__(self) -> Latest[K, V]:
        return Latest(self.capacity, self._entries)

    def __getitem__(self, key: K) -> V:
        return self._entries[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self.capacity:
            self._entries.popitem(last=False)

    def __delitem__(self, key: K) -> None:
        del self._entries[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """The oldest first."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
