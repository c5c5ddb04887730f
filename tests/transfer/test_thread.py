"""TransferThread over the loopback transport, with injected faults and a clock moved by hand."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from tests.transfer.faulty_loopback import FaultyFabric

from kvrelay.config import TransferConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.layout import MemoryRegion, paged_kv
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import IncompatiblePeerError, TransferError
from kvrelay.transfer import thread as thread_module
from kvrelay.transfer.base import PostEnd
from kvrelay.transfer.loopback import LoopbackFabric, LoopbackTransport
from kvrelay.transfer.pieces import NO_PIECES, block_pieces
from kvrelay.transfer.queues import MAX_POSTS_PER_PEER
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import TransferOp

LAYOUT = paged_kv(num_layers=1, num_kv_heads=1, block_size=4, head_dim=8, dtype="float32")
NUM_BLOCKS = 32
CONFIG = TransferConfig(transport="loopback", transfer_timeout_s=30.0)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.001)


@dataclass
class Side:
    thread: TransferThread
    transport: LoopbackTransport
    pool: np.ndarray
    metadata: KvMetadata
    payloads: list[bytes] = field(default_factory=list)


class Cluster:
    """A prefill and a decode worker on one fabric."""

    def __init__(self) -> None:
        self.fabric = FaultyFabric(seed=3)
        self.clock = ManualClock()
        self.fence_s = math.inf
        self.failures: list[Exception] = []
        self.prefill, self.decode = self.make("p"), self.make("d")
        self.prefill.thread.add_peer(self.decode.metadata).result(60)
        self.decode.thread.open_handoff()
        self.log: list[tuple[object, str | None]] = []

    def make(self, worker_id: str) -> Side:
        transport = self.fabric.transport(worker_id)
        thread = TransferThread(
            transport, CONFIG, self.clock, fence=lambda: self.fence_s, on_failed=self.failures.append
        )
        thread.start()
        pool = np.random.default_rng(sum(worker_id.encode())).integers(
            0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8
        )
        region = MemoryRegion(pool.ctypes.data, pool.nbytes)
        agent = thread.register(region, kv_compatibility="k").result(60)
        metadata = KvMetadata(
            worker_id, 0, "loopback", agent, region.address, region.num_bytes, LAYOUT.block_bytes, "cpu", 0, "k"
        )
        side = Side(thread, transport, pool, metadata)
        thread.on_notification(side.payloads.append)
        return side

    def write(self, name: object, blocks: list[int], notify: bytes | None = None, group: str | None = None) -> None:
        pieces = block_pieces(LAYOUT, blocks, blocks)
        self.prefill.thread.submit(
            TransferOp.WRITE, "d", pieces, notify, on_done=lambda error: self.log.append((name, error)), group=group
        )

    def until_full(self) -> None:
        """All that was submitted is queued, and as much of it as may be is posted."""
        self.prefill.thread.bar("d").result(60)  # comes after all that was submitted
        wait_for(lambda: self.prefill.transport.num_pending == MAX_POSTS_PER_PEER)

    def wait(self, count: int) -> list[tuple[object, str | None]]:
        wait_for(lambda: len(self.log) >= count)
        return self.log

    def close(self) -> None:
        self.prefill.thread.close()
        self.decode.thread.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_writes_complete_and_are_counted(cluster: Cluster) -> None:
    cluster.write("a", [1, 2, 5], b"done")
    assert cluster.wait(1) == [("a", None)]
    wait_for(lambda: cluster.decode.payloads == [b"done"])
    np.testing.assert_array_equal(cluster.decode.pool[[1, 2, 5]], cluster.prefill.pool[[1, 2, 5]])
    stats = cluster.prefill.thread.stats()
    assert stats.num_bytes == 3 * LAYOUT.block_bytes
    (row,) = stats.peers
    assert (row.worker_id, row.op, row.num_transfers, row.num_pieces, row.num_errors) == (
        "d",
        TransferOp.WRITE,
        1,
        2,
        0,
    )
    assert stats.num_unfinished == 0
    assert cluster.decode.thread.stats().num_notifications == 1
    cluster.prefill.thread.remove_peer("d").result(60)
    (row,) = cluster.prefill.thread.stats().peers
    assert (row.worker_id, row.num_transfers) == ("", 1), "departed workers do not fill the memory"


def test_a_transfer_takes_from_its_submission_to_its_end(cluster: Cluster) -> None:
    cluster.clock.advance(100.0)
    cluster.fabric.faults.drop_next = 1
    cluster.write("late", [1])
    wait_for(lambda: cluster.prefill.transport.num_pending == 1)
    cluster.clock.advance(CONFIG.transfer_timeout_s)
    cluster.wait(1)
    assert cluster.prefill.thread.stats().peers[0].seconds == CONFIG.transfer_timeout_s


def test_a_notification_waits_for_every_earlier_write_even_when_posts_end_out_of_order(cluster: Cluster) -> None:
    cluster.fabric.faults.reorder = True
    cluster.fabric.faults.delay_polls = 3
    cluster.decode.pool[:] = 0
    seen: list[bool] = []
    cluster.decode.thread.on_notification(
        lambda _: seen.append(bool((cluster.decode.pool[:30] == cluster.prefill.pool[:30]).all()))
    )
    for block in range(30):
        cluster.write(block, [block])
    cluster.write("last", [], b"done")
    assert cluster.wait(31)[-1] == ("last", None)
    wait_for(lambda: bool(seen))
    assert seen == [True]


def test_after_a_failed_write_nothing_of_its_group_follows(cluster: Cluster) -> None:
    cluster.fabric.faults.fail_next = 1
    cluster.write("chunk", [1], group="h1")
    cluster.wait(1)
    cluster.write("last", [2], b"done-1", group="h1")
    cluster.write("other", [3], b"done-2", group="h2")
    log = cluster.wait(3)
    assert log[0] == ("chunk", "injected failure")
    assert ("last", "injected failure") in log
    assert ("other", None) in log
    wait_for(lambda: bool(cluster.decode.payloads))
    assert cluster.decode.payloads == [b"done-2"]
    cluster.write("again", [2], group="h1")
    assert cluster.wait(4)[3] == ("again", "injected failure")
    wait_for(lambda: not cluster.prefill.thread.has_turn)  # it polls for nothing


def test_a_transfer_past_its_deadline_fails_and_cannot_land_later(cluster: Cluster) -> None:
    cluster.fabric.faults.drop_next = 1
    before = cluster.decode.pool.copy()
    cluster.write("lost", [4])
    wait_for(lambda: cluster.fabric.faults.drop_next == 0)
    cluster.clock.advance(31)
    ((name, error),) = cluster.wait(1)
    assert name == "lost"
    assert "deadline" in (error or "")
    np.testing.assert_array_equal(cluster.decode.pool, before)
    cluster.write("next", [5])
    assert cluster.wait(2)[1] == ("next", None)


def test_a_process_that_was_stopped_posts_nothing_when_it_wakes_up(cluster: Cluster) -> None:
    stopped, wake_up = threading.Event(), threading.Event()

    def stop(error: str | None) -> None:
        stopped.set()
        wake_up.wait(60)

    pieces = block_pieces(LAYOUT, [0], [0])
    cluster.prefill.thread.submit(TransferOp.WRITE, "d", pieces, on_done=stop)
    assert stopped.wait(60)
    before = cluster.decode.pool.copy()
    cluster.prefill.pool[6] += 1
    cluster.write("late", [6], b"late")
    cluster.clock.advance(100)
    wake_up.set()
    assert "deadline" in (cluster.wait(1)[0][1] or "")
    np.testing.assert_array_equal(cluster.decode.pool, before)
    assert cluster.decode.payloads == []


def test_a_shorter_timeout_is_honoured(cluster: Cluster) -> None:
    cluster.fabric.faults.drop_next = 1
    cluster.prefill.thread.submit(
        TransferOp.READ,
        "d",
        block_pieces(LAYOUT, [1], [1]),
        on_done=lambda error: cluster.log.append(("short", error)),
        timeout_s=2.0,
    )
    cluster.clock.advance(1)
    assert cluster.log == []
    cluster.clock.advance(2)
    assert "deadline" in (cluster.wait(1)[0][1] or "")


def test_a_dead_peer_fails_everything_under_way_with_it(cluster: Cluster) -> None:
    cluster.fabric.faults.delay_polls = 1_000_000
    for block in range(20):
        cluster.write(block, [block])
    cluster.until_full()
    cluster.fabric.faults.delay_polls = 0
    cluster.fabric.kill("d")
    cluster.prefill.thread.remove_peer("d").result(60)
    assert sorted(name for name, _ in cluster.wait(20)) == list(range(20))  # type: ignore[type-var]
    assert all(error for _, error in cluster.log)
    assert not cluster.prefill.thread.has_peer("d")
    cluster.write("after", [1])
    assert cluster.wait(21)[-1][1] == "worker d is not connected"


def test_the_next_transfer_reconnects_after_a_failure(cluster: Cluster) -> None:
    cluster.fabric.faults.fail_next = 1
    cluster.write("a", [1])
    cluster.wait(1)
    cluster.write("b", [2], b"x")
    assert cluster.wait(2)[1] == ("b", None)


def test_bad_plans_fail_alone(cluster: Cluster) -> None:
    cluster.write("good", [1])
    cluster.prefill.thread.submit(
        TransferOp.WRITE,
        "d",
        block_pieces(LAYOUT, [0], [NUM_BLOCKS]),
        on_done=lambda error: cluster.log.append(("bad", error)),
    )
    cluster.write("good too", [2])
    log = dict(cluster.wait(3))
    assert log["good"] is None
    assert log["good too"] is None
    assert "pool" in (log["bad"] or "")


def test_no_further_part_of_a_refused_transfer_is_posted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is good: other transfers go on."""
    monkeypatch.setattr(thread_module, "MAX_POST_BYTES", LAYOUT.block_bytes)
    transport, num_posts = cluster.prefill.transport, itertools.count()
    poll, post = transport.poll, transport.post

    def refusing() -> tuple[list[PostEnd], list[bytes]]:
        completions, notifications = poll()
        return [msgspec.structs.replace(each, is_refused=each.error is not None) for each in completions], notifications

    def counted(*arguments: object) -> int:
        next(num_posts)
        return post(*arguments)

    transport.poll, transport.post = refusing, counted
    cluster.fabric.faults.fail_next = 1
    cluster.write("large", list(range(0, 2 * (MAX_POSTS_PER_PEER + 2), 2)), b"never")
    assert cluster.wait(1) == [("large", "injected failure")]
    assert next(num_posts) == MAX_POSTS_PER_PEER
    assert transport.has_peer("d")
    cluster.write("next", [1], b"done")
    assert cluster.wait(2)[1] == ("next", None)
    wait_for(lambda: cluster.decode.payloads == [b"done"])


def test_large_plans_are_posted_in_parts(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "MAX_POST_BYTES", LAYOUT.block_bytes // 2 + 3)
    cluster.decode.pool[:] = 0
    cluster.fabric.faults.delay_polls = 2
    cluster.write("big", list(range(NUM_BLOCKS)), b"done")
    assert cluster.wait(1) == [("big", None)]
    wait_for(lambda: cluster.decode.payloads == [b"done"])
    np.testing.assert_array_equal(cluster.decode.pool, cluster.prefill.pool)


@pytest.mark.parametrize("changes", [{"kv_compatibility": "other"}, {"transport": "nixl"}, {"version": 2}])
def test_incompatible_peers_are_refused(cluster: Cluster, changes: dict[str, object]) -> None:
    metadata = msgspec.structs.replace(cluster.prefill.metadata, worker_id="x", **changes)
    with pytest.raises(IncompatiblePeerError):
        cluster.prefill.thread.add_peer(metadata).result(60)
    assert not cluster.prefill.thread.has_peer("x")


def test_closing_fails_what_is_unfinished_and_what_comes_later(cluster: Cluster) -> None:
    cluster.fabric.faults.drop_next = 100
    cluster.write("open", [1])
    wait_for(lambda: cluster.prefill.thread.stats().num_unfinished == 1)
    cluster.prefill.thread.close()
    assert cluster.wait(1) == [("open", "the transfer thread is closed")]
    assert not cluster.failures, "it was closed"
    cluster.write("late", [1])
    assert cluster.wait(2)[1] == ("late", "the transfer thread is closed")
    with pytest.raises(TransferError):
        cluster.prefill.thread.add_peer(cluster.decode.metadata)
    assert cluster.prefill.thread.remove_peer("d").result(60) is None


def test_a_cancelled_wait_does_not_stop_the_thread(cluster: Cluster) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block(error: str | None) -> None:
        entered.set()
        leave.wait(60)

    cluster.prefill.thread.submit(TransferOp.WRITE, "d", NO_PIECES, b"x", on_done=block)
    assert entered.wait(60)
    waiting = cluster.prefill.thread.add_peer(cluster.decode.metadata)
    assert waiting.cancel()
    leave.set()
    cluster.write("after", [1])
    assert cluster.wait(1) == [("after", None)]


def test_after_the_fence_nothing_moves(cluster: Cluster) -> None:
    """What is queued, what is on its way and what is submitted later: all of it fails, no byte arrives."""
    cluster.decode.pool[:] = 0
    cluster.fabric.faults.delay_polls = 1_000_000_000
    for block in range(20):
        cluster.write(block, [block])
    cluster.until_full()
    cluster.fence_s = 5.0
    cluster.clock.advance(5.0)
    cluster.wait(20)
    cluster.fabric.faults.delay_polls = 0
    cluster.write("later", [30], b"done")
    assert all("lease" in (error or "") for _, error in cluster.wait(21))
    assert not cluster.decode.pool.any()
    cluster.fence_s = 50.0
    cluster.write("alive again", [31], b"done")
    assert cluster.wait(22)[-1] == ("alive again", None)


def test_a_thread_that_was_stopped_beyond_the_fence_posts_nothing(cluster: Cluster) -> None:
    """As by SIGSTOP: when it goes on the queue is full of what was allowed before."""
    entered, leave = threading.Event(), threading.Event()

    def stop(error: str | None) -> None:
        entered.set()
        leave.wait(60)

    cluster.decode.pool[:] = 0
    cluster.prefill.thread.submit(TransferOp.WRITE, "d", NO_PIECES, b"x", on_done=stop)
    assert entered.wait(60)
    cluster.write("queued", [3])
    cluster.fence_s = 5.0
    cluster.clock.advance(5.0)
    leave.set()
    assert "lease" in (cluster.wait(1)[0][1] or "")
    assert not cluster.decode.pool.any()


def test_after_fail_all_nothing_submitted_before_is_posted(cluster: Cluster) -> None:
    """Even when the thread hears of it only after something new was submitted."""
    entered, leave = threading.Event(), threading.Event()

    def stop(error: str | None) -> None:
        entered.set()
        leave.wait(60)

    cluster.decode.pool[:] = 0
    cluster.prefill.thread.submit(TransferOp.WRITE, "d", NO_PIECES, b"x", on_done=stop)
    assert entered.wait(60)
    cluster.write("queued", [3])
    cluster.prefill.thread.fail_all("lease lost")
    cluster.write("new", [4])
    leave.set()
    log = dict(cluster.wait(2))
    assert (log["queued"] is not None, log["new"]) == (True, None)
    assert not cluster.decode.pool[3].any()
    assert cluster.decode.pool[4].any()


def test_what_waits_beside_a_post_is_not_posted_when_everything_is_withdrawn_meanwhile(cluster: Cluster) -> None:
    entered, leave = threading.Event(), threading.Event()
    transport, posted = cluster.prefill.transport, []
    post = transport.post

    def stop(error: str | None) -> None:
        entered.set()
        leave.wait(60)

    def losing(*arguments: object) -> int:
        posted.append(arguments)
        cluster.prefill.thread.fail_all("lease lost")
        return post(*arguments)

    cluster.prefill.thread.submit(TransferOp.WRITE, "d", NO_PIECES, b"x", on_done=stop)
    assert entered.wait(60)
    transport.post = losing
    for name, block in (("first", 3), ("second", 4)):
        cluster.write(name, [block])
    leave.set()
    assert all(error is not None for _, error in cluster.wait(2))
    assert len(posted) == 1


def test_fail_all_stops_what_is_on_its_way(cluster: Cluster) -> None:
    cluster.decode.pool[:] = 0
    cluster.fabric.faults.delay_polls = 1_000_000_000
    for block in range(20):
        cluster.write(block, [block])
    cluster.until_full()
    cluster.prefill.thread.fail_all("lease lost")
    assert {error for _, error in cluster.wait(20)} == {"lease lost"}
    assert not cluster.prefill.transport.posts
    assert not cluster.decode.pool.any()


def test_a_peer_that_was_disconnected_while_another_was_served_is_left_alone(cluster: Cluster) -> None:
    """A post to one peer may take so long that another's deadline passes meanwhile."""
    other = cluster.make("e")
    cluster.prefill.thread.add_peer(other.metadata).result(60)
    transport = cluster.prefill.transport
    posted: list[str] = []
    post, bar = transport.post, transport.bar
    post_s = 0.0

    def slow(op: TransferOp, worker_id: str, *rest: object) -> int:
        posted.append(worker_id)
        cluster.clock.advance(post_s)
        return post(op, worker_id, *rest)

    transport.post = slow
    cluster.fabric.faults.drop_next = 100
    pieces = block_pieces(LAYOUT, [1], [1])

    def submit(*transfers: tuple[str, str, float]) -> None:
        """On the transfer thread, so that it finds all of them in one step."""

        def run() -> None:
            for name, worker_id, timeout_s in transfers:
                cluster.prefill.thread.submit(
                    TransferOp.WRITE,
                    worker_id,
                    pieces,
                    on_done=lambda error, name=name: cluster.log.append((name, error)),
                    timeout_s=timeout_s,
                )

        transport.bar = lambda worker_id: run() or bar(worker_id)
        cluster.prefill.thread.bar("d").result(60)

    submit(("d0", "d", 30.0), ("e0", "e", 30.0))
    wait_for(lambda: posted == ["d", "e"])
    cluster.clock.advance(10.0)
    post_s = 20.0
    # d1's post takes until d0 and e0 are late and d2 was not begun in time; e1 still has time, but no connection.
    submit(("d1", "d", 30.0), ("d2", "d", 5.0), ("e1", "e", 30.0))
    log = dict(cluster.wait(5))
    assert all(error is not None for error in log.values())
    assert posted == ["d", "e", "d"]
    assert not transport.posts
    other.thread.close()


def test_a_thread_that_fails_says_so_after_it_has_failed_everything(cluster: Cluster) -> None:
    def broken() -> None:
        cluster.write("submitted", [2])
        raise RuntimeError("no such device")

    cluster.fabric.faults.drop_next = 1
    cluster.write("open", [1])
    wait_for(lambda: cluster.prefill.transport.num_pending == 1)
    cluster.prefill.transport.poll = broken
    wait_for(lambda: bool(cluster.failures))
    closed = "the transfer thread is closed"
    assert cluster.log == [("open", closed), ("submitted", closed)]
    assert str(cluster.failures[0]) == "no such device"
    cluster.write("later", [3])
    assert cluster.wait(3)[2] == ("later", closed)


def test_a_peer_is_forgotten_before_the_thread_has_come_to_it(cluster: Cluster) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stop(error: str | None) -> None:
        entered.set()
        leave.wait(60)

    cluster.prefill.thread.submit(TransferOp.WRITE, "d", NO_PIECES, b"x", on_done=stop)
    assert entered.wait(60)
    cluster.prefill.thread.remove_peer("d")
    assert not cluster.prefill.thread.has_peer("d")
    added = cluster.prefill.thread.add_peer(cluster.decode.metadata)
    leave.set()
    added.result(60)
    assert cluster.prefill.thread.has_peer("d")


def test_a_thread_that_was_never_started_closes() -> None:
    thread, errors = TransferThread(LoopbackTransport(LoopbackFabric(), "a"), CONFIG), []
    thread.submit(TransferOp.WRITE, "d", NO_PIECES, on_done=errors.append)
    thread.close()
    thread.close()
    assert errors == ["worker d is not connected"]


def test_callbacks_that_fail_stop_nothing(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    def explode(_: object) -> None:
        raise RuntimeError("boom")

    cluster.decode.thread.on_notification(explode)
    cluster.prefill.thread.submit(TransferOp.WRITE, "d", NO_PIECES, b"x", on_done=explode)
    cluster.write("after", [1])
    assert cluster.wait(1) == [("after", None)]
    wait_for(lambda: cluster.decode.thread.stats().num_notifications == 1)
    assert "boom" in caplog.text


def test_nothing_is_polled_while_nothing_is_open(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.decode.thread.close_handoff()
    cluster.write("a", [1])
    cluster.wait(1)
    polls = 0
    transport = cluster.decode.transport
    original = transport.poll

    def counted() -> object:
        nonlocal polls
        polls += 1
        return original()

    monkeypatch.setattr(transport, "poll", counted)

    def is_quiet() -> bool:
        before = polls
        time.sleep(0.05)
        return polls == before

    wait_for(is_quiet)
    settled = polls
    cluster.decode.thread.open_handoff()
    wait_for(lambda: polls > settled + 5)


def test_reads_and_writes_with_many_peers_from_many_threads(cluster: Cluster) -> None:
    others = [cluster.make(f"d{index}") for index in range(3)]
    for other in others:
        cluster.prefill.thread.add_peer(other.metadata).result(60)

    def submit(peer: str, block: int) -> None:
        pieces = block_pieces(LAYOUT, [block], [block])
        cluster.prefill.thread.submit(
            TransferOp.WRITE, peer, pieces, on_done=lambda error: cluster.log.append((peer, error))
        )

    threads = [
        threading.Thread(target=lambda index=index: [submit(f"d{index}", block) for block in range(NUM_BLOCKS)])
        for index in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(error is None for _, error in cluster.wait(3 * NUM_BLOCKS))
    for other in others:
        np.testing.assert_array_equal(other.pool, cluster.prefill.pool)
        other.thread.close()


@pytest.mark.parametrize("seed", range(6))
def test_done_never_arrives_for_a_group_that_lost_a_write(cluster: Cluster, seed: int) -> None:
    """Random failures, delays, lost and reordered posts: every transfer ends once, and "done" means done."""
    rng = random.Random(seed)
    faults = cluster.fabric.faults
    faults.reorder = True
    groups: dict[str, list[int]] = {}
    incomplete: list[str] = []
    arrived: set[str] = set()

    def check(notification: bytes) -> None:
        name = notification.decode()
        arrived.add(name)
        if not (cluster.decode.pool[groups[name]] == cluster.prefill.pool[groups[name]]).all():
            incomplete.append(name)

    cluster.decode.thread.on_notification(check)
    cluster.decode.pool[:] = cluster.prefill.pool + 1
    free = list(range(NUM_BLOCKS))
    count = 0
    for index in range(8):
        name = f"g{index}"
        groups[name] = [free.pop() for _ in range(4)]
        for block in groups[name]:
            with cluster.fabric.lock:
                faults.delay_polls = rng.choice([0, 0, 1, 5])
                faults.fail_next += rng.random() < 0.1
                faults.drop_next += rng.random() < 0.03
            cluster.write((name, block), [block], group=name)
            count += 1
            if rng.random() < 0.3:
                time.sleep(0.001)
        cluster.write((name, "done"), [], name.encode(), group=name)
        count += 1
    end = time.monotonic() + 60
    while len(cluster.log) < count:
        assert time.monotonic() < end, "transfers hang"
        cluster.clock.advance(1)
        time.sleep(0.002)
    assert len({name for name, _ in cluster.log}) == count, "a transfer ended twice"
    assert incomplete == []
    errors = dict(cluster.log)
    sure = {name for name in groups if all(errors[name, part] is None for part in [*groups[name], "done"])}
    wait_for(lambda: sure <= arrived)
    assert all(errors[name, block] is None for name in arrived for block in groups[name])
    assert cluster.prefill.thread.stats().num_unfinished == 0


def test_a_read_that_ends_behind_the_fence_does_not_count() -> None:
    """This process may have been stopped in the middle of it, and the peer have reused what it read."""
    cluster = Cluster()
    try:

        def stop(post: object) -> None:
            cluster.fence_s = cluster.clock.now()

        cluster.prefill.transport.before.append(stop)
        errors: list[str | None] = []
        cluster.prefill.thread.submit(
            TransferOp.READ, "d", block_pieces(LAYOUT, [1], [2]), on_done=errors.append, timeout_s=20.0
        )
        wait_for(lambda: bool(errors))
        assert errors[0] is not None
        assert "lease" in errors[0]
    finally:
        for side in (cluster.prefill, cluster.decode):
            side.thread.close()
