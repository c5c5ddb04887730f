"""A fake accelerator: devices whose work is asynchronous, a link that counts and takes time, and faults in all of them.

    put ──> pending ──event, get──> live memory <──── a transport's bytes     what a NIC reads and writes
                                        │ landed
                                     visible                                  what ``get`` reads

It is as late as it may be: what was put is in live memory only when its event has been waited for or when the same
stream reads; what a transport has written is visible only after ``landed``. The product's ranks, splitting, mappings
and transfer thread run on it. ``Fault`` is what a test breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvrelay.certify.counters import Octets
from kvrelay.certify.device import DONE, Device, Event
from kvrelay.certify.ends import Connect, LocalEnd
from kvrelay.certify.pattern import UInt8Array
from kvrelay.config import TransferConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.layout import KVLayout, MemoryRegion
from kvrelay.core.window import RemoteKey
from kvrelay.core.workers import KvMetadata
from kvrelay.transfer.base import Post, PostEnd
from kvrelay.transfer.loopback import LoopbackFabric, LoopbackTransport
from kvrelay.transfer.ranks.link import RankTransport
from kvrelay.transfer.ranks.messages import RankMemory
from kvrelay.transfer.ranks.transport import RankedTransport
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import Pieces, TransferOp

RATE = 25e9
"""Bytes per second of the link."""
POST_S = 1e-7
POLL_S = 5e-5

Mangle = Callable[[UInt8Array, KVLayout], UInt8Array]
"""The bytes of a piece on their way."""


@dataclass
class Fault:
    """What is broken; nothing by default."""

    sends_unwaited: bool = False
    """Events end before their work."""
    reads_unwaited: bool = False
    """``landed`` returns before the bytes are visible."""
    mangle: Mangle | None = None
    shift_blocks: int = 0
    """Bytes land so many blocks further on."""
    spills: bool = False
    """The last piece is written once more, behind itself."""
    loses_last: bool = False
    is_unregistered: bool = False
    """The memory that the peer writes into is no longer the pool."""
    ends_early: bool = False
    """A post ends, and its notification is out, before its bytes have moved."""
    late_looks: int = 1
    """So often a device's memory is looked at before they have."""
    only_unnotified: bool = False
    """Only writes without a notification do, as of a hand-off that was given up."""
    never_ends: bool = False
    loses_notification: bool = False
    swaps_ranks: bool = False
    is_tcp: bool = False
    rate: float = 1.0
    octets: float = 1.0
    """What the link counts for each byte."""


@dataclass
class FakeLink:
    """The NIC between the two: it takes time and counts."""

    clock: ManualClock
    fault: Fault
    late: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    """Copies that land after so many looks at a device's memory."""
    octets: dict[str, int] = field(default_factory=lambda: {"mlx5_0:1": 0, "eth0": 0})

    def deliver_late(self) -> None:
        """What was held back for long enough lands now."""
        due = [copy for looks, copy in self.late if looks <= 1]
        self.late[:] = [(looks - 1, copy) for looks, copy in self.late if looks > 1]
        for copy in due:
            copy()

    def carry(self, num_bytes: int) -> None:
        rate = RATE / 20 if self.fault.is_tcp else RATE * self.fault.rate
        self.clock.advance(POST_S + num_bytes / rate)
        self.octets["eth0" if self.fault.is_tcp else "mlx5_0:1"] += int(num_bytes * self.fault.octets)

    def read(self) -> Octets:
        return Octets({"eth0": self.octets["eth0"]}, {"mlx5_0:1": self.octets["mlx5_0:1"]})


class _FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def wait(self) -> None:
        self._device.flush()


class FakeDevice(Device):
    """One accelerator."""

    name = "cpu"

    def __init__(self, link: FakeLink) -> None:
        self._link, self._fault = link, link.fault
        self._pending: list[tuple[int, UInt8Array]] = []
        self._num_landed = 0

    def allocate(self, num_bytes: int) -> MemoryRegion:
        self.live = np.zeros(num_bytes, dtype=np.uint8)
        self._visible = np.zeros(num_bytes, dtype=np.uint8)
        return MemoryRegion(self.live.ctypes.data, num_bytes)

    def put(self, offsets: Sequence[int], rows: UInt8Array) -> Event:
        self._pending += [(offset, row.copy()) for offset, row in zip(offsets, rows, strict=True)]
        return DONE if self._fault.sends_unwaited else _FakeEvent(self)

    def flush(self) -> None:
        """The stream is done."""
        for offset, row in self._pending:
            for memory in (self.live, self._visible):
                memory[offset : offset + len(row)] = row
        self._pending.clear()

    def landed(self) -> None:
        self.flush()
        self._num_landed += 1
        if not self._fault.reads_unwaited or self._num_landed % 2 == 0:
            self._visible[:] = self.live
        self._link.deliver_late()

    def get(self, offsets: Sequence[int], num_bytes: int) -> UInt8Array:
        self.flush()
        return np.stack([self._visible[offset : offset + num_bytes] for offset in offsets])

    def raw_copy_s(self, num_bytes: int) -> float:
        return num_bytes / (2 * RATE)


class RankedDevice(Device):
    """A device for each rank, as one joined pool."""

    name = "cpu"

    def __init__(self, layout: KVLayout, link: FakeLink) -> None:
        self.devices = [FakeDevice(link) for _ in range(layout.num_ranks)]
        self._layout = layout
        self._bounds = [*layout.rank_offsets, layout.block_bytes]

    def allocate(self, num_bytes: int) -> MemoryRegion:
        num_blocks = num_bytes // self._layout.block_bytes
        self.regions = [
            device.allocate(num_blocks * (end - begin))
            for device, begin, end in zip(self.devices, self._bounds, self._bounds[1:])
        ]
        self._stand_in = np.zeros(num_bytes, dtype=np.uint8)
        return MemoryRegion(self._stand_in.ctypes.data, num_bytes)

    def put(self, offsets: Sequence[int], rows: UInt8Array) -> Event:
        events = [
            device.put(self._own(offsets, begin, end), rows[:, begin:end])
            for device, begin, end in zip(self.devices, self._bounds, self._bounds[1:])
        ]
        return _All(events)

    def landed(self) -> None:
        for device in self.devices:
            device.landed()

    def get(self, offsets: Sequence[int], num_bytes: int) -> UInt8Array:
        parts = [
            device.get(self._own(offsets, begin, end), end - begin)
            for device, begin, end in zip(self.devices, self._bounds, self._bounds[1:])
        ]
        return np.concatenate(parts, axis=1)

    def raw_copy_s(self, num_bytes: int) -> float:
        return self.devices[0].raw_copy_s(num_bytes)

    def _own(self, offsets: Sequence[int], begin: int, end: int) -> list[int]:
        return [offset // self._layout.block_bytes * (end - begin) for offset in offsets]


class _All:
    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.wait()


class FakeTransport(LoopbackTransport):
    """The loopback over a link, with faults. Bytes move when the poster polls."""

    def __init__(self, fabric: LoopbackFabric, worker_id: str, layout: KVLayout, link: FakeLink) -> None:
        super().__init__(fabric, worker_id)
        self._layout, self._link, self._fault = layout, link, link.fault
        self._elsewhere: dict[str, UInt8Array] = {}

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        if self._fault.never_ends and self.posts:
            self._link.clock.advance(1.0)
        return super().poll()

    def _take_due(self) -> list[Post]:
        if self._fault.never_ends:
            return []
        due, self.posts = self.posts, []
        return due

    def _perform(self, post: Post) -> str | None:
        fault, end = self._fault, self._fabric.ends.get(post.worker_id)
        if end is None:
            return f"worker {post.worker_id} is gone"
        self._link.carry(post.pieces.num_bytes)
        is_given_up = post.op is TransferOp.WRITE and post.notify is None
        if fault.ends_early and (is_given_up or not fault.only_unnotified):
            self._link.late.append((fault.late_looks, lambda: self._copy(post)))
        else:
            self._copy(post)
        if post.notify is not None and not fault.loses_notification:
            end.inbox.append(post.notify)
        return None

    def _copy(self, post: Post) -> None:
        fault, pieces = self._fault, post.pieces
        own, end = self._fabric.ends[self._worker_id], self._fabric.ends.get(post.worker_id)
        if end is None:
            return
        is_write = post.op is TransferOp.WRITE
        target = end.region if is_write else own.region
        memory = (
            self._elsewhere.setdefault(post.worker_id, np.zeros(target.num_bytes, dtype=np.uint8))
            if fault.is_unregistered
            else _memory(target)
        )
        rows = list(zip(pieces.local_offsets, pieces.remote_offsets, pieces.lengths, strict=True))
        for local, remote, length in rows[:-1] if fault.loses_last and len(rows) > 1 else rows:
            source = _memory(own.region)[local:][:length] if is_write else _memory(end.region)[remote:][:length]
            data = source.copy() if fault.mangle is None else fault.mangle(source.copy(), self._layout)
            at = int(remote if is_write else local) + fault.shift_blocks * self._layout.block_bytes
            memory[at : at + length] = data[: max(0, len(memory) - at)]
            if fault.spills and at + 2 * length <= len(memory):
                memory[at + length : at + 2 * length] = data


def _memory(region: MemoryRegion) -> UInt8Array:
    from ctypes import c_uint8

    return np.ctypeslib.as_array((c_uint8 * region.num_bytes).from_address(region.address))


class FakeRank(RankTransport):
    """A rank's transport in this process; its memory is its own device's."""

    def __init__(self, inner: FakeTransport, region: MemoryRegion, stride: int) -> None:
        self.inner, self._own, self._stride = inner, region, stride
        self.name, self.has_bar, self.has_windows, self.memory = inner.name, False, False, None

    def register(self, region: MemoryRegion) -> bytes:
        agent = self.inner.register(self._own)
        self.memory = RankMemory(agent, self._own.address, self._own.num_bytes, begin=0, stride=self._stride)
        return agent

    def add_peer(self, metadata: KvMetadata) -> None:
        self.inner.add_peer(metadata)

    def remove_peer(self, worker_id: str) -> None:
        self.inner.remove_peer(worker_id)

    def has_peer(self, worker_id: str) -> bool:
        return self.inner.has_peer(worker_id)

    def post(
        self, op: TransferOp, worker_id: str, pieces: Pieces, notify: bytes | None = None, key: RemoteKey | None = None
    ) -> int:
        return self.inner.post(op, worker_id, pieces, notify, key)

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        return self.inner.poll()

    def close(self) -> None:
        self.inner.close()


class _SwappedRanks(RankedTransport):
    """Takes its peers' ranks for each other."""

    def add_peer(self, metadata: KvMetadata) -> None:
        super().add_peer(metadata)
        peer = self._peers[metadata.worker_id]
        for here, there in sorted(peer.connected):
            self._ends[here].remove_peer(peer.ranks[there].worker_id)
        peer.connected.clear()
        peer.ranks = peer.ranks[::-1]


def fake_end(name: str, layout: KVLayout, num_blocks: int, fabric: LoopbackFabric, link: FakeLink) -> LocalEnd:
    """An end on fake devices, one per rank."""
    fault = link.fault
    if layout.num_ranks == 1:
        device: Device = FakeDevice(link)
        region = device.allocate(num_blocks * layout.block_bytes)
        transport = RankedTransport(name, [FakeTransport(fabric, name, layout, link)], layout)
    else:
        device = RankedDevice(layout, link)
        region = device.allocate(num_blocks * layout.block_bytes)
        ends = [
            FakeRank(FakeTransport(fabric, f"{name}/{number}", layout, link), own, own.num_bytes // num_blocks)
            for number, own in enumerate(device.regions)
        ]
        transport = (_SwappedRanks if fault.swaps_ranks else RankedTransport)(name, ends, layout)
    thread = TransferThread(transport, TransferConfig(transport="loopback", poll_interval_s=POLL_S), link.clock)
    return LocalEnd(name, device, region, layout, thread, transport.name, link.clock)


@contextmanager
def fake_ends(
    giver: KVLayout, taker: KVLayout, fault: Fault | None = None, num_blocks: int = 64
) -> Iterator[tuple[LocalEnd, LocalEnd, FakeLink]]:
    """Two connected ends and the link between them."""
    fabric, link = LoopbackFabric(), FakeLink(ManualClock(), fault or Fault())
    with ExitStack() as stack:
        ends = []
        for name, layout in (("giver", giver), ("taker", taker)):
            ends.append(fake_end(name, layout, num_blocks, fabric, link))
            stack.callback(ends[-1].close)
        ends[0].tell(Connect(ends[1].metadata))
        yield ends[0], ends[1], link
