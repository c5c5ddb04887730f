"""What every Transport does, whatever moves the bytes. Both ends live in this process and are polled by hand."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from tests.transfer.ranks.movers import ranks_of

from kvrelay.config import TransferConfig
from kvrelay.core.layout import KVLayout, MemoryRegion, paged_kv
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import IncompatiblePeerError, TransferError
from kvrelay.transfer.base import Transport
from kvrelay.transfer.factory import build_transport, shared_memory
from kvrelay.transfer.loopback import LoopbackFabric
from kvrelay.transfer.p2p.address import UNGUARDED
from kvrelay.transfer.p2p.transport import P2pTransport
from kvrelay.transfer.pieces import MAX_NOTIFY_BYTES, NO_PIECES, block_pieces
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.values import Pieces, TransferOp

LAYOUT = paged_kv(num_layers=2, num_kv_heads=2, block_size=4, head_dim=16, dtype="float32")
NUM_BLOCKS = 64
WAIT_S = 60.0


@dataclass
class End:
    """A transport with its pool, what it completed and what it was told."""

    worker_id: str
    transport: Transport
    pool: np.ndarray
    metadata: KvMetadata
    completed: dict[int, str | None] = field(default_factory=dict)
    payloads: list[bytes] = field(default_factory=list)

    def poll(self) -> None:
        completions, notifications = self.transport.poll()
        for completion in completions:
            assert completion.handle not in self.completed, "a handle completed twice"
            self.completed[completion.handle] = completion.error
        self.payloads += notifications


class Pair:
    """Two workers. ``prefill`` has added ``decode``; not the other way round, as in production."""

    def __init__(self, prefill: End, decode: End) -> None:
        self.prefill, self.decode = prefill, decode
        prefill.transport.add_peer(decode.metadata)

    def poll_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "did not happen in time"
            self.prefill.poll()
            self.decode.poll()

    def move(self, op: TransferOp, pieces: Pieces, notify: bytes | None = None) -> str | None:
        handle = self.prefill.transport.post(op, self.decode.worker_id, pieces, notify)
        self.poll_until(lambda: handle in self.prefill.completed)
        return self.prefill.completed[handle]


def allocated(memory: SharedPoolMemory) -> np.ndarray:
    num_bytes = NUM_BLOCKS * LAYOUT.block_bytes
    return np.frombuffer(memory.allocate(num_bytes), dtype=np.uint8).reshape(NUM_BLOCKS, -1)


def make_end(
    transport: Transport, worker_id: str, seed: int, shared: np.ndarray | None, layout: KVLayout | None = None
) -> End:
    pool = np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    if shared is not None:
        shared[:] = pool
        pool = shared
    region = MemoryRegion(pool.ctypes.data, pool.nbytes)
    agent = transport.register(region)
    metadata = KvMetadata(
        worker_id=worker_id,
        rank=0,
        transport=transport.name,
        agent=agent,
        address=region.address,
        num_bytes=region.num_bytes,
        block_bytes=LAYOUT.block_bytes,
        device="cpu",
        device_id=0,
        kv_compatibility="same",
        layout=layout,
    )
    return End(worker_id, transport, pool, metadata)


RANKED = ["nixl 2 2", "nixl 1 2", "shm 2 1", "shm 2 2", "p2p 2 2", "p2p 1 2"]
"""Transport, and ranks of P and of D that each move their own part."""


@pytest.fixture(params=["loopback", "nixl", "shm", "auto", "p2p-PUT", "p2p-PUT_ASYNC", "p2p-GET", *RANKED])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param.startswith("nixl") and importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("NIXL is not installed")
    if request.param in RANKED:
        yield from ranked_pair(request.param.split(), re.sub(r"\W", "-", request.node.name)[:100])
        return
    transport, _, send_type = request.param.partition("-")
    config = TransferConfig(transport=transport, **({"send_type": send_type} if send_type else {}))
    fabric = LoopbackFabric()
    name = request.node.name
    memories = [shared_memory(config), shared_memory(config)]
    ends = [
        make_end(
            build_transport(config, f"{name}-{role}", fabric, memory, address=UNGUARDED),
            f"{name}-{role}",
            seed,
            None if memory is None else allocated(memory),
        )
        for seed, (role, memory) in enumerate(zip(("p", "d"), memories, strict=True))
    ]
    yield Pair(*ends)
    for end in ends:
        if isinstance(end.transport, P2pTransport):
            end.transport.check_integrity()
        end.transport.close()
    for memory in filter(None, memories):
        memory.close()


def ranked_pair(words: list[str], name: str) -> Iterator[Pair]:
    config = TransferConfig(transport=words[0])  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        ends = []
        for seed, (role, tp) in enumerate(zip(("p", "d"), words[1:], strict=True)):
            memory = SharedPoolMemory()
            stack.callback(memory.close)
            pool = allocated(memory)
            worker_id, layout = f"{name}-{role}", msgspec.structs.replace(LAYOUT, tp_size=int(tp))
            transport = ranks_of(stack, config, worker_id, layout, MemoryRegion(pool.ctypes.data, pool.nbytes), memory)
            stack.callback(transport.close)
            ends.append(make_end(transport, worker_id, seed, pool, layout))
        yield Pair(*ends)
        for end in ends:
            end.transport.check_integrity()


def test_writes_land_where_the_plan_says_and_nowhere_else(pair: Pair) -> None:
    local, remote = [3, 4, 5, 9], [10, 11, 12, 2]
    expected = pair.decode.pool.copy()
    expected[remote] = pair.prefill.pool[local]
    source = pair.prefill.pool.copy()
    assert pair.move(TransferOp.WRITE, block_pieces(LAYOUT, local, remote)) is None
    np.testing.assert_array_equal(pair.decode.pool, expected)
    np.testing.assert_array_equal(pair.prefill.pool, source)


def test_reads_fetch_the_peers_blocks(pair: Pair) -> None:
    local, remote = [0, 1, 63], [63, 20, 21]
    expected = pair.prefill.pool.copy()
    expected[local] = pair.decode.pool[remote]
    assert pair.move(TransferOp.READ, block_pieces(LAYOUT, local, remote)) is None
    np.testing.assert_array_equal(pair.prefill.pool, expected)


def test_random_block_sets_arrive(pair: Pair) -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        count = int(rng.integers(1, NUM_BLOCKS))
        local, remote = rng.permutation(NUM_BLOCKS)[:count], rng.permutation(NUM_BLOCKS)[:count]
        pair.prefill.pool[:] = rng.integers(0, 256, pair.prefill.pool.shape, dtype=np.uint8)
        expected = pair.decode.pool.copy()
        expected[remote] = pair.prefill.pool[local]
        assert pair.move(TransferOp.WRITE, block_pieces(LAYOUT, local.tolist(), remote.tolist())) is None
        np.testing.assert_array_equal(pair.decode.pool, expected)


def test_a_notification_arrives_after_the_bytes_of_its_write(pair: Pair) -> None:
    for step in range(5):
        pair.prefill.pool[:] = step + 1
        payload = bytes([step, 0, 255])
        pair.prefill.transport.post(
            TransferOp.WRITE, pair.decode.worker_id, block_pieces(LAYOUT, range(64), range(64)), payload
        )
        pair.poll_until(lambda count=step + 1: len(pair.decode.payloads) == count)
        assert pair.decode.payloads[-1] == payload
        assert (pair.decode.pool == step + 1).all()


def test_one_that_names_descriptors_need_not_be_polled_before_one_is_readable(pair: Pair) -> None:
    watched = select.poll()
    for fd in pair.decode.transport.wake_fds:
        watched.register(fd, select.POLLIN)
    if not pair.decode.transport.wake_fds:
        pytest.skip("it must be asked")
    pieces = block_pieces(LAYOUT, list(range(32)), list(range(16, 48)))
    end = time.monotonic() + WAIT_S
    for number in range(3):
        # A write behind a notification waits for the peer, too.
        handles = [
            pair.prefill.transport.post(TransferOp.WRITE, pair.decode.worker_id, pieces, notify)
            for notify in (None, b"n%d" % number)
        ]
        while not (set(handles) <= pair.prefill.completed.keys() and len(pair.decode.payloads) == number + 1):
            assert time.monotonic() < end, "did not happen in time"
            pair.prefill.poll()
            if watched.poll(1):
                pair.decode.poll()
    assert pair.decode.payloads == [b"n0", b"n1", b"n2"]
    while watched.poll(0):  # else its thread would spin
        assert time.monotonic() < end, "always readable"
        pair.decode.poll()


def test_a_long_notification_arrives_whole(pair: Pair) -> None:
    """Checksums of a long prompt's blocks travel in one."""
    payload = np.random.default_rng(3).bytes(MAX_NOTIFY_BYTES)
    for pieces in (block_pieces(LAYOUT, [1, 2, 3], [7, 8, 4]), NO_PIECES):
        assert pair.move(TransferOp.WRITE, pieces, payload) is None
        pair.poll_until(lambda: bool(pair.decode.payloads))
        assert pair.decode.payloads.pop() == payload


def test_a_notification_that_is_too_long_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferError, match="too long"):
        pair.prefill.transport.post(TransferOp.WRITE, pair.decode.worker_id, NO_PIECES, bytes(MAX_NOTIFY_BYTES + 1))
    assert pair.move(TransferOp.WRITE, NO_PIECES, b"next") is None
    pair.poll_until(lambda: bool(pair.decode.payloads))
    assert pair.decode.payloads == [b"next"]


def test_an_empty_plan_delivers_its_notification_alone(pair: Pair) -> None:
    before = pair.decode.pool.copy()
    assert pair.move(TransferOp.WRITE, NO_PIECES, b"alone") is None
    pair.poll_until(lambda: bool(pair.decode.payloads))
    assert pair.decode.payloads == [b"alone"]
    np.testing.assert_array_equal(pair.decode.pool, before)


def test_many_posts_complete_once_each(pair: Pair) -> None:
    handles = [
        pair.prefill.transport.post(
            TransferOp.WRITE, pair.decode.worker_id, block_pieces(LAYOUT, [index], [63 - index]), b"%d" % index
        )
        for index in range(NUM_BLOCKS)
    ]
    pair.poll_until(lambda: len(pair.decode.payloads) == NUM_BLOCKS and len(pair.prefill.completed) == NUM_BLOCKS)
    assert pair.prefill.completed == dict.fromkeys(handles)
    assert sorted(map(int, pair.decode.payloads)) == list(range(NUM_BLOCKS))
    assert pair.prefill.transport.num_pending == 0
    np.testing.assert_array_equal(pair.decode.pool, pair.prefill.pool[::-1])


POOL_BYTES = NUM_BLOCKS * LAYOUT.block_bytes
OUTSIDE = (
    (0, POOL_BYTES, 1),
    (0, POOL_BYTES - 4, 8),
    (POOL_BYTES - 4, 0, 8),
    (-8, 0, 8),
    (0, -8, 8),
    (0, 0, 0),
    (0, 0, -1),
    (0, 2**63 - 4, 8),
)
"""Where a piece begins here and there, and its length."""


def test_no_piece_may_leave_either_pool(pair: Pair) -> None:
    before = pair.decode.pool.copy()
    for local, remote, length in OUTSIDE:
        pieces = Pieces(*(np.array([0, value], dtype=np.int64) for value in (local, remote)), np.array([8, length]))
        with pytest.raises(TransferError):
            pair.prefill.transport.post(TransferOp.WRITE, pair.decode.worker_id, pieces, b"never")
        assert pair.prefill.transport.num_pending == 0, (local, remote, length)
    np.testing.assert_array_equal(pair.decode.pool, before)


def test_a_removed_peer_is_unknown_until_it_is_added_again(pair: Pair) -> None:
    pieces = block_pieces(LAYOUT, [1], [2])
    assert pair.move(TransferOp.WRITE, pieces, b"before") is None
    pair.prefill.transport.remove_peer(pair.decode.worker_id)
    assert not pair.prefill.transport.has_peer(pair.decode.worker_id)
    with pytest.raises(TransferError) as caught:
        pair.prefill.transport.post(TransferOp.WRITE, pair.decode.worker_id, pieces)
    assert caught.value.peer == pair.decode.worker_id
    pair.prefill.transport.remove_peer(pair.decode.worker_id)
    pair.prefill.transport.add_peer(pair.decode.metadata)
    pair.prefill.pool[1] = 77
    assert pair.move(TransferOp.WRITE, pieces, b"after") is None
    pair.poll_until(lambda: b"after" in pair.decode.payloads)
    assert (pair.decode.pool[2] == 77).all()


def test_a_peer_with_an_impossible_pool_or_a_foreign_blob_is_refused(pair: Pair) -> None:
    metadata = pair.decode.metadata
    for broken in (
        replace_struct(metadata, address=0),
        replace_struct(metadata, num_bytes=metadata.num_bytes - 1),
        replace_struct(metadata, num_bytes=0),
        replace_struct(metadata, device="tape"),
        replace_struct(metadata, address=2**64 - 8),
    ):
        with pytest.raises(IncompatiblePeerError):
            pair.prefill.transport.add_peer(broken)
    for agent in (b"", b"junk" * 30, metadata.agent[:-1], pair.prefill.metadata.agent):
        with pytest.raises(TransferError):
            pair.prefill.transport.add_peer(replace_struct(metadata, agent=agent))
    pair.prefill.transport.add_peer(metadata)
    assert pair.move(TransferOp.WRITE, block_pieces(LAYOUT, [1], [2])) is None


def test_a_worker_that_is_barred_and_admitted_again_can_write(pair: Pair) -> None:
    pieces = block_pieces(LAYOUT, [1], [2])
    assert pair.decode.transport.bar(pair.prefill.worker_id)
    assert pair.decode.transport.bar(pair.prefill.worker_id)
    pair.decode.transport.admit(pair.prefill.worker_id)
    pair.decode.transport.admit("never-barred")
    assert pair.move(TransferOp.WRITE, pieces) is None
    np.testing.assert_array_equal(pair.decode.pool[2], pair.prefill.pool[1])


def test_close_is_clean_with_posts_under_way(pair: Pair) -> None:
    pair.prefill.transport.post(TransferOp.WRITE, pair.decode.worker_id, block_pieces(LAYOUT, [1], [2]), b"maybe")
    pair.prefill.transport.close()
    pair.prefill.transport.close()


def replace_struct(metadata: KvMetadata, **changes: object) -> KvMetadata:
    return msgspec.structs.replace(metadata, **changes)
