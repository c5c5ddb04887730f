"""The speed of KV between two processes on this machine, through the same thread and transport that workers use.

It owns a peer process with an empty pool (``python -m kvrelay.bench.transfer``), timed rounds, and the comparison
with a plain memory copy.
"""

from __future__ import annotations

import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.bench.peer import START_TIMEOUT_S, Peer, say
from kvrelay.bench.report.table import Row, results_table
from kvrelay.config import TransferConfig
from kvrelay.core.layout import KVLayout, MemoryRegion, paged_kv
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import TransferError
from kvrelay.transfer.base import Transport
from kvrelay.transfer.factory import build_transport, pool_allocator, shared_memory
from kvrelay.transfer.p2p.address import UNGUARDED
from kvrelay.transfer.pieces import NO_PIECES, block_pieces
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import Pieces, TransferOp

DEFAULT_PIECE_BYTES = (4096, 16384, 65536, 262144, 1048576, 8388608)
COMPATIBILITY = "benchmark"

UInt8Array = npt.NDArray[np.uint8]
_COLUMNS = {
    "op": "op",
    "placement": "placement",
    "piece": "piece",
    "pieces": "num_pieces:.0f",
    "GB/s": "gb:.2f",
    "us/piece": "us_per_piece:.2f",
    "of memcpy": "of_memcpy:.0%",
}


def transfer_text(result: Row) -> str:
    """The figures as a table."""
    title = f"{result['transport']} ({result['ucx_tls']}); memcpy {result['memcpy_bytes_per_s'] / 1e9:.1f} GB/s"
    shown = (
        {**row, "piece": f"{row['piece_bytes'] / 1024:g} KiB", "gb": row["bytes_per_s"] / 1e9} for row in result["rows"]
    )
    notify = f"an empty notification takes {result['notify_s'] * 1e6:.0f} us"
    return f"{title}\n\n{results_table(list(shown), _COLUMNS)}\n\n{notify}"


def run_transfer_benchmark(
    config: TransferConfig | None = None,
    *,
    piece_bytes: Sequence[int] = DEFAULT_PIECE_BYTES,
    total_bytes: int = 64 * 1024 * 1024,
    num_rounds: int = 7,
) -> Row:
    """Reads and writes of ``total_bytes`` in pieces of each size, ``num_rounds`` times. Raises TransferError.

    ``memcpy_bytes_per_s``: a plain copy within one process. ``notify_s``: a notification alone, from submission to
    completion here. ``plan_1000_blocks_s``: planning 1,000 scattered blocks.

    Takes 6 * ``total_bytes`` of memory, a third of it in the peer process.
    """
    config = config or TransferConfig()
    if max(piece_bytes) > total_bytes or min(piece_bytes) <= 0 or num_rounds < 1:
        raise TransferError("a benchmark needs at least one round, and pieces that fit into the total")
    plain = _touched(2 * total_bytes)
    with moving(config, "benchmark-parent", 2 * total_bytes) as (_, thread):
        move(thread, TransferOp.WRITE, spaced_pieces(total_bytes, max(piece_bytes)), b"warm-up")
        rows = [
            _measure(thread, op, placement, size, total_bytes, num_rounds, plain)
            for op in (TransferOp.WRITE, TransferOp.READ)
            for placement in ("ordered", "scattered")
            for size in piece_bytes
        ]
        notify = statistics.median(move(thread, TransferOp.WRITE, NO_PIECES, b"x") for _ in range(20))
    return {
        "transport": config.transport,
        "ucx_tls": config.ucx_tls,
        "num_rounds": num_rounds,
        "memcpy_bytes_per_s": total_bytes / _median_s(num_rounds, _memcpy, plain),
        "notify_s": notify,
        "plan_1000_blocks_s": _time_pieces(),
        "rows": rows,
    }


@contextmanager
def moving(config: TransferConfig, name: str, num_bytes: int) -> Iterator[tuple[Transport, TransferThread]]:
    """A pool here and one of the same size in a peer process, connected."""
    arguments = "kvrelay.bench.transfer", str(num_bytes), msgspec.json.encode(config).decode()
    with pool_thread(config, name, num_bytes) as (transport, thread, region), Peer(*arguments) as peer:
        thread.register(region, kv_compatibility=COMPATIBILITY).result(START_TIMEOUT_S)
        thread.add_peer(msgspec.json.decode(peer.hello, type=KvMetadata)).result(START_TIMEOUT_S)
        thread.open_handoff()
        yield transport, thread


@contextmanager
def pool_thread(
    config: TransferConfig, name: str, num_bytes: int
) -> Iterator[tuple[Transport, TransferThread, MemoryRegion]]:
    """A touched pool of the transport's memory, and the thread that moves it; not registered yet."""
    memory = shared_memory(config)
    pool = _touched(num_bytes, pool_allocator(config, memory))
    transport = build_transport(config, name, memory=memory, address=UNGUARDED)
    thread = TransferThread(transport, config)
    thread.on_notification(lambda _: None)
    thread.start()
    try:
        yield transport, thread, MemoryRegion(pool.ctypes.data, pool.nbytes)
    finally:
        thread.close()
        if memory is not None:
            memory.close()


def _measure(
    thread: TransferThread,
    op: TransferOp,
    placement: str,
    piece_bytes: int,
    total_bytes: int,
    num_rounds: int,
    plain: UInt8Array,
) -> Row:
    """Medians over the rounds. ``placement``: "ordered" pieces lie in order with gaps between them, "scattered" ones
    anywhere in the peer's pool; each piece is a descriptor. ``of_memcpy``: the speed over that of a plain copy of as
    many bytes, taken in turns with the rounds."""
    pieces = spaced_pieces(total_bytes, piece_bytes)
    if placement == "scattered":
        anywhere = np.random.default_rng(0).permutation(pieces.remote_offsets)
        pieces = msgspec.structs.replace(pieces, remote_offsets=anywhere)
    moved, copied = [], []
    for _ in range(num_rounds):
        moved.append(move(thread, op, pieces, None))
        copied.append(_median_s(1, _memcpy, plain))
    seconds = statistics.median(moved)
    return {
        "op": op.value,
        "placement": placement,
        "piece_bytes": piece_bytes,
        "num_pieces": pieces.num_pieces,
        "total_bytes": pieces.num_bytes,
        "seconds": seconds,
        "bytes_per_s": pieces.num_bytes / seconds,
        "us_per_piece": seconds / pieces.num_pieces * 1e6,
        "of_memcpy": statistics.median(copied) / seconds * pieces.num_bytes / (len(plain) // 2),
    }


def move(thread: TransferThread, op: TransferOp, pieces: Pieces, notify: bytes | None) -> float:
    """Seconds from submission to completion."""
    ended = threading.Event()
    errors: list[str | None] = []

    def done(error: str | None) -> None:
        errors.append(error)
        ended.set()

    begin = time.perf_counter()
    thread.submit(op, "benchmark-peer", pieces, notify, on_done=done)
    ended.wait()
    seconds = time.perf_counter() - begin
    if errors[0] is not None:
        raise TransferError(f"the benchmark's transfer failed: {errors[0]}", peer="benchmark-peer")
    return seconds


def spaced_pieces(total_bytes: int, piece_bytes: int) -> Pieces:
    """``total_bytes`` in pieces with gaps of one piece between them."""
    offsets = np.arange(total_bytes // piece_bytes, dtype=np.int64) * (2 * piece_bytes)
    return Pieces(offsets, offsets, np.full(len(offsets), piece_bytes, dtype=np.int64))


def _memcpy(plain: UInt8Array) -> None:
    """Its first half onto its second."""
    half = len(plain) // 2
    np.copyto(plain[half:], plain[:half])


def _touched(num_bytes: int, allocate: Callable[[int], mmap.mmap] | None = None) -> UInt8Array:
    """Memory that is touched already, so that no round pays for page faults."""
    memory = np.empty(num_bytes, np.uint8) if allocate is None else np.frombuffer(allocate(num_bytes), np.uint8)
    memory.fill(1)
    return memory


def _median_s(rounds: int, call: Callable[..., object], *arguments: object) -> float:
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call(*arguments)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _time_pieces() -> float:
    layout = paged_kv(num_layers=1, num_kv_heads=1, block_size=16, head_dim=64, dtype="bfloat16")
    rng = np.random.default_rng(0)
    return _median_s(20, block_pieces, layout, *(rng.permutation(4000)[:1000].tolist() for _ in range(2)))


def pool_metadata(
    worker_id: str, transport: str, agent: bytes, region: MemoryRegion, layout: KVLayout | None = None
) -> KvMetadata:
    """What a peer has to know of a pool; without a layout its blocks are single bytes."""
    return KvMetadata(
        worker_id=worker_id,
        rank=0,
        transport=transport,
        agent=agent,
        address=region.address,
        num_bytes=region.num_bytes,
        block_bytes=1 if layout is None else layout.block_bytes,
        device=region.device,
        device_id=region.device_id,
        kv_compatibility=COMPATIBILITY,
        layout=layout,
    )


def _peer_main(num_bytes: int, config: TransferConfig) -> None:
    """A pool that can be read and written, until stdin ends."""
    with pool_thread(config, "benchmark-peer", num_bytes) as (_, thread, region):
        agent = thread.register(region).result(START_TIMEOUT_S)
        thread.open_handoff()
        say(msgspec.json.encode(pool_metadata("benchmark-peer", config.transport, agent, region)))
        sys.stdin.buffer.read()


if __name__ == "__main__":
    _peer_main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=TransferConfig))
