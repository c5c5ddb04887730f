"""What a worker knows of the other workers: who is there, and who has gone.

Its source is discovery's watch. When the control plane is away the last known workers stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from kvrelay.control.base import Discovery, Keys, WatchEvent, WatchKind
from kvrelay.core.workers import WorkerInfo

_log = logging.getLogger(__name__)


class Fleet:
    """Watches the workers of one model. ``on_gone(worker_id)`` runs when a worker's entry disappears."""

    def __init__(self, discovery: Discovery, keys: Keys, model: str, on_gone: Callable[[str], None]) -> None:
        self._discovery = discovery
        self._keys = keys
        self._model = model
        self._on_gone = on_gone
        self._workers: dict[str, WorkerInfo] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def num_prefill_workers(self) -> int:
        """Workers that pull from the prefill queue (a worker with role ``both`` computes its own prefills itself)."""
        return sum(info.role == "prefill" for info in self._workers.values())

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        async for event in self._discovery.watch(self._keys.workers):
            self._apply(event)

    def _apply(self, event: WatchEvent) -> None:
        worker_id = event.key.removeprefix(self._keys.workers)
        if event.kind is WatchKind.DELETE:
            if self._workers.pop(worker_id, None) is not None:
                self._on_gone(worker_id)
        elif event.kind is WatchKind.PUT:
            try:
                info = msgspec.json.decode(event.value, type=WorkerInfo)
            except msgspec.DecodeError as exc:
                _log.warning("discovery entry %s refused: %s", event.key, exc)
                return
            if info.model == self._model:
                self._workers[worker_id] = info
