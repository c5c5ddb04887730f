"""Ranks without processes: the movers run on threads of the test."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from kvrelay.config import TransferConfig
from kvrelay.core.layout import KVLayout, MemoryRegion
from kvrelay.transfer.p2p.address import P2pAddress
from kvrelay.transfer.ranks.build import build_ranked_transport
from kvrelay.transfer.ranks.channel import Channel
from kvrelay.transfer.ranks.link import RankLink, RankLinks
from kvrelay.transfer.ranks.messages import FromRank, ToRank
from kvrelay.transfer.ranks.mover import RankMover
from kvrelay.transfer.ranks.transport import RankedTransport
from kvrelay.transfer.shm.memory import SharedPoolMemory


def start_rank(
    make: Callable[[Channel[ToRank]], RankMover], name: str, kill: Callable[[], None] = lambda: None
) -> RankLink:
    """A mover on a thread of its own; the worker's end of it."""
    ours, theirs = socket.socketpair()
    make(Channel(theirs, ToRank)).start()
    return RankLink(name, Channel(ours, FromRank), kill)


def ranks_of(
    stack: ExitStack,
    config: TransferConfig,
    worker_id: str,
    layout: KVLayout,
    region: MemoryRegion,
    memory: SharedPoolMemory | None = None,
    links: RankLinks | None = None,
    *,
    is_guarded: bool = False,
    host: str = "127.0.0.1",
) -> RankedTransport:
    """The data plane of a worker whose ranks share the joined pool ``region``, perhaps in ``memory``. Its end in
    ``stack`` ends the movers. They are offered to ``links``."""
    links, fence = links or RankLinks(), np.zeros(1)

    def mover(rank: int, offset: int) -> Callable[[Channel[ToRank]], RankMover]:
        return lambda channel: RankMover(
            channel,
            fence,
            region,
            begin=offset,
            stride=layout.block_bytes,
            port_offset=1 + 2 * rank,
            pool_fd=-1 if memory is None else memory.fd,
        )

    if layout.num_ranks > 1:
        ranks = [start_rank(mover(rank, offset), f"rank {rank}") for rank, offset in enumerate(layout.rank_offsets)]
        links.offer(ranks, fence)
        for rank in ranks:
            stack.callback(rank.channel.close)
    return build_ranked_transport(config, worker_id, layout, links, memory, P2pAddress(host, is_guarded=is_guarded))
