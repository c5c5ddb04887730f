"""Ends in processes of their own, as workers are: ``python -m kvrelay.certify.peer``. Each line in is an order, each
line out its answer."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np

from kvrelay.bench.peer import Peer, say
from kvrelay.certify.device import Device, HostDevice
from kvrelay.certify.ends import Connect, End, LocalEnd, Order, Told
from kvrelay.config import TransferConfig
from kvrelay.core.layout import KVLayout, MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import KvrelayError, TransferError
from kvrelay.transfer.factory import pool_allocator, shared_memory
from kvrelay.transfer.p2p.address import UNGUARDED
from kvrelay.transfer.ranks.build import build_ranked_transport
from kvrelay.transfer.ranks.channel import Channel
from kvrelay.transfer.ranks.link import RankLink, RankLinks
from kvrelay.transfer.ranks.messages import FromRank, ToRank
from kvrelay.transfer.ranks.mover import RankMover
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.thread import TransferThread


class EndSpec(msgspec.Struct, frozen=True):
    """What an end is made of. ``is_per_rank``: each rank of the layout moves its own part, by a thread that stands for
    its process. ``gpu``: its index; None: memory of the host."""

    name: str
    transfer: TransferConfig
    layout: KVLayout
    num_blocks: int
    is_per_rank: bool = False
    gpu: int | None = None


_ORDERS = msgspec.json.Decoder(Order)
_TOLD = msgspec.json.Decoder(Told)


@contextmanager
def local_end(spec: EndSpec) -> Iterator[LocalEnd]:
    """The end in this process. Raises FatalError, ConfigError."""
    with ExitStack() as stack:
        memory = shared_memory(spec.transfer)
        if memory is not None:
            stack.callback(memory.close)
        device = _device(spec, memory)
        region = device.allocate(spec.num_blocks * spec.layout.block_bytes)
        links = _ranks(stack, spec, region, memory) if spec.is_per_rank else RankLinks()
        transport = build_ranked_transport(spec.transfer, spec.name, spec.layout, links, memory, address=UNGUARDED)
        thread = TransferThread(transport, spec.transfer)
        stack.callback(thread.close)
        end = LocalEnd(spec.name, device, region, spec.layout, thread, spec.transfer.transport)
        stack.callback(end.close)
        yield end


def _device(spec: EndSpec, memory: SharedPoolMemory | None) -> Device:
    if spec.gpu is None:
        return HostDevice(pool_allocator(spec.transfer, memory))
    from kvrelay.certify.cuda import CudaDevice

    return CudaDevice(spec.gpu)


def _ranks(stack: ExitStack, spec: EndSpec, region: MemoryRegion, memory: SharedPoolMemory | None) -> RankLinks:
    """A mover for each rank, all over the joined pool."""
    links, fence = RankLinks(), np.zeros(1)
    ranks = []
    for number, offset in enumerate(spec.layout.rank_offsets):
        ours, theirs = socket.socketpair()
        RankMover(
            Channel(theirs, ToRank),
            fence,
            region,
            begin=offset,
            stride=spec.layout.block_bytes,
            port_offset=1 + 2 * number,
            pool_fd=-1 if memory is None else memory.fd,
        ).start()
        channel: Channel[FromRank] = Channel(ours, FromRank)
        stack.callback(channel.close)
        ranks.append(RankLink(f"rank {number}", channel, lambda: None))
    links.offer(ranks, fence)
    return links


class PeerEnd(End):
    """An end in another process. ``close`` ends it."""

    def __init__(self, spec: EndSpec, ucx_log: Path | None = None) -> None:
        """``ucx_log``: where UCX writes what it used, when the process ends. Raises TransferError if the process does
        not come up."""
        self.layout, self.num_blocks = spec.layout, spec.num_blocks
        ucx = {} if ucx_log is None else {"UCX_PROTO_INFO": "used", "UCX_LOG_FILE": str(ucx_log)}
        made_of = msgspec.json.encode(spec).decode()
        self._peer = Peer("kvrelay.certify.peer", made_of, name=spec.name, environment=ucx)
        self.metadata = msgspec.json.decode(self._peer.hello, type=KvMetadata)

    @property
    def pid(self) -> int:
        return self._peer.pid

    def tell(self, order: Order) -> Told:
        return _TOLD.decode(self._peer.ask(msgspec.json.encode(order)))

    def close(self) -> None:
        """Idempotent."""
        self._peer.close()


@contextmanager
def peer_ends(specs: Sequence[EndSpec], ucx_log: Path | None = None) -> Iterator[tuple[PeerEnd, PeerEnd]]:
    """Two ends in processes; the first is connected to the second. ``ucx_log`` is the first one's. Raises
    TransferError."""
    with ExitStack() as stack:
        giver = PeerEnd(specs[0], ucx_log)
        stack.callback(giver.close)
        taker = PeerEnd(specs[1])
        stack.callback(taker.close)
        if (error := giver.tell(Connect(taker.metadata)).error) is not None:
            raise TransferError(error, peer=specs[1].name)
        yield giver, taker


def _main(spec: EndSpec) -> None:
    """An order a line, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with local_end(spec) as end:
        say(msgspec.json.encode(end.metadata))
        for line in sys.stdin.buffer:
            try:
                told = end.tell(_ORDERS.decode(line))
            except KvrelayError as exc:
                told = Told(error=exc.message)
            say(msgspec.json.encode(told))


if __name__ == "__main__":
    try:
        _main(msgspec.json.decode(sys.argv[1], type=EndSpec))
    except KvrelayError as error:
        sys.exit(error.message)
