"""What a worker knows of the other workers: who is there, and who can no longer touch memory.

Two different ends, since a draining worker leaves ``workers/`` first and goes on writing KV until it is done:
  - its entry under ``workers/`` disappears: it takes no more work;
  - its entry under ``kv_metadata/`` disappears: its lease has ended, it is fenced, until it registers again.
When the control plane is away the last known workers stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from kvrelay.control.base import Discovery, Keys, WatchEvent, WatchKind
from kvrelay.core.workers import WorkerInfo, WorkerRole

_log = logging.getLogger(__name__)


MAX_REMEMBERED = 4096


class Fleet:
    """Watches the workers of one model. ``on_fenced(worker_id)`` runs when a worker's lease has ended,
    ``on_no_prefill`` when the last prefill worker stops taking work."""

    def __init__(
        self,
        discovery: Discovery,
        keys: Keys,
        model: str,
        on_fenced: Callable[[str], None],
        on_no_prefill: Callable[[], None],
    ) -> None:
        self._discovery = discovery
        self._keys = keys
        self._model = model
        self._on_fenced = on_fenced
        self._on_no_prefill = on_no_prefill
        self._prefill_workers: set[str] = set()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_prefill_workers(self) -> int:
        """Workers that pull from the prefill queue."""
        return len(self._prefill_workers)

    def has_ended(self, worker_id: str) -> bool:
        """Whether its lease has ended, and it has not registered again."""
        return worker_id in self._ended

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch_workers()), loop.create_task(self._watch_leases())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch_workers(self) -> None:
        async for event in self._discovery.watch(self._keys.workers):
            self._apply(event)

    async def _watch_leases(self) -> None:
        async for event in self._discovery.watch(self._keys.kv_metadata):
            worker_id = event.key.removeprefix(self._keys.kv_metadata).split("/")[0]
            if event.kind is WatchKind.PUT:
                self._ended.pop(worker_id, None)
            elif event.kind is WatchKind.DELETE:
                self._ended[worker_id] = None
                if len(self._ended) > MAX_REMEMBERED:
                    self._ended.popitem(last=False)
                self._on_fenced(worker_id)

    def _apply(self, event: WatchEvent) -> None:
        if event.kind is WatchKind.SYNCED:
            return
        worker_id = event.key.removeprefix(self._keys.workers)
        had_prefill = bool(self._prefill_workers)
        self._prefill_workers.discard(worker_id)
        if event.kind is WatchKind.PUT:
            try:
                info = msgspec.json.decode(event.value, type=WorkerInfo)
            except msgspec.DecodeError as exc:
                _log.warning("discovery entry %s refused: %s", event.key, exc)
                return
            if info.model == self._model and info.role is WorkerRole.PREFILL:
                self._prefill_workers.add(worker_id)
        if had_prefill and not self._prefill_workers:
            self._on_no_prefill()
