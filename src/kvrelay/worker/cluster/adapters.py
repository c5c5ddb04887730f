"""This worker's adapters (LoRA) that come and go at run time: the control plane says which, the engine has them.

    adapters/NAME appears       loaded by the engine, then published in the worker's entry: requests for it come here
    adapters/NAME disappears    out of the worker's entry; the engine forgets it when the last answer has ended

It does not know the files: the engine reads and compares them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from kvrelay.control.base import Discovery, Keys, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.adapters import AdapterEntry
from kvrelay.core.control_codec import decode_adapter
from kvrelay.core.tasks import failure_of
from kvrelay.engine.contract import LoadsAdapters
from kvrelay.errors import ControlUnavailableError, LeaseLostError
from kvrelay.worker.cluster.membership import RETRY_INTERVAL_S, Membership

_log = logging.getLogger(__name__)

MAX_REASON_CHARS = 1024
"""The most that the entry takes."""


class WorkerAdapters:
    """``publish`` puts the worker's entry again, or raises ControlUnavailableError or LeaseLostError."""

    def __init__(
        self, engine: LoadsAdapters, membership: Membership, model: str, publish: Callable[[], Awaitable[None]]
    ) -> None:
        self._engine, self._membership = engine, membership
        self._model = model
        self._publish = publish
        self._first = membership.adapters
        self._wanted: dict[str, AdapterEntry] = {}
        """By name."""
        self._loaded: list[str] = []
        """Ids, without those of the start."""
        self._refused: dict[str, str] = {}
        """Ids, with the reasons."""
        self._shown: tuple[tuple[str, ...], dict[str, str]] = (self._first, {})
        """What the entry in discovery has."""
        self._changed = asyncio.Event()

    async def watch(self, discovery: Discovery, keys: Keys) -> None:
        """Runs for ever, beside ``keep``."""

        def apply(event: WatchEvent) -> None:
            name = keys.adapter_name(event.key)
            entry = decode_adapter(name, event.value) if event.kind is WatchKind.PUT else None
            self._wanted.pop(name, None)
            if entry is not None and entry.model == self._model:
                self._wanted[name] = entry
            self._changed.set()

        await follow(discovery, keys.adapters, apply)

    async def keep(self) -> None:
        """Runs for ever: load and retire what ``watch`` hears."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._follow_wanted()
            except (ControlUnavailableError, LeaseLostError) as exc:
                _log.debug("cannot publish the adapters: %s", exc)
                await asyncio.sleep(RETRY_INTERVAL_S)
                self._changed.set()

    async def _follow_wanted(self) -> None:
        wanted = {entry.id: entry for entry in self._wanted.values()}
        self._refused = {adapter: why for adapter, why in self._refused.items() if adapter in wanted}
        await self._show(wanted)
        for adapter in [each for each in self._loaded if each not in wanted]:
            _log.info("adapter %s takes no new requests; it is forgotten after its last answer", adapter)
            self._loaded.remove(adapter)
            self._engine.retire_adapter(adapter)
        for entry in wanted.values():
            if entry.id in (*self._first, *self._loaded) or self._wanted.get(entry.name) is not entry:
                continue
            error = await failure_of(self._engine.load_adapter(entry), f"loading adapter {entry.id}")
            if error is None:
                _log.info("adapter %s is loaded", entry.id)
                self._loaded.append(entry.id)
                self._refused.pop(entry.id, None)
            else:
                _log.warning("adapter %s is not loaded: %s", entry.id, error)
                self._refused[entry.id] = error.message[:MAX_REASON_CHARS]
            await self._show(wanted)

    async def _show(self, wanted: Collection[str]) -> None:
        """Publish what there is of ``wanted``, unless that is published."""
        shown = (*self._first, *(each for each in self._loaded if each in wanted)), dict(self._refused)
        if shown != self._shown:
            self._membership.adapters, self._membership.refused_adapters = shown
            await self._publish()
            self._shown = shown
