"""One worker over several ranks: one end for each post; faults, fence and windows of single ranks."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tests.patience import PATIENCE_S
from tests.transfer.ranks.movers import ranks_of

from kvrelay.config import TransferConfig
from kvrelay.core.layout import MemoryRegion, paged_kv
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, IncompatiblePeerError, TransferError
from kvrelay.transfer.base import Post, PostEnd, Transport
from kvrelay.transfer.pieces import block_pieces
from kvrelay.transfer.ranks.build import build_ranked_transport
from kvrelay.transfer.ranks.channel import Channel
from kvrelay.transfer.ranks.link import RankLink, RankLinks, RankTransport
from kvrelay.transfer.ranks.messages import FromRank, RankMemory
from kvrelay.transfer.ranks.splitting import RankCut
from kvrelay.transfer.ranks.transport import RankedTransport
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.values import Pieces, TransferOp

LAYOUT = paged_kv(num_layers=2, num_kv_heads=2, block_size=4, head_dim=16, dtype="float32", tp_size=2)
NUM_BLOCKS = 8
SIZE = NUM_BLOCKS * LAYOUT.block_bytes


class HeldTransport(Transport):
    """Posts end when the test says so. It stands for any transport whose bytes take time."""

    name = "nixl"

    def __init__(self, rank_id: str) -> None:
        super().__init__(rank_id)
        self.begun: list[Post] = []

    def _open(self, region: MemoryRegion) -> bytes:
        return self._worker_id.encode()

    def _connect(self, metadata: KvMetadata) -> KvMetadata:
        return metadata

    def _disconnect(self, worker_id: str, peer: object) -> None:
        gone = [post for post in self.begun if post.worker_id == worker_id]
        self.begun = [post for post in self.begun if post.worker_id != worker_id]
        self._fail([post.handle for post in gone], f"{worker_id} was disconnected")

    def _begin(self, post: Post, peer: object) -> None:
        self.begun.append(post)

    def end(self, error: str | None = None, *, is_refused: bool = False) -> Post:
        post = self.begun.pop(0)
        self._ended.append(PostEnd(post.handle, error, is_refused))
        return post

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        return self._take_ended(), []

    @property
    def num_pending(self) -> int:
        return len(self.begun)


class WakingTransport(HeldTransport):
    """Needs no poll before it rings."""

    num_polls = 0

    def __init__(self, rank_id: str) -> None:
        super().__init__(rank_id)
        self.notified: list[bytes] = []
        self.wake_fds = (os.eventfd(0, os.EFD_NONBLOCK),)

    def ring(self, payload: bytes) -> None:
        self.notified.append(payload)
        os.eventfd_write(self.wake_fds[0], 1)

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        self.num_polls += 1
        for fd in self.wake_fds:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
        notified, self.notified = self.notified, []
        return self._take_ended(), notified

    def close(self) -> None:
        os.close(self.wake_fds[0])
        self.wake_fds = ()


class Held:
    """A worker of two ranks with such transports, and a peer of two ranks that no one needs to reach."""

    def __init__(
        self, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, kind: type[HeldTransport] = HeldTransport
    ) -> None:
        self.made: list[HeldTransport] = []
        self.ended: list[PostEnd] = []

        def build(config: TransferConfig, rank_id: str, **_: object) -> Transport:
            self.made.append(kind(rank_id))
            return self.made[-1]

        monkeypatch.setattr("kvrelay.transfer.ranks.mover.build_transport", build)
        self.links = RankLinks()
        self.transport = ranks_of(stack, TransferConfig(), "w", LAYOUT, MemoryRegion(4096, SIZE), None, self.links)
        self.agent = self.transport.register(MemoryRegion(4096, SIZE))
        self.transport.add_peer(metadata_of("peer", self.agent))

    def post(self, notify: bytes | None = None) -> int:
        return self.transport.post(TransferOp.WRITE, "peer", block_pieces(LAYOUT, [1, 2], [3, 4]), notify)

    def poll(self) -> list[PostEnd]:
        self.ended += self.transport.poll()[0]
        return self.ended

    def until(self, condition: Callable[[], object]) -> None:
        until(lambda: (self.poll(), condition())[1])


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def metadata_of(worker_id: str, agent: bytes, **changes: object) -> KvMetadata:
    return KvMetadata(
        **{
            "worker_id": worker_id,
            "rank": 0,
            "transport": "nixl",
            "agent": agent,
            "address": 4096,
            "num_bytes": SIZE,
            "block_bytes": LAYOUT.block_bytes,
            "device": "cpu",
            "device_id": 0,
            "kv_compatibility": "same",
            "layout": LAYOUT,
            **changes,
        }  # type: ignore[arg-type]
    )


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.fixture
def held(stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(stack, monkeypatch)


# -- one end for all ranks --------------------------------------------------------------------------------------------


def test_a_post_ends_once_all_ranks_have_reported_and_notifies_only_then(held: Held) -> None:
    first, second = held.made
    handle = held.post(b"done")
    held.until(lambda: first.begun and second.begun)
    assert [post.worker_id for post in (*first.begun, *second.begun)] == ["peer/0", "peer/1"]
    assert [post.notify for post in (*first.begun, *second.begun)] == [None, None]
    second.end()
    time.sleep(0.05)
    assert held.poll() == []
    assert held.transport.num_pending == 1
    first.end()
    held.until(lambda: first.begun)
    assert held.ended == []
    last = first.end()
    assert (last.notify, last.pieces.num_pieces, second.begun) == (b"done", 0, [])
    held.until(lambda: held.ended)
    assert held.ended == [PostEnd(handle, None)]
    assert held.transport.num_pending == 0


def test_a_refusal_by_one_rank_is_told_when_the_others_have_ended(held: Held) -> None:
    first, second = held.made
    handle = held.post(b"never")
    held.until(lambda: first.begun and second.begun)
    first.end("no room", is_refused=True)
    time.sleep(0.05)
    assert held.poll() == []
    second.end()
    held.until(lambda: held.ended)
    assert held.ended == [PostEnd(handle, "no room", is_refused=True)]
    assert first.begun == second.begun == []


def test_a_failure_of_one_rank_is_told_at_once_and_the_others_end_with_the_peer(held: Held) -> None:
    first, second = held.made
    handle = held.post(b"never")
    held.until(lambda: first.begun and second.begun)
    first.end("lost")
    held.until(lambda: held.ended)
    assert held.ended == [PostEnd(handle, "lost")]
    held.transport.remove_peer("peer")
    assert first.begun == second.begun == []
    assert not held.transport.has_peer("peer")
    held.poll()
    assert len(held.ended) == 1
    with pytest.raises(TransferError):
        held.post()


# -- the fence --------------------------------------------------------------------------------------------------------


def test_a_rank_posts_nothing_past_the_workers_fence(held: Held) -> None:
    held.transport.fence = lambda: time.monotonic() - 1
    held.post()
    held.until(lambda: held.ended)
    assert "the lease has run out" in str(held.ended[0].error)
    assert not any(transport.begun for transport in held.made)


def test_a_rank_cancels_what_is_in_flight_when_the_fence_passes(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker is stopped meanwhile: it says nothing to the ranks."""
    first, second = held.made
    skipped_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped_s[0])
    monkeypatch.setattr("kvrelay.transfer.ranks.mover.time", clock)
    fence_s = time.monotonic() + 2 * PATIENCE_S
    held.transport.fence = lambda: fence_s
    held.post()
    until(lambda: first.begun and second.begun)
    skipped_s[0] = 2 * PATIENCE_S
    until(lambda: not first.begun and not second.begun)


# -- faults of one rank -----------------------------------------------------------------------------------------------


def silent_rank(killed: list[str]) -> tuple[RankLink, socket.socket]:
    ours, theirs = socket.socketpair()
    return RankLink("rank 1", Channel(ours, FromRank), lambda: killed.append("rank 1")), theirs


def test_a_rank_that_does_not_answer_is_killed_after_the_transfer_timeout(caplog: pytest.LogCaptureFixture) -> None:
    killed: list[str] = []
    link, theirs = silent_rank(killed)
    transport = RankTransport(link, "w/1", TransferConfig(transfer_timeout_s=0.1))
    with contextlib.closing(link.channel), theirs:
        with pytest.raises(TransferError, match=r"rank 1 has not answered for 0\.1 s \(--transfer-timeout-s\)"):
            transport.add_peer(metadata_of("peer", b""))
        assert killed == ["rank 1"]
        assert "rank 1 has not answered for 0.1 s (--transfer-timeout-s), and so it is killed" in caplog.text
        # From here on it touches nothing, and no one waits for it.
        assert transport.bar("peer")
        transport.admit("peer")
        transport.remove_peer("peer")
        transport.close()
    assert killed == ["rank 1"]


def test_a_rank_that_reads_nothing_is_killed_too() -> None:
    killed: list[str] = []
    link, theirs = silent_rank(killed)
    transport = RankTransport(link, "w/1", TransferConfig(transfer_timeout_s=0.1))
    with contextlib.closing(link.channel), theirs:
        for _ in range(100):
            transport.learn("x" * 10_000, "key")
    assert killed == ["rank 1"]


def test_posts_fail_when_their_rank_ends(stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(stack, monkeypatch)
    handle = held.post(b"never")
    held.until(lambda: all(transport.begun for transport in held.made))
    with socket.socket(fileno=os.dup(held.links.links[1].channel.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
    held.until(lambda: held.ended)
    assert held.ended[0].handle == handle
    assert "rank 1 is gone" in str(held.ended[0].error)
    held.transport.remove_peer("peer")
    assert held.made[0].begun == []
    with pytest.raises(TransferError, match="rank 1 is gone"):
        held.transport.add_peer(metadata_of("peer", held.agent))


def test_what_a_rank_and_its_worker_send_at_once_blocks_neither(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sockets are full: long notifications one way, posts of many pieces the other."""
    held = Held(stack, monkeypatch)
    payload = bytes(1 << 20)

    def noisy() -> tuple[list[PostEnd], list[bytes]]:
        return [], [payload] if len(received) < 20 else []

    received: list[bytes] = []
    monkeypatch.setattr(held.made[0], "poll", noisy)
    many = np.arange(100_000, dtype=np.int64) % SIZE
    pieces = Pieces(many, many, np.ones_like(many))
    for _ in range(5):
        held.transport.post(TransferOp.WRITE, "peer", pieces)
    end_s = time.monotonic() + PATIENCE_S
    while len(received) < 20 or len(held.made[0].begun) < 5:
        assert time.monotonic() < end_s
        received += held.transport.poll()[1]
    assert all(each == payload for each in received)


def test_a_rank_that_its_transport_wakes_does_not_poll_it(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares the interpreter's lock with the rank's steps."""
    held = Held(stack, monkeypatch, WakingTransport)
    ranks = [each for each in held.made if isinstance(each, WakingTransport)]
    assert len(ranks) == 2
    for _ in range(30):
        held.poll()  # as while a hand-off is open
        time.sleep(0.01)
    assert all(rank.num_polls < 50 for rank in ranks), "hundreds of poll intervals have passed"
    ranks[1].ring(b"done")
    received: list[bytes] = []
    until(lambda: received.extend(held.transport.poll()[1]) or received)
    assert received == [b"done"]
    held.transport.close()


def test_a_port_in_use_is_named(stack: contextlib.ExitStack) -> None:
    pytest.importorskip("torch")
    # No one else uses this address, so the other rank's port is free.
    host = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.4"
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        memory = np.zeros(SIZE, np.uint8)
        region = MemoryRegion(memory.ctypes.data, SIZE)
        # Rank 1 listens 3 above the worker's port: the offset of the rank map.
        config = TransferConfig(transport="p2p", kv_port=port - 3)
        transport = ranks_of(stack, config, "w", LAYOUT, region, host=host)
        with pytest.raises(FatalError, match=rf"cannot listen on {re.escape(host)}:{port}"):
            transport.register(region)
        transport.close()


# -- peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memories", "changes"),
    [([RankMemory(b"a", 4096, SIZE)] * 3, {}), ([], {}), ([RankMemory(b"a", 4096, SIZE)] * 2, {"layout": None})],
)
def test_a_peer_whose_ranks_are_not_those_of_its_layout_is_refused(
    held: Held, memories: list[RankMemory], changes: dict[str, object]
) -> None:
    with pytest.raises(TransferError, match="not those of the ranks"):
        held.transport.add_peer(metadata_of("peer", msgspec.msgpack.encode(memories), **changes))


def test_a_rank_without_memory_is_refused(held: Held) -> None:
    memories = [RankMemory(b"a", 4096, SIZE, stride=LAYOUT.block_bytes), RankMemory(b"a", 0, SIZE, stride=4)]
    with pytest.raises(IncompatiblePeerError, match="without memory"):
        held.transport.add_peer(metadata_of("peer", msgspec.msgpack.encode(memories)))


def test_the_blob_of_a_worker_before_per_rank_transfers_is_refused(held: Held) -> None:
    """``Compatibility.protocol`` keeps such workers apart before."""
    with pytest.raises(TransferError, match="the metadata of worker old is damaged"):
        held.transport.add_peer(metadata_of("old", b"kvrelay-nixl-1:blob"))


# -- windows at each rank ---------------------------------------------------------------------------------------------


def test_every_rank_enforces_the_window(stack: contextlib.ExitStack) -> None:
    pytest.importorskip("torch")
    config = TransferConfig(transport="p2p")
    ends: list[tuple[RankedTransport, np.ndarray]] = []
    for name in ("p", "d"):
        pool = np.full((NUM_BLOCKS, LAYOUT.block_bytes), ord(name), np.uint8)
        region = MemoryRegion(pool.ctypes.data, SIZE)
        transport = ranks_of(stack, config, name, LAYOUT, region, is_guarded=True)
        agent = transport.register(region)
        stack.callback(transport.close)
        ends.append((transport, pool))
    (giver, source), (taker, target) = ends
    giver.add_peer(metadata_of("d", agent, transport="p2p", address=target.ctypes.data))
    key, size = RemoteKey("d#1", 1), LAYOUT.block_bytes
    taker.open_window(MemoryWindow(key, 7, "p", (), (3, 4), size, size))

    def write(remote: list[int], key: RemoteKey | None = key) -> PostEnd:
        pieces = block_pieces(LAYOUT, [0, 1], remote)
        giver.post(TransferOp.WRITE, "d", pieces, b"done", key)
        ended: list[PostEnd] = []
        until(lambda: ended.extend(giver.poll()[0]) or (taker.poll() and ended))
        return ended[0]

    assert write([3, 4]).error is None
    np.testing.assert_array_equal(target[[3, 4]], source[[0, 1]])
    before = target.copy()
    for refused in (write([4, 5]), write([3, 4], RemoteKey("d#1", 2))):
        assert refused.is_refused
        assert "grant" in str(refused.error)
    np.testing.assert_array_equal(target[5:], before[5:])
    taker.bar("p")
    assert "its lease has ended" in str(write([3, 4]).error)
    taker.admit("p")
    taker.close_window("d#1", 7)
    assert "no such grant is open" in str(write([3, 4]).error)


def test_ranks_that_peers_reach_by_themselves_get_no_window(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting one for each rank costs every grant a time."""
    monkeypatch.setattr(RankCut, "windows", lambda *_: pytest.fail("a window was cut"))
    held.transport.open_window(MemoryWindow(RemoteKey("d#1", 1), 7, "p", (), (3, 4), 1, 1))
    held.transport.close_window("d#1", 7)


def test_a_worker_that_moves_all_by_itself_is_woken_by_its_transport(stack: contextlib.ExitStack) -> None:
    """Else its transfer thread would poll while a hand-off is open. Ranks tell by a socket, which is asked."""
    memory = stack.enter_context(contextlib.closing(SharedPoolMemory()))
    config, pool = TransferConfig(transport="shm"), memory.allocate(SIZE)
    region = MemoryRegion(np.frombuffer(pool, dtype=np.uint8).ctypes.data, SIZE)
    alone = stack.enter_context(contextlib.closing(build_ranked_transport(config, "w", LAYOUT, RankLinks(), memory)))
    assert not alone.wake_fds
    alone.register(region)
    assert alone.wake_fds
