"""The thread on which an engine is loaded and runs.

It owns the loop "drain the inbox, step, deliver". It does not know what the callbacks in the inbox do. They run between
two steps, so nothing else ever touches the engine, which therefore needs no locks. With nothing to step the thread
sleeps on its inbox. When it ends, every caller that waits for a result gets an error. A closed engine of a
data-parallel group keeps taking part in the group's steps until the other ranks are closed too.

OpenMP keeps a team of threads for every thread that computes, and as soon as two teams share the cores their threads no
longer spin between two kernels. So the thread that loads and warms up an engine also steps it (``EngineThread.load``).
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TypeVar

from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.contract import Engine, EngineFacts, OnDead, OnStep
from kvrelay.engine.core import EngineCore
from kvrelay.engine.inbox import EngineCallback, EngineInbox, Entry
from kvrelay.engine.progress import Progress
from kvrelay.engine.stats import EngineStats, LoadSampler
from kvrelay.engine.step import StepOutput
from kvrelay.errors import EngineDeadError

T = TypeVar("T")

_log = logging.getLogger(__name__)


INBOX_S = 0.003
"""Time between two steps for the inbox: a burst of long prompts takes long to take in, and answers go on meanwhile."""
LOAD_INTERVAL_S = 0.05
"""Shortest interval of load samples."""


def _ignore(_: object) -> None:
    """No caller waits for the result."""


class EngineThread:
    """The EngineHost of an EngineCore: steps ``core`` on a separate thread until closed."""

    def __init__(self, core: EngineCore, idle_wait_s: float = 0.5, clock: Clock | None = None) -> None:
        clock = clock or MonotonicClock()
        self._clock = clock
        self.progress = Progress(clock)
        self._core = core
        self._load = LoadSampler(core, LOAD_INTERVAL_S, clock)
        self._samples_load = True
        self._on_step: OnStep = _ignore
        self._on_dead: OnDead = _ignore
        self._idle_wait_s = idle_wait_s
        self._inbox = EngineInbox()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._may_run: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_shut_down = False

    @classmethod
    def load(cls, build: Callable[[], EngineCore], idle_wait_s: float = 0.5) -> EngineThread:
        """Build the core on the thread that will step it, and wait for it. Raises what ``build`` raises. ``close`` it
        even if it is never started."""
        loaded: Future[EngineThread] = Future()

        def main() -> None:
            try:
                host = cls(build(), idle_wait_s)
            except BaseException as exc:  # noqa: BLE001 - raised again in the caller's thread
                loaded.set_exception(exc)
                return
            host._thread = threading.current_thread()
            loaded.set_result(host)
            host._main()

        threading.Thread(target=main, name="engine", daemon=True).start()
        return loaded.result()

    @cached_property
    def facts(self) -> EngineFacts:
        executor = self._core.executor
        return EngineFacts(
            kv_layout=executor.kv_layout,
            num_blocks=executor.num_blocks,
            max_model_len=self._core.max_model_len,
            vocab_size=executor.vocab_size,
            weights_fingerprint=executor.weights_fingerprint,
            hands_over_kv=executor.kv_region.is_pool,
            has_open_cache=executor.kv_region.is_pool,
            num_holding_blocks=executor.num_holding_blocks,
        )

    @property
    def kv_region(self) -> MemoryRegion:
        return self._core.executor.kv_region

    @property
    def has_turn(self) -> bool:
        """Whether the next turn (``drain_inbox``, a step, ``deliver``) has something to do, and does not wait."""
        return self._core.has_work() or not self._inbox.empty()

    def start(self, on_step: OnStep, on_dead: OnDead, *, samples_load: bool = True) -> None:
        self._on_step, self._on_dead, self._samples_load = on_step, on_dead, samples_load
        self._core.group.listen(lambda change: self.post(lambda _: change()))
        if self._core.storage is not None:
            self._core.storage.start(self._loaded, lambda: self.post(lambda _: None))
        self._may_run.put(True)
        if not self._thread.is_alive():
            self._thread.start()

    def close(self, timeout_s: float | None = None) -> bool:
        self._may_run.put(False)
        self._inbox.stop()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        has_ended = not self._thread.is_alive()
        if has_ended and not self._is_shut_down:
            self._is_shut_down = True
            if self._core.storage is not None:
                self._core.storage.close()
            self._core.executor.shutdown()
            self._core.group.close()
        return has_ended

    def stats(self) -> EngineStats:
        return self._core.stats()

    def prepare(self, sampling: SamplingParams) -> None:
        self._core.executor.prepare(sampling)

    def checksum_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        return self._core.executor.checksum_blocks(block_ids)

    def peek(self, read: Callable[[Engine], T]) -> T:
        return read(self._core)

    def post(self, callback: EngineCallback) -> None:
        self._inbox.post(callback)

    async def call(self, callback: Callable[[Engine], T]) -> T:
        return await self._inbox.call(callback)

    def _main(self) -> None:
        if self._may_run.get():
            self._run()

    def _run(self) -> None:
        try:
            while self.drain_inbox():
                # A step may end with outputs even when no forward pass ran: aborts, remote prefills, events.
                self.deliver(self._core.step(announce=self.deliver))
            self._see_group_off()
            if self._core.storage is not None:
                self._core.storage.flush(self._core.pool)
        except EngineDeadError as exc:
            self._die(exc)
        except Exception as exc:  # noqa: BLE001 - the thread's outermost loop
            _log.exception("the engine failed")
            error = EngineDeadError(f"the engine failed: {exc}")
            error.__cause__ = exc
            self._die(error)
        else:
            self._inbox.end(EngineDeadError("the engine is closed"))
        finally:
            self.progress.rest()

    def deliver(self, step: StepOutput) -> None:
        """Hand on what a step has put out, with a sample of the load."""
        if self._samples_load:
            step.load = self._load.sample(may_put_off=True)
        if not step.is_empty:
            self._on_step(step)

    def _loaded(self, request_id: str, is_whole: bool, num_blocks: int) -> None:
        self.post(lambda _: self._core.kv_loaded(request_id, is_whole, num_blocks))

    def _die(self, error: EngineDeadError) -> None:
        self._inbox.end(error)
        self._on_dead(error)

    def drain_inbox(self) -> bool:
        """Run what is in the inbox; wait for a callback only if the engine has nothing to step. False: closed."""
        self.progress.begin()
        has_work = self._core.has_work()
        return (has_work and self._inbox.empty()) or self._run_inbox(wait=not has_work)

    def _see_group_off(self) -> None:
        """Closed: this rank has no work left, but its group's steps need it until all ranks are closed."""
        group = self._core.group
        group.leave()
        while not group.is_over:
            self.progress.begin()
            self._run_inbox(wait=not group.owes_step)
            self._core.step_for_group()

    def _run_inbox(self, *, wait: bool) -> bool:
        """Until it is empty, or for INBOX_S while there is something to step. False: closed."""
        until_s = math.inf
        while self._clock.now() < until_s or not self._core.has_work():
            try:
                entry = self._wait_for_entry() if wait else self._inbox.take()
            except queue.Empty:
                return True
            if entry is None:
                return False
            until_s = min(until_s, self._clock.now() + INBOX_S)
            self._run_callback(entry.callback)
            wait = False
        return True

    def _wait_for_entry(self) -> Entry | None:
        """Raises queue.Empty if none arrives for a while, or until a sample of the load is due."""
        self.progress.rest()
        try:
            return self._inbox.take(min(self._idle_wait_s, self._load.owed_in_s))
        finally:
            self.progress.begin()

    def _run_callback(self, callback: EngineCallback) -> None:
        try:
            callback(self._core)
        except EngineDeadError:
            raise
        except Exception:  # noqa: BLE001 - one bad callback must not end the engine
            _log.exception("a callback on the engine thread failed")
