"""A worker process for the two-process tests: a pool behind a TransferThread, ordered about by JSON lines on stdin.

Orders: fill (seed), digest (blocks), connect (metadata), write (blocks, notify), digest_on_notify. Answers and
notifications are JSON lines on stdout. Ends when stdin does.
"""

from __future__ import annotations

import base64
import ctypes
import json
import queue
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from kvrelay.config import TransferConfig
from kvrelay.core.layout import MemoryRegion, paged_kv
from kvrelay.core.workers import KvMetadata
from kvrelay.transfer import TransferOp, TransferThread, block_pieces, build_transport

LAYOUT = paged_kv(num_layers=2, num_kv_heads=2, block_size=16, head_dim=32, dtype="bfloat16")
NUM_BLOCKS = 256


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def memory_functions() -> list[bytes]:
    """The first instructions of the C library's functions that UCX would hook."""
    library = ctypes.CDLL(None)
    functions = (library.mmap, library.munmap, library.mremap, library.shmat, library.shmdt, library.madvise)
    return [ctypes.string_at(ctypes.cast(function, ctypes.c_void_p).value or 0, 16) for function in functions]


def caught_signals() -> int:
    """A bit for each that has a handler, whether of Python or of a library; without the C library's own, from 32."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt")) & 0x7FFFFFFF


class Worker:
    def __init__(self, worker_id: str, config: TransferConfig) -> None:
        self.pool = np.zeros((NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
        self.thread = TransferThread(build_transport(config, worker_id), config)
        self.thread.on_notification(self.notified)
        self.thread.start()
        region = MemoryRegion(self.pool.ctypes.data, self.pool.nbytes)
        agent = self.thread.register(region, kv_compatibility="k").result(60)
        self.metadata = KvMetadata(
            worker_id, 0, "nixl", agent, region.address, region.num_bytes, LAYOUT.block_bytes, "cpu", 0, "k"
        )
        self.thread.open_handoff()

    def digest(self, blocks: list[int]) -> str:
        return xxhash.xxh3_64_hexdigest(self.pool[blocks].tobytes())

    def notified(self, payload: bytes) -> None:
        """The payload names the blocks that must have arrived before it."""
        blocks = json.loads(payload)
        say({"notified": blocks, "digest": self.digest(blocks)})

    def perform(self, order: dict[str, object]) -> None:
        match order:
            case {"do": "fill", "seed": int(seed)}:
                self.pool[:] = np.random.default_rng(seed).integers(0, 256, self.pool.shape, dtype=np.uint8)
                say({"filled": seed})
            case {"do": "digest", "blocks": list(blocks)}:
                say({"digest": self.digest(blocks)})
            case {"do": "connect", "metadata": str(blob)}:
                self.thread.add_peer(msgspec.msgpack.decode(base64.b64decode(blob), type=KvMetadata)).result(60)
                say({"connected": True})
            case {"do": "write", "to": str(peer), "local": list(local), "remote": list(remote)}:
                ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
                notify = json.dumps(remote).encode()
                pieces = block_pieces(LAYOUT, local, remote)
                self.thread.submit(TransferOp.WRITE, peer, pieces, notify, on_done=ended.put)
                say({"written": ended.get(timeout=30)})
            case _:
                say({"error": f"unknown order {order}"})


def main() -> None:
    before, signals = memory_functions(), caught_signals()
    worker = Worker(sys.argv[1], msgspec.json.decode(sys.argv[2], type=TransferConfig))
    blob = base64.b64encode(msgspec.msgpack.encode(worker.metadata)).decode()
    is_hooked = memory_functions() != before
    hello = {"torch": "torch" in sys.modules, "threads": threading.active_count(), "hooked": is_hooked}
    say({"metadata": blob, **hello, "keeps_signals": caught_signals() == signals})
    for line in sys.stdin:
        worker.perform(json.loads(line))
    worker.thread.close()


if __name__ == "__main__":
    main()
