"""The in-memory plane's prefill queue: entries in a deque, deliveries with a deadline, dead letters in a list."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import msgspec

from kvrelay.control.base import PrefillDelivery
from kvrelay.control.memory_events import Connected
from kvrelay.control.queue_order import QueueTurns
from kvrelay.core.clock import Clock
from kvrelay.core.control_codec import decode_prefill
from kvrelay.core.handoff import QueueClass, RemotePrefillRequest
from kvrelay.core.tasks import happen
from kvrelay.errors import ProtocolError

_log = logging.getLogger(__name__)


class _QueueEntry(msgspec.Struct):
    partition: str
    data: bytes
    pushed_s: float
    queue_class: QueueClass = QueueClass.NORMAL
    ready_s: float = 0.0
    num_deliveries: int = 0


class MemoryQueue:
    """The server's side: entries that are queued, and entries that are pulled and not yet acknowledged."""

    def __init__(self, clock: Clock, ack_wait_s: float, max_deliveries: int) -> None:
        self._clock = clock
        self.ack_wait_s = ack_wait_s
        self._max_deliveries = max_deliveries
        self._entries: deque[_QueueEntry] = deque()
        self.pulled: set[MemoryPrefillDelivery] = set()
        self.dead_letters: list[RemotePrefillRequest] = []
        self.num_malformed = 0
        self.num_expired = 0
        self._turns = QueueTurns()
        self.changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"MemoryQueue(queued={len(self._entries)}, pulled={len(self.pulled)}, dead={len(self.dead_letters)})"

    def num_waiting(self, partition: str | None) -> int:
        """Number of entries that no consumer has pulled yet, in one partition or in all."""
        return sum(entry.num_deliveries == 0 and partition in (None, entry.partition) for entry in self._entries)

    def wipe(self) -> None:
        self._entries.clear()
        self.pulled.clear()

    def tick(self) -> None:
        """Deliver again every entry that was not acknowledged in time."""
        now = self._clock.now()
        for delivery in [item for item in self.pulled if now >= item.deadline_s]:
            self.give_back(delivery, 0.0)
        self.changed.set()

    def deadline_s(self) -> float:
        """The ack deadline of a consumer that was heard now."""
        return self._clock.now() + self.ack_wait_s

    def push_raw(self, partition: str, data: bytes, queue_class: QueueClass = QueueClass.NORMAL) -> None:
        """An entry in its wire form. Tests also push garbage."""
        self._entries.append(_QueueEntry(partition, data, self._clock.now(), queue_class))
        self.changed.set()

    def pop(self, partition: str, plane: Connected) -> MemoryPrefillDelivery | None:
        """The partition's first entry that may be delivered now, to ``plane``."""
        now = self._clock.now()
        ready = [entry for entry in self._entries if entry.partition == partition and entry.ready_s <= now]
        if not ready:
            return None
        order = self._turns.next_order()
        for entry in sorted(ready, key=lambda entry: order.index(entry.queue_class)):
            self._entries.remove(entry)
            entry.num_deliveries += 1
            delivery = self._accept(entry, plane)
            if delivery is not None:
                self.pulled.add(delivery)
                return delivery
        return None

    def _accept(self, entry: _QueueEntry, plane: Connected) -> MemoryPrefillDelivery | None:
        try:
            request = decode_prefill(entry.data)
        except ProtocolError as exc:
            self.num_malformed += 1
            _log.warning("dropped a malformed entry of the prefill queue: %s", exc)
            return None
        if entry.num_deliveries > self._max_deliveries:
            self.dead_letters.append(request)
            return None
        is_expired = 0.0 < request.timeout_s < self._clock.now() - entry.pushed_s
        if is_expired:
            self.num_expired += 1
        return MemoryPrefillDelivery(plane, self, entry, request, entry.num_deliveries, is_expired, self.deadline_s())

    def give_back(self, delivery: MemoryPrefillDelivery, delay_s: float) -> None:
        if delivery in self.pulled:
            self.pulled.discard(delivery)
            delivery.entry.ready_s = self._clock.now() + delay_s
            self._entries.appendleft(delivery.entry)
            self.changed.set()


class MemoryPrefillDelivery(msgspec.Struct, eq=False):
    """One entry, leased to a consumer until ``deadline_s``. ``entry`` is what the queue gets back."""

    plane: Connected
    queue: MemoryQueue
    entry: _QueueEntry
    request: RemotePrefillRequest
    num_deliveries: int
    is_expired: bool
    deadline_s: float

    async def ack(self) -> None:
        self.plane.check_connected()
        self.queue.pulled.discard(self)

    async def nak(self, delay_s: float = 0.0) -> None:
        self.plane.check_connected()
        self.queue.give_back(self, delay_s)

    async def in_progress(self) -> None:
        self.plane.check_connected()
        self.deadline_s = self.queue.deadline_s()


class MemoryPrefillQueue:
    """One process's PrefillQueue."""

    def __init__(self, plane: Connected, queue: MemoryQueue) -> None:
        self._plane = plane
        self._queue = queue

    async def push(self, request: RemotePrefillRequest) -> None:
        self._plane.check_connected()
        self._queue.push_raw(request.kv_compatibility, msgspec.msgpack.encode(request), request.queue_class)

    async def pull(self, kv_compatibility: str, timeout_s: float) -> PrefillDelivery | None:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            self._plane.check_connected()
            delivery = self._queue.pop(kv_compatibility, self._plane)
            remaining_s = deadline_s - asyncio.get_running_loop().time()
            if delivery is not None or remaining_s <= 0:
                return delivery
            self._queue.changed.clear()
            await happen(remaining_s, self._queue.changed)

    async def size(self, kv_compatibility: str | None = None) -> int:
        self._plane.check_connected()
        return self._queue.num_waiting(kv_compatibility)
