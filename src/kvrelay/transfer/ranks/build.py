"""Composition of a worker's data plane: its own transport, or those of its rank processes, as one."""

from __future__ import annotations

from kvrelay.config import TransferConfig
from kvrelay.core.layout import KVLayout
from kvrelay.transfer.base import Transport
from kvrelay.transfer.factory import build_transport
from kvrelay.transfer.p2p.address import LOOPBACK, P2pAddress
from kvrelay.transfer.ranks.link import RankLinks, RankTransport
from kvrelay.transfer.ranks.transport import RankedTransport
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.values import rank_id


def build_ranked_transport(
    config: TransferConfig,
    worker_id: str,
    layout: KVLayout,
    links: RankLinks,
    memory: SharedPoolMemory | None,
    address: P2pAddress = LOOPBACK,
) -> RankedTransport:
    """``links``: the ranks that move their own KV; none: this process moves it all. The rest is
    as in ``build_transport``. Raises ConfigError."""
    ends: list[Transport] = [
        RankTransport(
            link,
            rank_id(worker_id, number, len(links.links)),
            config,
            memory.name if memory is not None and memory.num_bytes else "",
            address,
        )
        for number, link in enumerate(links.links)
    ]
    if not ends:
        ends = [build_transport(config, worker_id, memory=memory, address=address)]
    return RankedTransport(worker_id, ends, layout, links.fence)
