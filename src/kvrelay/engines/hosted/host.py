"""The engine's life: a thread with an event loop that reads the answers, and runs callbacks between its turns."""

from __future__ import annotations

import asyncio
import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np
import uvloop

from kvrelay.config import EngineConfig
from kvrelay.core.adapters import AdapterEntry
from kvrelay.core.checksums import unit_checksums
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.events import KvEvent
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.sampling import SamplingParams
from kvrelay.dp.group import Alone, Group, StepGroup
from kvrelay.engine.contract import Engine, EngineFacts, OnDead, OnStep
from kvrelay.engine.inbox import EngineCallback, EngineInbox
from kvrelay.engine.progress import Progress
from kvrelay.engine.stats import DraftCounts, EngineStats, LoadSampler
from kvrelay.engines.hosted.backend import AdapterStore, Backend
from kvrelay.engines.hosted.cache import MirroredCache, PlacedPrefixes
from kvrelay.engines.hosted.calls import BackendCalls
from kvrelay.engines.hosted.costs import StepTeller
from kvrelay.engines.hosted.engine import HostedEngine
from kvrelay.engines.hosted.kv_events import KvEventReader
from kvrelay.engines.hosted.staging import StagingMemory
from kvrelay.errors import ConfigError, EngineDeadError, WorkerUnavailableError

_log = logging.getLogger(__name__)

T = TypeVar("T")

LOAD_INTERVAL_S = 0.05
HEALTH_INTERVAL_S = 1.0
ADAPTER_INTERVAL_S, UNUSED_LOOKS = 0.1, 10
"""An adapter is forgotten once no request used it at so many looks: a frontend may have sent one before it heard."""


class CacheEvents(NamedTuple):
    """Where a backend publishes its cache events, and where it repeats missed ones (empty: nowhere)."""

    endpoint: str
    replay: str


class BackendHost:
    """The EngineHost of a HostedEngine. With ``cache_events`` None the backend's cache is estimated. With ``staging``
    peers exchange KV with that memory, and the backend copies from and to it. ``teller``, ``sets_pace`` and
    ``drafts``: of the HostedEngine. With ``adapters`` it is a LoadsAdapters."""

    def __init__(
        self,
        facts: EngineFacts,
        config: EngineConfig,
        backend: Backend,
        cache_events: CacheEvents | None,
        *,
        worker_id: str,
        eos_token_ids: tuple[int, ...],
        staging: StagingMemory | None = None,
        teller: StepTeller | None = None,
        sets_pace: bool = False,
        drafts: DraftCounts | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        clock = MonotonicClock()
        self.facts = facts
        self.backend = backend
        self._cache_events = cache_events
        block_size = facts.kv_layout.block_size
        self._mirror = None if cache_events is None else MirroredCache(block_size, (facts.adapter, *facts.adapters))
        self.progress = Progress(clock)
        """It always rests: health checks show whether the backend makes progress."""
        self._staging = staging
        self._loop = uvloop.new_event_loop()
        self._inbox = EngineInbox(self._wake)
        self._calls = BackendCalls(backend.name, self._loop, self._flush_soon)
        self._engine = HostedEngine(
            facts,
            config,
            backend,
            self._calls,
            # An empty mirror is false.
            PlacedPrefixes(block_size, facts.num_blocks) if self._mirror is None else self._mirror,
            clock,
            worker_id=worker_id,
            eos_token_ids=eos_token_ids,
            num_staging_blocks=0 if staging is None else staging.num_blocks,
            teller=teller,
            sets_pace=sets_pace,
            drafts=drafts,
        )
        self._adapters = adapters
        self._group: Group = Alone()
        self._has_called = asyncio.Event()
        """A callback has run."""
        self._retiring: dict[str, asyncio.Task[None]] = {}
        """Adapters that are forgotten once no request uses them. The loop's."""
        self._load = LoadSampler(self._engine, LOAD_INTERVAL_S, clock)
        self._samples_load = True
        # Transports need a region to register. Without staging no peer reads or writes it.
        self._memory = staging.memory if staging else mmap.mmap(-1, facts.num_blocks * facts.kv_layout.block_bytes)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._on_step: OnStep = lambda step: None
        self._on_dead: OnDead = lambda error: None
        self._is_flushing = False
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def enter(self, group: StepGroup) -> None:
        """Loaded, before ``start``: returns when all ranks are. The backends step in common by themselves; this host
        ends with its group, and closes when all ranks do. Raises EngineDeadError."""
        group.ready(None)
        self._group = group

    @property
    def kv_region(self) -> MemoryRegion:
        return MemoryRegion(self._bytes.ctypes.data, self._bytes.size)

    def start(self, on_step: OnStep, on_dead: OnDead, *, samples_load: bool = True) -> None:
        self._on_step, self._on_dead, self._samples_load = on_step, on_dead, samples_load
        self._group.listen(lambda change: self.post(lambda _: change()))
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> bool:
        if self._thread.ident is None:
            self._inbox.end(EngineDeadError("the engine is closed"))
            self._loop.close()
            return True
        self._inbox.stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def prepare(self, sampling: SamplingParams) -> None:
        self.backend.check(sampling)

    def checksum_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        if self._staging is None:
            raise ConfigError(f"the KV stays with {self.backend.name}", param="engine")
        layout, blocks = self.facts.kv_layout, self._bytes.reshape(self._staging.num_blocks, -1)
        return tuple(each for block_id in block_ids for each in unit_checksums(blocks[block_id], layout))

    def peek(self, read: Callable[[Engine], T]) -> T:
        return read(self._engine)

    def post(self, callback: EngineCallback) -> None:
        self._inbox.post(callback)

    async def call(self, callback: Callable[[Engine], T]) -> T:
        return await self._inbox.call(callback)

    async def load_adapter(self, entry: AdapterEntry) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._load_adapter(entry), self._loop))

    def retire_adapter(self, adapter: str) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._retire, adapter)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing is left to do
            self._loop.call_soon_threadsafe(self._run_next)

    def _run_next(self) -> None:
        """One callback for each ``_wake``: tasks that it has started run before the next one."""
        entry = None if self._inbox.empty() else self._inbox.take()
        if entry is None:
            self._stop.set()
            return
        try:
            entry.callback(self._engine)
        except Exception:  # noqa: BLE001 - one bad callback must not end the engine
            _log.exception("a callback on the engine failed")
        self._flush_soon()
        self._has_called.set()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = EngineDeadError("the engine is closed")
        died: EngineDeadError | None = None
        try:
            died = self._loop.run_until_complete(self._serve())
        except Exception as exc:  # noqa: BLE001 - the thread's outermost loop
            _log.exception("the engine failed")
            died = EngineDeadError(f"the engine failed: {exc!r}")
        finally:
            self._inbox.end(died or error)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
        if died is not None:
            self._on_dead(died)

    async def _serve(self) -> EngineDeadError | None:
        """Return on a stop, or with the reason why the backend is gone."""
        await self.backend.open()
        stopped, gone = asyncio.ensure_future(self._closed()), asyncio.ensure_future(self._watch())
        reading = asyncio.ensure_future(self._read_events())
        try:
            await asyncio.wait({stopped, gone}, return_when=asyncio.FIRST_COMPLETED)
            died = gone.result() if gone.done() else None
            if died is not None:
                self._engine.die(died)
                self._flush()
            return died
        finally:
            tasks = [stopped, gone, reading, *self._calls.tasks(), *self._retiring.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.backend.close()

    async def _closed(self) -> None:
        """Return once this host is to close: steps of the other ranks need its backend until all ranks are."""
        await self._stop.wait()
        self._group.leave()
        while not self._group.is_over:
            self._has_called.clear()
            await self._has_called.wait()

    async def _watch(self) -> EngineDeadError:
        """Return when the backend, or its group, cannot go on."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            # What was told after the last token.
            self._engine.look()
            failure = await self.backend.failure()
            try:
                self._group.begin_round(has_batch=False)
            except EngineDeadError as exc:
                # A lost rank is also why the backend of this one has failed.
                return exc
            if failure is not None:
                died = EngineDeadError(failure)
                self._group.explain(died)
                return died

    async def _read_events(self) -> None:
        if self._mirror is None or self._cache_events is None:
            return

        def changed(events: list[KvEvent]) -> None:
            self._engine.cache_changed(events)
            self._flush_soon()

        await KvEventReader(self._cache_events.endpoint, self._cache_events.replay, self._mirror, changed).run()

    # -- adapters -----------------------------------------------------------------------------------------------------

    async def _load_adapter(self, entry: AdapterEntry) -> None:
        assert self._adapters is not None, "the facts say that this host loads none"
        if (retiring := self._retiring.pop(entry.id, None)) is not None:
            retiring.cancel()
        while self._adapters.is_full and (ending := self._unused_adapters()):
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        await self._adapters.load(entry)
        if self._mirror is not None:
            self._mirror.adapters.add(entry.id)

    def _unused_adapters(self) -> list[asyncio.Task[None]]:
        """The ends of those that retire and that no request uses: they make room soon."""
        return [task for adapter, task in self._retiring.items() if not self._engine.uses_adapter(adapter)]

    def _retire(self, adapter: str) -> None:
        if adapter not in self._retiring:
            self._retiring[adapter] = self._loop.create_task(self._drop_unused(adapter))

    async def _drop_unused(self, adapter: str) -> None:
        assert self._adapters is not None, "only what was loaded is retired"
        num_looks = 0
        try:
            while num_looks < UNUSED_LOOKS:
                await asyncio.sleep(ADAPTER_INTERVAL_S)
                num_looks = 0 if self._engine.uses_adapter(adapter) else num_looks + 1
            if self._mirror is not None:
                self._mirror.adapters.discard(adapter)
            await self._adapters.drop(adapter)
        except WorkerUnavailableError as exc:
            _log.warning("%s; it keeps its place until it is loaded and unloaded again", exc)
        finally:
            self._retiring.pop(adapter, None)

    # -- what it tells ------------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        """All outputs of one turn of the loop are delivered together."""
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        output = self._engine.take_output()
        if self._samples_load:
            output.load = self._load.sample()
        if not output.is_empty:
            self._on_step(output)
