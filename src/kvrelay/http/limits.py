"""The limits of the HTTP server: per connection, and for all together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

Holder = TypeVar("Holder")


class HttpLimits(msgspec.Struct, frozen=True):
    """Sizes in bytes, times in seconds. ``max_buffered_bytes`` and ``max_total_unsent_bytes`` are for all connections
    together; the other limits are per connection.

    A client may leave ``max_unsent_bytes`` of an answer unread without a time limit. Beyond that it is cut off if it
    reads nothing for ``stall_timeout_s``.
    """

    max_body_bytes: int = 16 * 1024 * 1024
    max_head_bytes: int = 64 * 1024
    max_unsent_bytes: int = 8 * 1024 * 1024
    max_buffered_bytes: int = 256 * 1024 * 1024
    max_total_unsent_bytes: int = 512 * 1024 * 1024
    max_connections: int = 16_384
    head_timeout_s: float = 15.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 120.0
    stall_timeout_s: float = 30.0
    linger_s: float = 3.0


class ByteBudget(Generic[Holder]):
    """Bytes that all holders together may keep. Above ``limit`` the largest holder is shed; small ones continue.

    ``size_of`` gives the bytes that a holder keeps now, ``sheddable_of`` how many of them ``shed`` would free.
    """

    def __init__(
        self,
        limit: int,
        size_of: Callable[[Holder], int],
        sheddable_of: Callable[[Holder], int],
        shed: Callable[[Holder], None],
    ) -> None:
        self._limit = limit
        self._size_of = size_of
        self._sheddable_of = sheddable_of
        self._shed = shed
        self._held: dict[Holder, int] = {}
        self._is_shedding = False
        self.total = 0

    def __repr__(self) -> str:
        return f"ByteBudget({self.total} of {self._limit} bytes, {len(self._held)} holders)"

    def update(self, holder: Holder) -> None:
        """The holder's size has changed."""
        num_bytes = self._size_of(holder)
        self.total += num_bytes - self._held.pop(holder, 0)
        if num_bytes:
            self._held[holder] = num_bytes
        if self.total > self._limit and not self._is_shedding:
            self._is_shedding = True
            try:
                self._make_room()
            finally:
                self._is_shedding = False

    def forget(self, holder: Holder) -> None:
        """The holder is gone."""
        self.total -= self._held.pop(holder, 0)

    def _make_room(self) -> None:
        # Bytes that holders have freed meanwhile without a call do not count.
        for holder in list(self._held):
            self.update(holder)
        while self.total > self._limit and self._held:
            victim = max(self._held, key=self._sheddable_of)
            if not self._sheddable_of(victim):
                return
            self._shed(victim)
            self.forget(victim)
            self.update(victim)
