"""A process with a shared pool, for tests of the shm transport. Talks JSON lines over stdin and stdout.

{"do": "peer", "metadata": KvMetadata}        connect
{"do": "write", "peer": ID, "pieces": N}      copy the first N pages to the peer; with "stop": this process stops
                                              itself behind the first page
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

import msgspec
import numpy as np

from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import TransferError
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.shm.transport import ShmTransport
from kvrelay.transfer.values import Pieces, TransferOp

PAGE = 4096
NUM_PAGES = 64
FILL = 7


class StoppingCopy:
    """Copies like the real thing, and stops this process behind the first piece when it is told to."""

    stops = False

    def __call__(self, write_at, write_offsets, read_at, read_offsets, lengths) -> None:
        for index, (to, of, length) in enumerate(zip(write_offsets, read_offsets, lengths, strict=True)):
            ctypes.memmove(write_at + int(to), read_at + int(of), int(length))
            if self.stops and index == 0:
                os.kill(os.getpid(), signal.SIGSTOP)


class Worker:
    """A shared pool and its transport."""

    def __init__(self, worker_id: str, copy: StoppingCopy | None = None) -> None:
        self.memory = SharedPoolMemory()
        self.pool = np.frombuffer(self.memory.allocate(PAGE * NUM_PAGES), dtype=np.uint8).reshape(NUM_PAGES, PAGE)
        self.transport = ShmTransport(self.memory, worker_id, copy)
        region = MemoryRegion(self.pool.ctypes.data, self.pool.nbytes)
        agent = self.transport.register(region)
        self.metadata = KvMetadata(worker_id, 0, "shm", agent, region.address, region.num_bytes, PAGE, "cpu", 0, "same")

    def move(self, op: TransferOp, peer: str, pages: list[int], notify: bytes | None = None) -> str | None:
        """Pages to or from the same places of the peer; the error, if any. Polls until it has ended."""
        offsets = np.array(pages, dtype=np.int64) * PAGE
        handle = self.transport.post(op, peer, Pieces(offsets, offsets, np.full_like(offsets, PAGE)), notify)
        while True:
            for completion in self.transport.poll()[0]:
                if completion.handle == handle:
                    return completion.error

    def close(self) -> None:
        self.transport.close()
        self.memory.close()


def main() -> None:
    copy = StoppingCopy()
    worker = Worker(sys.argv[1], copy)
    worker.pool[:] = FILL
    print(msgspec.json.encode(worker.metadata).decode(), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = None
        if order["do"] == "peer":
            worker.transport.add_peer(msgspec.convert(order["metadata"], KvMetadata))
        else:
            copy.stops = order.get("stop", False)
            try:
                answer = worker.move(TransferOp.WRITE, order["peer"], list(range(order["pieces"])))
            except TransferError as exc:
                answer = exc.message
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
