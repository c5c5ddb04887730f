"""Holds back the end of a worker's lease while the worker is in the middle of a copy.

    kv_metadata/X deleted ──> transfer.bar(X), again and again ──True──> passed on      (X's writes fail from here on)
    kv_metadata/X put ──────> after held-back events ──> transfer.admit(X) ──> passed on

With shared memory the peer's own thread copies. A process that is stopped in the middle of a copy continues the copy
when it wakes, after any time. So no timer may free its target: ``Transport.bar`` asks the kernel. The fence
(``handoff/leases.py``) starts when the end of the lease is passed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from kvrelay.control.base import WatchEvent, WatchKind
from kvrelay.control.following import tell
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import TransferError
from kvrelay.transfer.thread import TransferThread

_log = logging.getLogger(__name__)

RETRY_S = 0.05
SAY_AFTER = 40
"""After this many attempts the log names a worker that cannot be barred."""


class LeaseEnds:
    """Between the watch of ``prefix`` and ``on_change``. Events of one worker stay in order."""

    def __init__(self, transfer: TransferThread, prefix: str, on_change: Callable[[WatchEvent], None]) -> None:
        self._transfer = transfer
        self._prefix = prefix
        self._on_change = on_change
        self._held: dict[str, deque[WatchEvent]] = {}
        self._tasks = TaskSet()

    @property
    def held(self) -> frozenset[str]:
        """Workers whose end is held back."""
        return frozenset(self._held)

    def on_event(self, event: WatchEvent) -> None:
        """An event of the watch. Raises what ``on_change`` raises for an entry that it refuses at once."""
        worker_id = self._worker_of(event)
        if worker_id in self._held:
            self._held[worker_id].append(event)
        elif event.kind is WatchKind.DELETE:
            self._held[worker_id] = deque((event,))
            self._tasks.spawn(self._work_off(worker_id))
        else:
            self._tell(event)

    async def close(self) -> None:
        await self._tasks.close()

    async def _work_off(self, worker_id: str) -> None:
        held = self._held[worker_id]
        while held:
            if held[0].kind is WatchKind.DELETE and not await self._bar_until_idle(worker_id):
                return
            tell(self._tell, held.popleft())
        del self._held[worker_id]

    async def _bar_until_idle(self, worker_id: str) -> bool:
        """False if this worker is leaving."""
        num_attempts = 0
        try:
            while not await asyncio.wrap_future(self._transfer.bar(worker_id)):
                num_attempts += 1
                if num_attempts == SAY_AFTER:
                    _log.warning(
                        "%s has no lease any more but is in the middle of a copy: its blocks stay quarantined until it "
                        "continues or ends",
                        worker_id,
                    )
                await asyncio.sleep(RETRY_S)
        except TransferError:
            return False
        return True

    def _tell(self, event: WatchEvent) -> None:
        if event.kind is WatchKind.PUT:
            self._transfer.admit(self._worker_of(event))
        self._on_change(event)

    def _worker_of(self, event: WatchEvent) -> str:
        return event.key.removeprefix(self._prefix).partition("/")[0]
