"""The holder's side of a lease, shared by all implementations: what this process knows of it, and the callbacks.

It owns the callbacks and the time until which others cannot have counted this process as dead. It does not know the
server: the subclasses refresh the lease and report the outcome here.

    _confirmed ──> _tell_lost ──> _confirmed ...        the lease expired: its keys are put again
                        └──> _tell_revoked              an operator revoked it: its keys are not put again
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)


class HeldLease:
    """Contract: ``control.base.Lease``. The subclass implements ``revoke`` and the keepalives."""

    def __init__(self, ttl_s: float) -> None:
        self._lease_id = ""
        self._ttl_s = ttl_s
        self._alive_until_s = -math.inf
        self._on_lost: list[Callable[[], None]] = []
        self._on_revoked: list[Callable[[], None]] = []
        self._is_lost = False
        self.is_given_back = False
        """Whether ``revoke`` was called."""

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
        """The server has granted or refreshed the lease."""
        self._alive_until_s = alive_until_s
        self._is_lost = False

    def _tell_lost(self) -> None:
        """Others may count this process as gone: the server says so, or the server was silent for too long."""
        self._alive_until_s = -math.inf
        if not self._is_lost:
            self._is_lost = True
            _log.warning("lease %s is lost; registering again under a new one", self._lease_id)
            _run(self._on_lost)

    def _tell_revoked(self) -> None:
        """The lease is lost because an operator wants this process to leave."""
        self._tell_lost()
        _log.warning("the lease was revoked; its keys are not registered again")
        _run(self._on_revoked)

    def _give_back(self) -> None:
        """This process ends the lease itself, so no callback runs."""
        self.is_given_back = True
        self._alive_until_s = -math.inf


def _run(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # noqa: BLE001 - another room's fault must not end the lease
            _log.exception("a callback of a lease failed")
