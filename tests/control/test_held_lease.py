from __future__ import annotations

import asyncio
import time

import pytest

from kvrelay.control.held_lease import HeldLease
from kvrelay.errors import ControlUnavailableError


class _Lease(HeldLease):
    """Each of its refreshes raises the next of ``errors``; None: the server answers."""

    def __init__(self, *errors: Exception | None) -> None:
        super().__init__(ttl_s=0.3)
        self._errors = list(errors)
        self.answered = asyncio.Event()

    def keep_alive(self) -> None:
        self._keep_alive(self._refresh)

    async def _refresh(self) -> None:
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error
        self._confirmed(time.monotonic())
        self.answered.set()

    async def _end_at_server(self) -> None:
        """There is no server."""


@pytest.mark.parametrize("error", [ControlUnavailableError("away"), ValueError("what a library raises")])
async def test_no_error_of_a_refresh_is_the_last_one(error: Exception) -> None:
    """Without keepalives the process would be dead to all others until it is restarted."""
    lease = _Lease(error, error)
    lease.keep_alive()
    await asyncio.wait_for(lease.answered.wait(), 10)
    await lease.revoke()
