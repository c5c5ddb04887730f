"""What each peer of the peer-to-peer transport costs a worker: resident memory, threads, descriptors.

The peers are transports in one other process (``python -m benchmarks.p2p_peers NUMBER``); each is written to
once, over a communicator, and stays connected.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import click
import msgspec
import numpy as np

from kvrelay.bench.peer import Peer, say
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.table import Row, results_table
from kvrelay.bench.transfer import pool_metadata
from kvrelay.cli.options import json_option
from kvrelay.config import TransferConfig
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import TransferError
from kvrelay.transfer.p2p.address import UNGUARDED
from kvrelay.transfer.p2p.transport import P2pTransport
from kvrelay.transfer.values import Pieces, TransferOp

POOL_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
_WAIT_S = 60.0


COLUMNS = {
    "peers": "num_peers",
    "MiB resident": "resident_mib:.0f",
    "threads": "num_threads",
    "descriptors": "num_descriptors",
    "ms a first write": "contact_s:ms",
}


@click.command()
@json_option
def p2p_peers(as_json: bool) -> None:
    """Memory, threads and descriptors with 0 to 64 peers connected, and the time of a first write.

    Example: python -m benchmarks p2p-peers
    """
    rows = run_peers_benchmark()
    print_result(rows, results_table(rows, COLUMNS), as_json)


def run_peers_benchmark(counts: Sequence[int] = (0, 1, 16, 64)) -> list[Row]:
    """Raises TransferError. ``counts`` ascend."""
    config = TransferConfig(transport="p2p", p2p_max_connections=max(*counts, 1))
    end = _End("hub", config)
    try:
        with Peer("benchmarks.p2p_peers", str(max(counts))) as peer:
            peers = msgspec.json.decode(peer.hello, type=list[KvMetadata])
            return [_measure(end, peers, count) for count in counts]
    finally:
        end.transport.close()


class _End:
    def __init__(self, worker_id: str, config: TransferConfig) -> None:
        self.pool = np.ones(POOL_BYTES, np.uint8)
        self.transport = P2pTransport(config, worker_id, address=UNGUARDED)
        region = MemoryRegion(self.pool.ctypes.data, POOL_BYTES)
        self.metadata = pool_metadata(worker_id, "p2p", self.transport.register(region), region)

    def write(self, peer: KvMetadata) -> float:
        """Seconds of a first write."""
        offsets = np.zeros(1, np.int64)
        begin = time.perf_counter()
        self.transport.add_peer(peer)
        plan = Pieces(offsets, offsets, np.full(1, _PIECE_BYTES, np.int64))
        self.transport.post(TransferOp.WRITE, peer.worker_id, plan)
        while time.perf_counter() < begin + _WAIT_S:
            for completion in self.transport.poll()[0]:
                if completion.error is not None:
                    raise TransferError(completion.error, peer=peer.worker_id)
                return time.perf_counter() - begin
            time.sleep(0.0002)
        raise TransferError("a first write takes too long", peer=peer.worker_id)


def _measure(end: _End, peers: list[KvMetadata], count: int) -> Row:
    """The whole process with so many peers connected. ``contact_s``: median of a first write, with connecting."""
    times = [end.write(peer) for peer in peers[:count] if not end.transport.has_peer(peer.worker_id)]
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "num_peers": count,
        "resident_mib": resident / 2**20,
        "num_threads": len(os.listdir("/proc/self/task")),
        "num_descriptors": len(os.listdir("/proc/self/fd")),
        "contact_s": sorted(times)[len(times) // 2] if times else 0.0,
    }


def _peers_main(count: int) -> None:
    ends = [_End(f"peer{number}", TransferConfig(transport="p2p", kv_buffer_size=1 << 20)) for number in range(count)]
    say(msgspec.json.encode([end.metadata for end in ends]))
    sys.stdin.buffer.read()
    for end in ends:
        end.transport.close()


if __name__ == "__main__":
    _peers_main(int(sys.argv[1]))
