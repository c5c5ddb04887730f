"""One end of a hand-off without an engine: a pool on a device, the transport and its thread, and what they are told.

    giver                                        taker
    fill ──event── hand_over ──── pieces ──────> arrived ──landed── check

An end does as it is told by orders (``Order``), so it is the same for an end in this process and for one in another
(``peer``). It never decides what is right: it says what it found.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod

import msgspec

from kvrelay.bench.peer import START_TIMEOUT_S
from kvrelay.bench.transfer import COMPATIBILITY, pool_metadata
from kvrelay.certify.device import DONE, Device, Event
from kvrelay.certify.pattern import Cause, Damage, Known, Pattern
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.layout import BlockRun, KVLayout, MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import TransferOp

LATE_S = 0.2
"""How long bytes that have not come may take to show that they were only late."""


class Blocks(msgspec.Struct, frozen=True):
    """Blocks of a pool that hold consecutive tokens of a prompt, from block ``first_block`` on. ``is_at_rest``: they
    belong to no prompt, and each holds the tokens of its own number."""

    ids: tuple[int, ...]
    first_block: int = 0
    is_at_rest: bool = False

    def first_tokens(self, block_size: int) -> list[int]:
        numbers = self.ids if self.is_at_rest else range(self.first_block, self.first_block + len(self.ids))
        return [number * block_size for number in numbers]


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Write the pattern of ``generation``, as a prefill would that computes it."""

    blocks: Blocks
    generation: int


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """Begin to move: ``op`` as seen from here; ``number`` names the hand-off. With ``is_notified`` the peer is told."""

    number: int
    op: TransferOp
    own: Blocks
    peers: Blocks
    is_notified: bool = True


class Await(msgspec.Struct, frozen=True, tag=True):
    """Wait for a hand-off that was begun here."""

    number: int
    timeout_s: float


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End all that is in flight. When this has been answered, nothing of it may move any more."""


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """Wait for the notification of hand-off ``number``."""

    number: int
    timeout_s: float


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compare blocks with the pattern of ``generation``."""

    blocks: Blocks
    generation: int
    known: Known = Known()


class RawCopy(msgspec.Struct, frozen=True, tag=True):
    """Time the device's own copy of so many bytes."""

    num_bytes: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Connect to a peer, whose layout is in its metadata."""

    peer: KvMetadata


Order = Fill | HandOver | Await | Cancel | Arrived | Check | RawCopy | Connect


class Told(msgspec.Struct, frozen=True):
    """The answer to any order. ``error``: why it could not be done, or why a hand-off has failed."""

    seconds: float = 0.0
    error: str | None = None
    damage: Damage | None = None


class End(ABC):
    """One end. ``tell`` raises TransferError only if the end itself is gone."""

    metadata: KvMetadata
    layout: KVLayout
    num_blocks: int

    @abstractmethod
    def tell(self, order: Order) -> Told: ...


class _Flight(msgspec.Struct, eq=False):
    began_s: float
    ended: threading.Event
    told: Told = Told()


class LocalEnd(End):
    """In this process. ``thread``: not started; ``close`` ends it. ``region``: the pool, as it was registered."""

    def __init__(
        self,
        worker_id: str,
        device: Device,
        region: MemoryRegion,
        layout: KVLayout,
        thread: TransferThread,
        transport: str,
        clock: Clock | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = region.num_bytes // layout.block_bytes
        self._device, self._thread = device, thread
        self._clock = clock or MonotonicClock()
        self._pattern = Pattern(layout)
        self._filled: dict[int, Event] = {}
        """By block: what must be waited for before it is sent."""
        self._flights: dict[int, _Flight] = {}
        self._mapping: LayoutMapping | None = None
        self._peer_id = ""
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._seen: set[int] = set()
        thread.on_notification(self._notified)
        thread.start()
        agent = thread.register(region, kv_compatibility=COMPATIBILITY).result(START_TIMEOUT_S)
        thread.open_handoff()
        self.metadata = pool_metadata(worker_id, transport, agent, region, layout)

    def tell(self, order: Order) -> Told:
        match order:
            case Fill(blocks, generation):
                return self._fill(blocks, generation)
            case HandOver():
                return self._hand_over(order)
            case Await(number, timeout_s):
                return self._await(number, timeout_s)
            case Cancel():
                self._thread.fail_all("cancelled").result(START_TIMEOUT_S)
                return Told()
            case Arrived(number, timeout_s):
                return self._wait_arrived(number, timeout_s)
            case Check(blocks, generation, known):
                return Told(damage=self._check(blocks, generation, known))
            case RawCopy(num_bytes):
                return Told(self._device.raw_copy_s(num_bytes))
            case Connect(peer):
                return self._connect(peer)

    def close(self) -> None:
        """End the thread and the transport. Idempotent."""
        self._thread.close()
        self._device.close()

    def _connect(self, peer: KvMetadata) -> Told:
        assert peer.layout is not None
        self._mapping, self._peer_id = LayoutMapping(self.layout, peer.layout), peer.worker_id
        self._thread.add_peer(peer).result(START_TIMEOUT_S)
        return Told()

    def _fill(self, blocks: Blocks, generation: int) -> Told:
        rows = self._pattern.blocks(generation, blocks.first_tokens(self.layout.block_size))
        event = self._device.put(self._offsets(blocks), rows)
        self._filled |= dict.fromkeys(blocks.ids, event)
        return Told()

    def _hand_over(self, order: HandOver) -> Told:
        assert self._mapping is not None, "no peer"
        for event in {id(event): event for id_ in order.own.ids if (event := self._filled.get(id_, DONE))}.values():
            event.wait()
        flight = self._flights[order.number] = _Flight(self._clock.now(), threading.Event())

        def ended(error: str | None) -> None:
            flight.told = Told(self._clock.now() - flight.began_s, error)
            flight.ended.set()

        own, peers = (BlockRun(blocks.first_block, blocks.ids) for blocks in (order.own, order.peers))
        pieces = self._mapping.pieces(order.op, own, peers)
        notify = str(order.number).encode() if order.is_notified else None
        self._thread.submit(order.op, self._peer_id, pieces, notify, on_done=ended)
        return Told()

    def _await(self, number: int, timeout_s: float) -> Told:
        flight = self._flights.pop(number)
        if not flight.ended.wait(timeout_s):
            return Told(timeout_s, f"hand-off {number} had not ended after {timeout_s:g} s")
        return flight.told

    def _notified(self, notification: bytes) -> None:
        if notification.isdigit():
            self._arrived.put(int(notification))

    def _wait_arrived(self, number: int, timeout_s: float) -> Told:
        deadline_s = time.monotonic() + timeout_s
        while number not in self._seen:
            try:
                self._seen.add(self._arrived.get(timeout=max(0.0, deadline_s - time.monotonic())))
            except queue.Empty:
                return Told(timeout_s, f"the notification of hand-off {number} had not come after {timeout_s:g} s")
        self._seen.discard(number)
        return Told()

    def _check(self, blocks: Blocks, generation: int, known: Known) -> Damage | None:
        damage = self._look(blocks, generation, known)
        if damage is None or damage.cause is not Cause.NOT_ARRIVED:
            return damage
        time.sleep(LATE_S)
        if self._look(blocks, generation, known) is None:
            return msgspec.structs.replace(damage, cause=Cause.READ_EARLY)
        return damage

    def _look(self, blocks: Blocks, generation: int, known: Known) -> Damage | None:
        self._device.landed()
        found = self._device.get(self._offsets(blocks), self.layout.block_bytes)
        return self._pattern.diagnose(found, generation, blocks.first_tokens(self.layout.block_size), known)

    def _offsets(self, blocks: Blocks) -> list[int]:
        return [id_ * self.layout.block_bytes for id_ in blocks.ids]
