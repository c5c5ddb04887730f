"""The holder's side of a lease: what this process knows of it, and whom it tells. Shared by all implementations.

It owns the callbacks and the time until which others cannot have counted this process as dead. It does not know a
server: its subclasses refresh, and say here what came of it.

    _confirmed ──> _tell_lost ──> _confirmed ...        nobody ended it on purpose: its keys are put again
                        └──> _tell_revoked              somebody did: they are not
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)


class HeldLease:
    """Contract: ``control.base.Lease``; ``revoke``, and what keeps it alive, are the subclass's."""

    def __init__(self, ttl_s: float) -> None:
        self._lease_id = ""
        self._ttl_s = ttl_s
        self._alive_until_s = -math.inf
        self._on_lost: list[Callable[[], None]] = []
        self._on_revoked: list[Callable[[], None]] = []
        self._is_lost = False
        self.is_given_back = False
        """``revoke`` was called."""

    @property
    def lease_id(self) -> str:
        return self._lease_id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @property
    def alive_until_s(self) -> float:
        return self._alive_until_s

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._on_lost.append(callback)

    def on_revoked(self, callback: Callable[[], None]) -> None:
        self._on_revoked.append(callback)

    def _confirmed(self, alive_until_s: float) -> None:
        """The server has granted or refreshed it."""
        self._alive_until_s = alive_until_s
        self._is_lost = False

    def _tell_lost(self) -> None:
        """Others may see this process as gone: the server says so, or was not heard for too long."""
        self._alive_until_s = -math.inf
        if not self._is_lost:
            self._is_lost = True
            _log.warning("lease %s is lost", self._lease_id)
            _run(self._on_lost)

    def _tell_revoked(self) -> None:
        """It is lost because somebody wants this process to leave."""
        self._tell_lost()
        _log.warning("the lease was revoked")
        _run(self._on_revoked)

    def _give_back(self) -> None:
        """By our own will: nobody is told."""
        self.is_given_back = True
        self._alive_until_s = -math.inf


def _run(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # noqa: BLE001 - another room's fault must not end the lease
            _log.exception("a callback of a lease failed")
