"""The engine's life: a thread with an event loop that reads the answers, and runs callbacks between its turns."""

from __future__ import annotations

import asyncio
import logging
import mmap
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import uvloop

from kvrelay.config import EngineConfig
from kvrelay.core.checksums import unit_checksums
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.events import KvEvent
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.contract import Engine, EngineFacts
from kvrelay.engine.progress import Progress
from kvrelay.engine.request import Request
from kvrelay.engine.stats import EngineStats, LoadSampler
from kvrelay.engine.step import StepOutput
from kvrelay.engines.hosted.backend import AnswerError, Backend, BackendError, RefusedError, UnconfirmedError
from kvrelay.engines.hosted.engine import StreamedEngine
from kvrelay.engines.hosted.kv_events import KvEventReader
from kvrelay.engines.hosted.mirrored import MirroredCache
from kvrelay.engines.hosted.placed import PlacedPrefixes
from kvrelay.engines.hosted.staged import StagedEngine
from kvrelay.engines.hosted.staging import StagingMemory
from kvrelay.errors import ConfigError, EngineDeadError, KvrelayError

_log = logging.getLogger(__name__)

T = TypeVar("T")

LOAD_INTERVAL_S = 0.05
HEALTH_INTERVAL_S = 1.0


class CacheEvents(NamedTuple):
    """Where a backend publishes its cache events, and where it repeats missed ones (empty: nowhere)."""

    endpoint: str
    replay: str


class StreamedHost:
    """The EngineHost of a StreamedEngine. With ``cache_events`` None the backend's cache is estimated. With ``staging``
    peers exchange KV with that memory, and the backend copies from and to it."""

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
    ) -> None:
        clock = MonotonicClock()
        self._facts = facts
        self._backend = backend
        self._cache_events = cache_events
        block_size = facts.kv_layout.block_size
        self._mirror = None if cache_events is None else MirroredCache(block_size)
        self._progress = Progress(clock)
        build: Callable[..., StreamedEngine] = StreamedEngine
        if staging is not None:
            build = partial(StagedEngine, num_staging_blocks=staging.num_blocks)
        self._staging = staging
        self._engine = build(
            facts,
            config,
            backend,
            # An empty mirror is false.
            PlacedPrefixes(block_size, facts.num_blocks) if self._mirror is None else self._mirror,
            clock,
            worker_id=worker_id,
            eos_token_ids=eos_token_ids,
            begin=self._begin,
            begin_prefill=self._begin_prefill,
            begin_discard=self._begin_discard,
            cancel=self._cancel,
            clear=self._clear_cache,
        )
        self._load = LoadSampler(self._engine, LOAD_INTERVAL_S, clock)
        # Transports need a region to register. Without staging no peer reads or writes it.
        self._memory = staging.memory if staging else mmap.mmap(-1, facts.num_blocks * facts.kv_layout.block_bytes)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._on_step: Callable[[StepOutput], None] = lambda step: None
        self._on_dead: Callable[[EngineDeadError], None] = lambda error: None
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._is_flushing = False
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._dead: EngineDeadError | None = None
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def kv_region(self) -> MemoryRegion:
        return MemoryRegion(self._bytes.ctypes.data, self._bytes.size)

    @property
    def progress(self) -> Progress:
        """It always rests: health checks show whether the backend makes progress."""
        return self._progress

    def start(self, on_step: Callable[[StepOutput], None], on_dead: Callable[[EngineDeadError], None]) -> None:
        self._on_step, self._on_dead = on_step, on_dead
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> bool:
        if self._thread.ident is None:
            self._end(EngineDeadError("the engine is closed"))
            self._loop.close()
            return True
        with self._lock:
            if self._dead is None:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def prepare(self, sampling: SamplingParams) -> None:
        self._backend.check(sampling)

    def checksum_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        if self._staging is None:
            raise ConfigError(f"the KV stays with {self._backend.name}", param="engine")
        layout, blocks = self._facts.kv_layout, self._bytes.reshape(self._staging.num_blocks, -1)
        return tuple(each for block_id in block_ids for each in unit_checksums(blocks[block_id], layout))

    def peek(self, read: Callable[[Engine], T]) -> T:
        return read(self._engine)

    def post(self, callback: Callable[[Engine], object]) -> None:
        def run() -> None:
            try:
                self._perform(callback)
            except Exception:  # noqa: BLE001 - one bad callback must not end the engine
                _log.exception("a callback on the engine failed")

        with self._lock:
            if self._dead is None:
                self._loop.call_soon_threadsafe(run)

    async def call(self, callback: Callable[[Engine], T]) -> T:
        result: Future[T] = Future()

        def run() -> None:
            try:
                found = self._perform(callback)
            except Exception as exc:  # noqa: BLE001 - handed to the caller, whatever it is
                self._settle(result, error=exc)
            else:
                self._settle(result, found)

        with self._lock:
            if self._dead is not None:
                raise self._dead
            self._waiting.add(result)
            self._loop.call_soon_threadsafe(run)
        return await asyncio.wrap_future(result)

    def _settle(self, result: Future[Any], value: object = None, error: Exception | None = None) -> None:
        with self._lock:
            self._waiting.discard(result)
        # The caller may have gone meanwhile.
        if not result.set_running_or_notify_cancel():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def _perform(self, callback: Callable[[Engine], T]) -> T:
        try:
            return callback(self._engine)
        finally:
            self._flush_soon()

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
            self._end(died or error)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
        if died is not None:
            self._on_dead(died)

    async def _serve(self) -> EngineDeadError | None:
        """Return on a stop, or with the reason why the backend is gone."""
        await self._backend.open()
        stopped, gone = asyncio.ensure_future(self._stop.wait()), asyncio.ensure_future(self._watch())
        reading = asyncio.ensure_future(self._read_events())
        try:
            await asyncio.wait({stopped, gone}, return_when=asyncio.FIRST_COMPLETED)
            died = gone.result() if gone.done() else None
            if died is not None:
                self._engine.die(died)
                self._flush()
            return died
        finally:
            tasks = [stopped, gone, reading, *self._streams.values(), *self._ending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._backend.close()

    async def _watch(self) -> EngineDeadError:
        """Return when the backend cannot go on."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            failure = await self._backend.failure()
            if failure is not None:
                return EngineDeadError(failure)

    async def _read_events(self) -> None:
        if self._mirror is None or self._cache_events is None:
            return

        def changed(events: list[KvEvent]) -> None:
            self._engine.cache_changed(events)
            self._flush_soon()

        await KvEventReader(self._cache_events.endpoint, self._cache_events.replay, self._mirror, changed).run()

    def _end(self, error: EngineDeadError) -> None:
        """Callbacks no longer run."""
        with self._lock:
            self._dead = error
            waiting, self._waiting = self._waiting, set()
        for result in waiting:
            self._settle(result, error=error)

    # -- requests at the backend --------------------------------------------------------------------------------------

    def _begin(
        self, request: Request, num_tokens: int, kv_transfer_params: bytes | None, on_rest: Callable[[], None]
    ) -> None:
        self._run_for(request.request_id, self._stream(request, num_tokens, kv_transfer_params), on_rest)

    def _begin_prefill(self, request: Request, kv_transfer_params: bytes | None, on_rest: Callable[[], None]) -> None:
        self._run_for(request.request_id, self._prefill(request, kv_transfer_params), on_rest)

    def _begin_discard(self, kv_transfer_params: bytes) -> None:
        # If that fails, the KV is kept for a while longer, then its engine frees it by itself.
        self._ask_aside(partial(self._backend.discard, kv_transfer_params), "discard KV that no request needs")

    def _clear_cache(self) -> None:
        self._ask_aside(self._backend.clear_cache, "clear its cache")

    def _ask_aside(self, ask: Callable[[], Coroutine[Any, Any, None]], purpose: str) -> None:
        """Ask the backend for what no request waits for."""

        async def asking() -> None:
            try:
                await ask()
            except Exception as exc:  # noqa: BLE001 - whatever it is, requests go on
                _log.warning("%s did not %s: %r", self._backend.name, purpose, exc)

        task = self._loop.create_task(asking())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _run_for(self, request_id: str, asking: Coroutine[Any, Any, None], on_rest: Callable[[], None]) -> None:
        task = self._loop.create_task(asking)
        self._streams[request_id] = task
        task.add_done_callback(lambda done: self._at_rest(request_id, done, on_rest))

    def _cancel(self, request_id: str) -> None:
        """Closes the stream, by which the backend notices that the answer is not needed."""
        task = self._streams.pop(request_id, None)
        if task is not None and task is not asyncio.current_task(self._loop):
            self._ending.add(task)
            task.cancel()

    def _at_rest(self, request_id: str, task: asyncio.Task[None], on_rest: Callable[[], None]) -> None:
        self._ending.discard(task)
        if self._streams.get(request_id) is task:
            del self._streams[request_id]
        if not task.cancelled() and isinstance(task.exception(), UnconfirmedError):
            _log.error("request %s: %s; its staging blocks are not used again", request_id, task.exception())
        else:
            self._perform(lambda engine: on_rest())

    async def _stream(self, request: Request, num_tokens: int, kv_transfer_params: bytes | None) -> None:
        pieces = self._backend.stream(request, num_tokens, kv_transfer_params)
        await self._follow(request.request_id, pieces, self._engine.received)

    async def _prefill(self, request: Request, kv_transfer_params: bytes | None) -> None:
        answer = self._backend.prefill(request, kv_transfer_params)
        await self._follow(request.request_id, answer, self._engine.prefilled)

    async def _follow(
        self, request_id: str, answer: AsyncGenerator[T, None], receive: Callable[[str, T], None]
    ) -> None:
        """Give the engine each item of an answer, and the error that ends it."""
        task = asyncio.current_task()
        try:
            try:
                async for item in answer:
                    receive(request_id, item)
                    self._flush_soon()
                    if self._streams.get(request_id) is not task:
                        return
            finally:
                await answer.aclose()
        except UnconfirmedError as exc:
            self._fail(request_id, exc, task)
            raise
        except (AnswerError, RefusedError) as exc:
            self._fail(request_id, exc, task)
        except Exception:  # noqa: BLE001 - whatever it is, somebody waits for the answer
            _log.exception("request %s failed at %s", request_id, self._backend.name)
            self._fail(request_id, AnswerError(f"asking {self._backend.name} failed"), task)

    def _fail(self, request_id: str, error: KvrelayError, task: asyncio.Task[Any] | None) -> None:
        if self._streams.get(request_id) is task:
            _log.warning(
                "request %s: %s", request_id, error.in_full if isinstance(error, BackendError) else error.message
            )
            self._engine.failed(request_id, error)
            self._flush_soon()

    # -- what it tells ------------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        """All outputs of one turn of the loop are delivered together."""
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        output = self._engine.take_output()
        output.load = self._load.sample()
        if output != StepOutput():
            self._on_step(output)
