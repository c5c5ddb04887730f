"""The adapters (LoRA) that were loaded at run time, as the control plane has them, and how one is loaded and unloaded.

    load      adapters/NAME is put ──> every worker of the model loads it, and publishes its id, or why it does not
    unload    adapters/NAME is deleted ──> it is unknown here at once ──> every worker takes its id out of its entry

An adapter stays known here while no worker has it, so that its requests are told to retry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvrelay.control.base import Discovery, Keys, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.adapters import AdapterEntry, adapter_name
from kvrelay.core.control_codec import decode_adapter
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import InvalidInputError, WorkerUnavailableError

_log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
UNLOAD_TIMEOUT_S = 10.0


class AdapterRefusedError(InvalidInputError):
    """A worker cannot have the adapter."""


class RunTimeAdapters(msgspec.Struct, eq=False):
    """``infos``: all workers in discovery. ``on_change`` runs after an entry has come or gone."""

    _discovery: Discovery
    _keys: Keys
    _infos: Callable[[], Iterable[WorkerInfo]]
    _on_change: Callable[[], None] = lambda: None
    entries: dict[str, AdapterEntry] = {}
    """By name."""
    _unloaded: set[str] = set()
    """Ids that workers may still publish."""
    listed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    _changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    async def follow(self) -> None:
        """Runs for ever."""
        await follow(self._discovery, self._keys.adapters, self._apply, self.listed.set)

    def _apply(self, event: WatchEvent) -> None:
        name = self._keys.adapter_name(event.key)
        entry = decode_adapter(name, event.value) if event.kind is WatchKind.PUT else None
        old = self.entries.pop(name, None)
        if old is not None:
            self._unloaded = {old.id, *self._unloaded.intersection(self._told())}
        if entry is not None:
            self.entries[name] = entry
            self._unloaded.discard(entry.id)
        self._on_change()
        self.workers_changed()

    def known(self) -> Mapping[str, AdapterEntry]:
        """By name. Raises WorkerUnavailableError before discovery has listed them: none would be wrong."""
        if not self.listed.is_set():
            raise WorkerUnavailableError("discovery has not listed the adapters yet")
        return self.entries

    def _told(self) -> set[str]:
        """The ids of which any worker says that it has them, or cannot have them."""
        return {adapter for info in self._infos() for adapter in (*info.adapters, *info.refused_adapters)}

    def may_come(self, name: str) -> bool:
        """Whether an adapter of that name was loaded, or some worker has one."""
        offered = (adapter for info in self._infos() for adapter in info.adapters if adapter not in self._unloaded)
        return name in self.entries or name in map(adapter_name, offered)

    def workers_changed(self) -> None:
        """A worker's entry has come, changed or gone."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def served(self, model: str, published: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
        """By name, the ids that new requests of ``model`` may have, of those that its workers publish. Of two contents
        of one name those that were loaded at run time count, or else those that were served ``before``."""
        known = {name: entry.id for name, entry in self.entries.items() if entry.model == model}
        wanted = {**before, **known}
        served: dict[str, str] = {}
        for adapter in sorted(set(published) - self._unloaded):
            name = adapter_name(adapter)
            if adapter == wanted.get(name) or (name not in known and name not in served):
                served[name] = adapter
        return served

    def workers_of(self, model: str) -> list[WorkerInfo]:
        """Those in discovery, of every role."""
        return [info for info in self._infos() if info.model == model]

    async def load(self, entry: AdapterEntry) -> None:
        """Return when all workers of the model have it. Raises AdapterRefusedError if one cannot have it, and
        WorkerUnavailableError if none has it in time: it is then unloaded again. Raises InvalidInputError if its name
        was taken meanwhile."""
        await self._discovery.put(self._keys.adapter(entry.name), msgspec.json.encode(entry))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                while not self._is_loaded(entry):
                    await self._changed.wait()
        except TimeoutError:
            workers = self.workers_of(entry.model)
            lacking = ", ".join(info.worker_id for info in workers if entry.id not in info.adapters)
            if not any(entry.id in info.adapters and info.role.takes_requests for info in workers):
                await self.unload(entry)
                raise WorkerUnavailableError(f"no worker has loaded adapter {entry.name} in time: {lacking}") from None
            _log.warning("adapter %s is served, but not yet by %s", entry.id, lacking)
        except AdapterRefusedError:
            await self.unload(entry)
            raise
        _log.info("adapter %s was loaded from %s", entry.id, entry.path)

    def _is_loaded(self, entry: AdapterEntry) -> bool:
        """Whether all have it. Raises InvalidInputError, AdapterRefusedError."""
        known = self.entries.get(entry.name)
        if known is not None and known != entry:
            raise InvalidInputError(f"the lora adapter '{entry.name}' was loaded by another request", param="lora_name")
        workers = self.workers_of(entry.model)
        for info in workers:
            if (reason := info.refused_adapters.get(entry.id)) is not None:
                raise AdapterRefusedError(f"worker {info.worker_id}: {reason}", param="lora_path")
        return known is not None and bool(workers) and all(entry.id in info.adapters for info in workers)

    async def unload(self, entry: AdapterEntry) -> None:
        """Return when no worker takes new requests for it, or when one does not answer in time."""
        await self._discovery.delete(self._keys.adapter(entry.name))
        try:
            async with asyncio.timeout(UNLOAD_TIMEOUT_S):
                while self.entries.get(entry.name) == entry or entry.id in self._told():
                    await self._changed.wait()
        except TimeoutError:
            _log.warning("adapter %s was unloaded, but a worker does not say so", entry.id)
        _log.info("adapter %s was unloaded", entry.id)
