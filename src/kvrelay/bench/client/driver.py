"""Sends classes of requests on schedule and collects the records; checks that the client itself keeps up.

One event loop, one task per request in flight. Bodies are encoded ahead of time, and the garbage collector is off
during a run. Every sent request yields exactly one record, also if the run is cut short.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from kvrelay.bench.client.connection import ConnectionPool
from kvrelay.bench.client.stream import BodyOptions, StreamRecorder, encode_body, run_stream
from kvrelay.bench.load.request import LoadClass
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import INTERRUPTED, ClientLoad, Outcome, RequestRecord, RunResult

_AHEAD = 256
_BACKOFF_S = 0.1
_LAG_PROBE_S = 0.02
WARM_UP_LIMIT_S = 300.0
"""A server may compile in its first steps."""


class RunLimits(msgspec.Struct, frozen=True):
    """``time_limit_s`` ends the sending. Requests in flight then have ``drain_s`` to end, or else are cut off. One that
    has no whole answer after ``request_s`` has failed, so that a server that hangs does not hold up the run for ever.

    After ``max_failures`` failures in a row the run ends: the server is down.
    """

    time_limit_s: float | None = None
    drain_s: float = 60.0
    request_s: float = 3600.0
    max_failures: int = 200


class _Prepared:
    """The next request of a class: encoded before it is due, a fixed number ahead."""

    def __init__(self, load: LoadClass, options: BodyOptions) -> None:
        self._requests = load.requests
        self._options = options
        self._left = load.num_requests
        self._ready: deque[tuple[bytes, int | None]] = deque()
        for _ in range(_AHEAD):
            self._encode_one()

    def pop(self) -> tuple[bytes, int | None] | None:
        """Body and prompt length; None at the end. The queue is refilled when the loop is next free."""
        if not self._ready:
            return None
        asyncio.get_running_loop().call_soon(self._encode_one)
        return self._ready.popleft()

    def _encode_one(self) -> None:
        if self._left is not None:
            if self._left == 0:
                return
            self._left -= 1
        request = next(self._requests, None)
        if request is None:
            self._left = 0
            return
        self._ready.append((encode_body(request, self._options), request.prompt_len))


class LoadDriver:
    """Runs load against one server. One object per run."""

    def __init__(self, pool: ConnectionPool, options: BodyOptions, limits: RunLimits, bar: ProgressBar) -> None:
        self._pool = pool
        self._options = options
        self._limits = limits
        self._bar = bar
        self._records: list[RequestRecord] = []
        self._in_flight: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._failures_in_row = 0
        self._gave_up = asyncio.Event()

    async def run(self, classes: tuple[LoadClass, ...]) -> RunResult:
        """Send until the classes or the time end. An interrupt (task cancellation) ends the run early and keeps its
        records."""
        prepared = [_Prepared(load, self._options) for load in classes]
        self._bar.stage("requests", self._total(classes))
        note = None
        with _quiet_gc():
            lag = _LagProbe()
            reconnects = self._pool.reconnects
            cpu_s, start_ns = time.process_time(), time.perf_counter_ns()
            senders = [asyncio.ensure_future(self._send_class(*pair, start_ns)) for pair in zip(classes, prepared)]
            watcher = asyncio.ensure_future(self._gave_up.wait())
            try:
                note = await self._until_stopped(senders, watcher)
                stop_ns = time.perf_counter_ns()
                await self._drain()
            except asyncio.CancelledError:
                note, stop_ns = INTERRUPTED, time.perf_counter_ns()
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
            finally:
                await self._end([*senders, watcher, *self._in_flight])
                lag.stop()
            wall_s = (time.perf_counter_ns() - start_ns) / 1e9
            cpu_share = (time.process_time() - cpu_s) / wall_s
            client = ClientLoad(cpu_share, lag.max_s, self._pool.reconnects - reconnects)
        return RunResult(tuple(self._records), start_ns, stop_ns, client, note)

    async def _until_stopped(self, senders: Sequence[asyncio.Task[None]], watcher: asyncio.Task[Any]) -> str | None:
        """Wait for the senders, the time limit, or a dead server. Returns the reason if the senders were not done."""
        everyone = asyncio.ensure_future(asyncio.wait(senders))
        await asyncio.wait([everyone, watcher], timeout=self._limits.time_limit_s, return_when=asyncio.FIRST_COMPLETED)
        self._stopping = True
        if everyone.done():
            for sender in senders:
                sender.result()
            return None
        await self._end([everyone, *senders])
        if self._gave_up.is_set():
            return f"given up after {self._limits.max_failures} failures in a row"
        return None

    async def _drain(self) -> None:
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=self._limits.drain_s)

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_class(self, load: LoadClass, prepared: _Prepared, start_ns: int) -> None:
        if load.offsets is None:
            users = [self._user(load, prepared) for _ in range(load.max_concurrency or 1)]
            await asyncio.gather(*users)
        else:
            await self._send_on_time(load, load.offsets, prepared, start_ns)

    async def _user(self, load: LoadClass, prepared: _Prepared) -> None:
        """One user of a closed loop. It pauses after a failure, so that it does not flood a dead server."""
        while not self._stopping and (next_up := prepared.pop()) is not None:
            task = self._start(load.name, *next_up)
            failures = self._failures_in_row
            await asyncio.wait([task])
            if self._failures_in_row > failures:
                await asyncio.sleep(_BACKOFF_S)

    async def _send_on_time(
        self, load: LoadClass, offsets: Iterator[float], prepared: _Prepared, start_ns: int
    ) -> None:
        slots = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
        while not self._stopping and (next_up := prepared.pop()) is not None:
            offset = next(offsets, None)
            if offset is None:
                return
            await asyncio.sleep(max(0.0, offset - (time.perf_counter_ns() - start_ns) / 1e9))
            if slots is not None:
                await slots.acquire()
            due_ns = start_ns + int(offset * 1e9) if slots is None else time.perf_counter_ns()
            task = self._start(load.name, *next_up, due_ns)
            if slots is not None:
                task.add_done_callback(partial(_release, slots))
        # A class ends with its last answer.
        mine = [task for task in self._in_flight if task.get_name() == load.name]
        if mine:
            await asyncio.wait(mine)

    def _start(self, class_name: str, body: bytes, prompt_len: int | None, due_ns: int = 0) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._one(class_name, body, prompt_len, due_ns))
        task.set_name(class_name)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return task

    async def _one(self, class_name: str, body: bytes, prompt_len: int | None, due_ns: int) -> None:
        recorder = StreamRecorder(class_name, prompt_len, due_ns)
        limit_s = self._limits.request_s
        try:
            async with asyncio.timeout(limit_s):
                record = await run_stream(self._pool, self._options.endpoint, body, recorder)
        except TimeoutError:
            error = f"no whole answer within {limit_s:g} s (--timeout)"
            record = recorder.record(Outcome.FAILED, time.perf_counter_ns(), error)
        except asyncio.CancelledError:
            record = recorder.record(Outcome.CUT_OFF, time.perf_counter_ns())
        self._records.append(record)
        failed = record.outcome is Outcome.FAILED
        self._failures_in_row = self._failures_in_row + 1 if failed else 0
        if self._failures_in_row >= self._limits.max_failures:
            self._gave_up.set()
        self._bar.update(len(self._records), f"{len(self._in_flight)} in flight")

    def _total(self, classes: tuple[LoadClass, ...]) -> float | None:
        counts = [load.num_requests for load in classes]
        return None if None in counts else float(sum(count or 0 for count in counts))


def _release(slots: asyncio.Semaphore, _: asyncio.Task[None]) -> None:
    slots.release()


class _LagProbe:
    """Wakes up regularly and records its largest delay."""

    def __init__(self) -> None:
        self.max_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + _LAG_PROBE_S
        self._handle = self._loop.call_at(self._due, self._wake)

    def stop(self) -> None:
        self._handle.cancel()

    def _wake(self) -> None:
        now = self._loop.time()
        self.max_s = max(self.max_s, now - self._due)
        self._due = now + _LAG_PROBE_S
        self._handle = self._loop.call_at(self._due, self._wake)


@contextmanager
def _quiet_gc() -> Iterator[None]:
    """No garbage collection during a run: a collection over many records would delay timestamps by tens of
    milliseconds."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def warm_up(
    pool: ConnectionPool, options: BodyOptions, load: LoadClass, count: int, concurrency: int
) -> tuple[RequestRecord, ...]:
    """Send ``count`` requests that are not measured, ``concurrency`` at a time. Their records show whether the server
    works; what has not ended within WARM_UP_LIMIT_S is cut off."""
    driver = LoadDriver(pool, options, RunLimits(WARM_UP_LIMIT_S, drain_s=0.0), ProgressBar(None))
    closed = LoadClass(load.name, load.requests, max_concurrency=min(count, concurrency), num_requests=count)
    return (await driver.run((closed,))).records if count else ()
