"""The decode side's end of the prefill queue: pushes entries, and knows how many wait while requests arrive.

It owns the last known size, and stops asking a queue that does not answer. ``prefill/pulling.py`` is the other end; the
hand-off ledger decides what is pushed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvrelay.control.base import PrefillQueue
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.histogram import Histogram
from kvrelay.core.latest import Latest
from kvrelay.core.tasks import TaskSet, happen
from kvrelay.errors import ControlUnavailableError, KvrelayError
from kvrelay.handoff import decode_events as de
from kvrelay.handoff.messages import HandoffGrant
from kvrelay.placement.base import PrefillLoad
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.rpc.wire import Message
from kvrelay.worker.sides.ports import ConnectionPort

_log = logging.getLogger(__name__)

SIZE_INTERVAL_S = 0.02
"""Between two looks at a queue in which entries wait, and from a push to the next look."""
QUIET_INTERVAL_S = 0.2
"""Between two looks at an empty one. A look takes the control server and this process about as much CPU time as a
token, and what this worker has pushed it knows without one."""
WATCH_FOR_S = 1.0
STALL_S = 1.0
"""A push that fails after so long has kept its request waiting."""
MAX_PUSHED = 4096
"""Prefills whose time until the grant is measured."""
REST_S = 5.0
"""After such a failure, how long no other push is tried. One request in this time may wait, not all."""


class QueuedPrefills:
    """Prefills of this worker that wait for a prefill worker. ``handle`` takes the events of failed pushes. Everything
    runs on the event loop, except for ``prefill_side``."""

    def __init__(
        self,
        queue: PrefillQueue,
        policy: DisaggPolicy,
        *,
        model: str,
        kv_compatibility: str,
        address: Callable[[], str],
        num_prefill_workers: Callable[[], int],
        handle: Callable[[de.DecodeEvent], None],
        clock: Clock | None = None,
    ) -> None:
        self._queue = queue
        self._policy = policy
        self._model = model
        self._kv_compatibility = kv_compatibility
        self._address = address
        self._num_prefill_workers = num_prefill_workers
        self._handle = handle
        self._clock = clock or MonotonicClock()
        self.push_error: str | None = None
        """Why the last push failed; None if it succeeded. Whether the next one would fail is not known."""
        self._push_failed_s = 0.0
        self._is_stalled = False
        self._resting_until_s = -math.inf
        self._size = 0
        self._last_request_s = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._pushed = asyncio.Event()
        self._tasks = TaskSet()

    async def close(self) -> None:
        await self._tasks.close()

    def prefill_side(self) -> PrefillLoad:
        """The prefill workers and their queue, as far as known. From any thread."""
        return PrefillLoad(self._num_prefill_workers(), self._size)

    @property
    def push_error_age_s(self) -> float:
        return 0.0 if self.push_error is None else self._clock.now() - self._push_failed_s

    def push(self, prefill: RemotePrefillRequest) -> None:
        """Begin to push an entry; NoPrefillWorker or PushFailed follows if that is impossible."""
        self._tasks.spawn(self._push(prefill))

    async def _push(self, prefill: RemotePrefillRequest) -> None:
        if not self._num_prefill_workers():
            # The last one left after the engine's thread had decided, and before this hand-off was open to be taken
            # back. Nobody would pull its entry.
            self._handle(de.NoPrefillWorker())
            return
        begun_s = self._clock.now()
        if begun_s < self._resting_until_s:
            _log.debug("prefill %s is computed here: the queue does not answer", prefill.handoff_id)
            self._handle(de.PushFailed(prefill.handoff_id))
            return
        if self._is_stalled:
            self._resting_until_s = begun_s + REST_S  # this push is the one that is tried
        request = msgspec.structs.replace(
            prefill,
            decode_address=self._address(),
            model=self._model,
            kv_compatibility=self._kv_compatibility,
            timeout_s=self._policy.config.remote_prefill_timeout_s,
        )
        try:
            await self._queue.push(request)
        except KvrelayError as exc:
            _log.warning("cannot queue prefill %s, computing it here: %s", prefill.handoff_id, exc)
            self.push_error = str(exc)
            self._push_failed_s = now_s = self._clock.now()
            if now_s - begun_s >= STALL_S:
                self._is_stalled, self._resting_until_s = True, now_s + REST_S
            self._handle(de.PushFailed(prefill.handoff_id))
        else:
            self.push_error = None
            self._pushed.set()
            self._is_stalled, self._resting_until_s = False, -math.inf

    def watch(self) -> None:
        """A request has arrived: look at the queue's size now and then, until a second after the last one."""
        self._last_request_s = time.monotonic()
        if self._num_prefill_workers() and (self._watching is None or self._watching.done()):
            self._watching = self._tasks.spawn(self._refresh_size())

    async def _refresh_size(self) -> None:
        while time.monotonic() - self._last_request_s < WATCH_FOR_S:
            try:
                self._size = await self._queue.size(self._kv_compatibility)
            except ControlUnavailableError:
                self._size = self._policy.config.max_prefill_queue_size
            if not self._size:
                await happen(QUIET_INTERVAL_S, self._pushed)
            self._pushed.clear()
            await asyncio.sleep(SIZE_INTERVAL_S)
        self._size = 0


class TimedGrants:
    """Implements ``ConnectionPort``, and measures what it sends: from the push of a prefill to its first grant. On the
    event loop."""

    def __init__(self, server: ConnectionPort, push: Callable[[RemotePrefillRequest], None]) -> None:
        self.times = Histogram()
        self._server, self._push = server, push
        self._pushed_s: Latest[HandoffId, float] = Latest(MAX_PUSHED)

    def push(self, prefill: RemotePrefillRequest) -> None:
        self._pushed_s[prefill.handoff_id] = time.monotonic()
        self._push(prefill)

    def send(self, peer: Any, message: Message, /) -> bool:
        if isinstance(message, HandoffGrant) and message.handoff_id in self._pushed_s:
            self.times.observe(time.monotonic() - self._pushed_s.pop(message.handoff_id))
        return self._server.send(peer, message)
