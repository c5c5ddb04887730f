"""Workers' ends of the peer-to-peer transport for tests: in this process, polled by hand, or in one of their own.

As a program (``python ends.py WORKER_ID CONFIG``) it says its metadata on stdout and serves until stdin ends.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from kvrelay.config import TransferConfig
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.transfer.p2p.address import P2pAddress
from kvrelay.transfer.p2p.transport import P2pTransport
from kvrelay.transfer.values import Pieces, TransferOp

PAGE = 65536
"""More than travels with a control message."""
NUM_PAGES = 32
WAIT_S = 120.0


def page_pieces(local: list[int], remote: list[int], size: int = PAGE) -> Pieces:
    """``size`` bytes from the start of each page."""
    offsets = [np.array(pages, np.int64) * PAGE for pages in (local, remote)]
    return Pieces(*offsets, np.full(len(local), size, np.int64))


class End:
    """A transport with a pool; what it has completed, and what it was told."""

    def __init__(
        self,
        worker_id: str,
        config: TransferConfig,
        address: P2pAddress = P2pAddress(is_guarded=False),  # noqa: B008
    ) -> None:
        self.worker_id = worker_id
        self.pool = np.random.default_rng(sum(worker_id.encode())).integers(0, 256, (NUM_PAGES, PAGE), dtype=np.uint8)
        self.transport = P2pTransport(config, worker_id, address)
        region = MemoryRegion(self.pool.ctypes.data, self.pool.nbytes)
        agent = self.transport.register(region)
        public_key = address.keys.public.decode() if address.keys is not None else ""
        self.metadata = KvMetadata(
            worker_id, 0, "p2p", agent, region.address, region.num_bytes, PAGE, "cpu", 0, "k", public_key
        )
        self.completed: dict[int, str | None] = {}
        self.payloads: list[bytes] = []

    def poll(self) -> None:
        completions, notifications = self.transport.poll()
        self.completed |= {completion.handle: completion.error for completion in completions}
        self.payloads += notifications

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "did not happen in time"
            self.poll()
            time.sleep(0.0005)

    def write(self, peer: End | KvMetadata, local: list[int], remote: list[int]) -> int:
        """A handle; connects if need be."""
        metadata = peer.metadata if isinstance(peer, End) else peer
        if not self.transport.has_peer(metadata.worker_id):
            self.transport.add_peer(metadata)
        return self.transport.post(TransferOp.WRITE, metadata.worker_id, page_pieces(local, remote))

    def outcome(self, handle: int) -> str | None:
        """Wait for its end: the error, if any."""
        self.until(lambda: handle in self.completed)
        return self.completed[handle]

    @property
    def node(self):
        """The transport's inside."""
        assert self.transport.node is not None
        return self.transport.node

    def close(self) -> None:
        self.transport.close()


def main() -> None:
    end = End(sys.argv[1], msgspec.json.decode(sys.argv[2], type=TransferConfig))
    print(base64.b64encode(msgspec.msgpack.encode(end.metadata)).decode(), flush=True)
    sys.stdin.read()
    end.close()


if __name__ == "__main__":
    main()
