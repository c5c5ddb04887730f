"""Publishes a worker's state for routers: the prefix cache's events, numbered and replayable, and the load.

A first load sample goes out at start, before any forward pass; then one on change, at most 20 a second, and at least
one a second while the worker has requests or is at a step. An idle worker repeats its sample every 16 seconds, see
STALE_AFTER_S in ``core/events.py``; a sample that the bus refuses is sent again after a second. Events carry the epoch
of the worker's start: a change of role keeps the prefix cache, so indexes stay valid.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvrelay.control.base import EventBus, Keys, Subscription
from kvrelay.core.clock import next_beat_s
from kvrelay.core.event_codec import encode_frame
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import BlockRemoved, BlockStored, KvEvent, LoadMetrics
from kvrelay.core.sealing import seal
from kvrelay.core.tasks import end_tasks
from kvrelay.errors import KvrelayError

_log = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 1.0
IDLE_INTERVAL_S = 16.0
MAX_BATCH_BLOCKS = 20_000
"""At about 19 bytes per block this is well within the bus's limit of 1 MB per message."""


class Publisher:
    """One worker's events and load on the bus, sealed with ``secret``. All methods but ``update`` run on the loop.
    ``complete`` adds to a sample, when it is sent, what the engine's own numbers do not have."""

    def __init__(
        self,
        worker_id: str,
        bus: EventBus,
        keys: Keys,
        log: KvEventLog,
        step_age_s: Callable[[], float] = lambda: 0.0,
        secret: bytes = b"",
        complete: Callable[[LoadMetrics], LoadMetrics] = lambda load: load,
    ) -> None:
        self._worker_id = worker_id
        self._bus = bus
        self._keys = keys
        self._log = log
        self._step_age_s = step_age_s
        self._secret = secret
        self._complete = complete
        self._pending: list[KvEvent] = []
        self._load: LoadMetrics | None = None
        self._sent_load: LoadMetrics | None = None
        self._sent_s = 0.0
        self._published_s = 0.0
        self._seq = 0
        self._changed, self._is_due, self._loop = asyncio.Event(), False, asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._replay: Subscription | None = None
        self._is_closed = False

    async def start(self, load: LoadMetrics) -> None:
        """Publish the first sample and begin."""
        self._load = load
        await self._publish_load()
        self._replay = await self._bus.serve(self._keys.worker_replay(self._worker_id), self._serve_replay)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def update(self, events: list[KvEvent], load: LoadMetrics | None) -> None:
        """Publish a step's changes; without a sample the load is unchanged. From the engine's thread, which wakes the
        loop for the first of them only."""
        self._pending += events
        if load is not None:
            self._load = load
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon_threadsafe(self._changed.set)

    async def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            await end_tasks([self._task])
        if self._replay is not None:
            try:
                await self._replay.unsubscribe()
            except KvrelayError as exc:
                _log.debug("replay service ends with the connection: %s", exc)

    async def _run(self) -> None:
        while not self._is_closed:
            try:
                async with asyncio.timeout_at(self._due_s):
                    await self._changed.wait()
                # A lone change goes out at once, those of the next moments together.
                await asyncio.sleep(self._published_s + MIN_INTERVAL_S - time.monotonic())
            except TimeoutError:
                pass
            self._changed.clear()
            self._is_due = False  # first: what comes from now on is to be published again
            self._published_s = time.monotonic()
            await self._publish_events()
            await self._publish_load()

    @property
    def _due_s(self) -> float:
        """When the sample is sent again."""
        interval_s = MAX_INTERVAL_S
        if self._load is not None and self._sent_load is not None:
            interval_s = repeat_interval_s(self._load, self._step_age_s())
        return next_beat_s(self._sent_s, interval_s)

    async def _publish_events(self) -> None:
        events = self._pending.copy()
        del self._pending[: len(events)]
        for some in split_events(events):
            batch = self._log.append(some)
            try:
                await self._publish(self._keys.worker_kv_events(self._worker_id), encode_frame(batch))
            except KvrelayError as exc:
                # The log keeps them: indexes notice the gap in the numbers and request a replay.
                _log.debug("events %d.. not published: %s", batch.first_seq, exc)

    async def _publish_load(self) -> None:
        load, now = self._load, time.monotonic()
        if load is None or (load == self._sent_load and now < self._due_s):
            return
        self._sent_load, self._sent_s = load, now
        self._seq += 1
        try:
            # The current age: while a step hangs there is no new sample, and this one is sent repeatedly.
            sample = msgspec.structs.replace(load, seq=self._seq, step_age_s=self._step_age_s())
            await self._publish(self._keys.worker_load(self._worker_id), encode_frame(self._complete(sample)))
        except KvrelayError as exc:
            self._sent_load = None
            _log.debug("load not published: %s", exc)

    async def _serve_replay(self, data: bytes) -> bytes:
        return seal(self._secret, self._keys.worker_replay(self._worker_id), self._log.serve_replay(data))

    async def _publish(self, subject: str, frame: bytes) -> None:
        await self._bus.publish(subject, seal(self._secret, subject, frame))


def repeat_interval_s(load: LoadMetrics, step_age_s: float) -> float:
    """After how long an unchanged sample is repeated. ``step_age_s``: of the running step, 0 without one; a hang shows
    in the age of later samples, also if the load was sampled before the request came."""
    is_idle = load.num_admitted + load.num_waiting == 0 and not step_age_s
    return IDLE_INTERVAL_S if is_idle else MAX_INTERVAL_S


def split_events(events: Sequence[KvEvent], max_blocks: int = MAX_BATCH_BLOCKS) -> Iterator[tuple[KvEvent, ...]]:
    """Slices of ``events`` with at most ``max_blocks`` blocks; an event is not split."""
    some: list[KvEvent] = []
    num_blocks = 0
    for event in events:
        count = len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1
        if some and num_blocks + count > max_blocks:
            yield tuple(some)
            some, num_blocks = [], 0
        some.append(event)
        num_blocks += count
    if some:
        yield tuple(some)
