"""The shm transport between processes: who may write when, what is left when one dies, which host counts."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.transfer.shm_worker import FILL, NUM_PAGES, PAGE, Worker

from kvrelay.config import TransferConfig
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import ConfigError, FatalError, TransferError
from kvrelay.transfer.auto import AutoTransport
from kvrelay.transfer.base import PostEnd
from kvrelay.transfer.factory import build_transport, pool_allocator, shared_memory
from kvrelay.transfer.loopback import LoopbackFabric, LoopbackTransport
from kvrelay.transfer.pieces import MAX_NOTIFY_BYTES, NO_PIECES
from kvrelay.transfer.shm.copying import STREAM_FROM_BYTES, copy_pieces
from kvrelay.transfer.shm.host import this_host
from kvrelay.transfer.shm.mailbox import PIPE_BYTES, Mailbox, Sender
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.shm.transport import ShmAgent, ShmTransport
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import TransferOp

WAIT_S = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.002)


class Child:
    """``shm_worker`` as a process."""

    def __init__(self, worker_id: str, process: subprocess.Popen[str]) -> None:
        self.worker_id, self.process = worker_id, process
        self.metadata = msgspec.json.decode(self.process.stdout.readline(), type=KvMetadata)

    def order(self, **order: object) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str | None:
        return json.loads(self.process.stdout.readline())

    def connect(self, owner: Worker) -> None:
        self.order(do="peer", metadata=msgspec.to_builtins(owner.metadata))
        assert self.answer() is None

    @property
    def is_stopped(self) -> bool:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"


@contextmanager
def child(worker_id: str) -> Iterator[Child]:
    command = [sys.executable, "-m", "tests.transfer.shm_worker", worker_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Child(worker_id, process)
        finally:
            process.kill()


@pytest.fixture
def owner() -> Iterator[Worker]:
    worker = Worker("owner")
    worker.pool[:] = 0
    yield worker
    worker.close()


def stopped_in_a_copy(writer: Child, owner: Worker) -> None:
    """``writer`` has written the first of three pages and is stopped."""
    writer.connect(owner)
    writer.order(do="write", peer="owner", pieces=3, stop=True)
    wait_for(lambda: writer.is_stopped)
    assert (owner.pool[0] == FILL).all()
    assert not owner.pool[1:].any()


def test_a_writer_stopped_in_the_middle_of_a_copy_is_barred_only_when_it_has_finished(owner: Worker) -> None:
    with child("writer") as writer:
        stopped_in_a_copy(writer, owner)
        # However often it is asked: nothing but the writer's end or its word changes the answer.
        assert not any(owner.transport.bar("writer") for _ in range(1000))
        assert owner.transport.bar("another"), "one copier holds up no other"
        os.kill(writer.process.pid, signal.SIGCONT)
        assert writer.answer() is None
        assert (owner.pool[:3] == FILL).all()
        assert owner.transport.bar("writer")
        owner.pool[:] = 0
        writer.order(do="write", peer="owner", pieces=3)
        assert "lease" in writer.answer()
        assert not owner.pool.any(), "a barred writer has written"
        owner.transport.admit("writer")
        writer.order(do="write", peer="owner", pieces=3)
        assert writer.answer() is None
        assert (owner.pool[:3] == FILL).all()


def test_a_writer_that_connects_while_it_is_barred_writes_nothing(owner: Worker) -> None:
    assert owner.transport.bar("writer")
    with child("writer") as writer:
        writer.connect(owner)
        writer.order(do="write", peer="owner", pieces=1)
        assert "lease" in writer.answer()
        assert not owner.pool.any()


def test_a_writer_killed_in_the_middle_of_a_copy_can_be_barred(owner: Worker) -> None:
    with child("writer") as writer:
        stopped_in_a_copy(writer, owner)
        assert not owner.transport.bar("writer")
        writer.process.kill()
        wait_for(lambda: owner.transport.bar("writer"))
        assert not owner.pool[1:].any()


def test_posts_to_a_process_that_was_killed_fail(owner: Worker) -> None:
    with child("other") as other:
        owner.transport.add_peer(other.metadata)
        assert owner.move(TransferOp.READ, "other", [0, 5]) is None
        assert (owner.pool[[0, 5]] == FILL).all()
        other.process.kill()
        other.process.wait()
        for op, notify in ((TransferOp.WRITE, None), (TransferOp.READ, None), (TransferOp.WRITE, b"late")):
            assert "is gone" in owner.move(op, "other", [1], notify)
        owner.transport.remove_peer("other")
        with pytest.raises(TransferError):
            owner.transport.add_peer(other.metadata)


def test_nothing_is_left_of_a_killed_process(owner: Worker) -> None:
    gc.collect()  # what earlier tests have left is not counted
    descriptors = open_descriptors()
    for _ in range(3):
        with child("other") as other:
            owner.transport.add_peer(other.metadata)
            name = ShmAgent.of(other.metadata).pool_name
            assert name in Path("/proc/self/maps").read_text()
            other.process.kill()
            other.process.wait()
            owner.transport.remove_peer("other")
            assert name not in Path("/proc/self/maps").read_text()
    assert open_descriptors() == descriptors


def test_a_refused_peer_and_a_closed_transport_leave_no_descriptor_and_no_mapping(owner: Worker) -> None:
    gc.collect()  # what earlier tests have left is not counted
    before = open_descriptors()
    first, second = Worker("first"), Worker("second")
    agent = ShmAgent.of(second.metadata)
    for wrong in (
        {"pool_name": "kvrelay-0000"},
        {"pool_bytes": agent.pool_bytes + PAGE},
        {"pool_fd": agent.mailbox_fd},
        {"mailbox_fd": agent.pool_fd},
        {"mailbox_inode": agent.mailbox_inode + 1},
        {"offset": PAGE},
        {"offset": -PAGE},
        {"pid": 2**22 + 1},
        {"host": msgspec.structs.replace(agent.host, boot_id="another")},
        {"host": msgspec.structs.replace(agent.host, pid_namespace=1)},
        {"host": msgspec.structs.replace(agent.host, uid=agent.host.uid + 1)},
    ):
        blob = msgspec.msgpack.encode(msgspec.structs.replace(agent, **wrong))
        with pytest.raises(TransferError):
            first.transport.add_peer(msgspec.structs.replace(second.metadata, agent=blob))
    first.transport.add_peer(second.metadata)
    assert first.move(TransferOp.WRITE, "second", [0]) is None
    names = (first.memory.name, second.memory.name)
    for worker in (first, second):
        worker.close()
    del first, second, worker
    gc.collect()
    assert open_descriptors() == before
    maps = Path("/proc/self/maps").read_text()
    assert not [name for name in names if name in maps]


def test_notifications_that_do_not_fit_wait_until_they_are_read(owner: Worker) -> None:
    sender = Worker("sender")
    sender.transport.add_peer(owner.metadata)
    payloads = [np.random.default_rng(seed).bytes(MAX_NOTIFY_BYTES) for seed in range(3)]
    handles = [sender.transport.post(TransferOp.WRITE, "owner", NO_PIECES, payload) for payload in payloads]
    completed: list[int] = []
    received: list[bytes] = []

    def poll() -> bool:
        completed.extend(each.handle for each in sender.transport.poll()[0])
        received.extend(owner.transport.poll()[1])
        return len(received) == 3 and len(completed) == 3

    assert sender.transport.num_pending > 0
    wait_for(poll)
    assert received == payloads
    assert completed == handles
    sender.transport.post(TransferOp.WRITE, "owner", NO_PIECES, payloads[0])
    sender.transport.post(TransferOp.WRITE, "owner", NO_PIECES, payloads[0])
    sender.transport.remove_peer("owner")
    assert [each.error for each in sender.transport.poll()[0] if each.error is not None]
    assert sender.transport.num_pending == 0
    sender.close()


def test_senders_share_a_mailbox_and_a_half_sent_message_disturbs_no_one() -> None:
    mailbox = Mailbox(PIPE_BYTES)
    senders = [Sender(os.open(f"/proc/self/fd/{mailbox.write_fd}", os.O_WRONLY | os.O_NONBLOCK)) for _ in range(3)]
    long = [bytes([index]) * (PIPE_BYTES // 2) for index in range(3)]
    senders[2].send(0, b"x" * PIPE_BYTES)
    senders[2].flush()
    senders[2].close()
    received: list[bytes] = []
    for handle in range(2):
        for index in range(2):
            senders[index].send(handle, long[index])
    while len(received) < 4:
        for index in range(2):
            senders[index].flush()
        received += mailbox.receive()
    assert sorted(received) == sorted(long[:2] * 2)
    os.write(mailbox.write_fd, b"rubbish" * 20)
    assert mailbox.receive() == []
    senders[0].send(9, b"after")
    senders[0].flush()
    assert mailbox.receive() == [b"after"]
    mailbox.close()
    assert not senders[0].has_reader
    for sender in senders[:2]:
        sender.close()


def test_the_host_is_told_apart_by_boot_and_namespace(tmp_path: Path) -> None:
    here = this_host()
    assert here is not None
    assert here == this_host()
    assert here.uid == os.geteuid()
    assert this_host(tmp_path) is None, "a host that cannot be told is no host"
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").touch()
    boot_id = tmp_path / "proc/sys/kernel/random/boot_id"
    boot_id.write_text("")
    assert this_host(tmp_path) is None
    boot_id.write_text("b\n")
    other = this_host(tmp_path)
    assert other is not None
    assert (other.boot_id, other.machine_id) == ("b", "")
    assert other != here


def test_auto_uses_shared_memory_here_and_the_other_transport_elsewhere() -> None:
    fabric = LoopbackFabric()
    memories = [SharedPoolMemory() for _ in range(2)]
    ends = [auto_end(name, memory, fabric) for name, memory in zip("ab", memories, strict=True)]
    (first, _), (second, metadata) = ends
    first.add_peer(metadata)
    assert first.route("b") == "shm"
    agents = msgspec.msgpack.decode(metadata.agent, type=dict[str, bytes])
    there = msgspec.structs.replace(
        msgspec.msgpack.decode(agents["shm"], type=ShmAgent), host=msgspec.structs.replace(this_host(), boot_id="x")
    )
    agents["shm"] = msgspec.msgpack.encode(there)
    first.add_peer(msgspec.structs.replace(metadata, agent=msgspec.msgpack.encode(agents)))
    assert first.route("b") == "loopback"
    with pytest.raises(TransferError):
        first.add_peer(msgspec.structs.replace(metadata, agent=msgspec.msgpack.encode({"shm": agents["shm"]})))
    assert not first.has_peer("b")
    with pytest.raises(TransferError):
        first.add_peer(msgspec.structs.replace(metadata, agent=msgspec.msgpack.encode({})))
    for transport in (first, second):
        transport.close()
    for memory in memories:
        memory.close()


class RefusingTransport(LoopbackTransport):
    """Its peer refuses one post."""

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        return [PostEnd(3, "no such grant is open", is_refused=True)], []


def test_auto_passes_on_that_a_post_was_refused() -> None:
    transport = AutoTransport("a", {"loopback": RefusingTransport(LoopbackFabric(), "a")})
    pool = np.zeros(PAGE, dtype=np.uint8)
    transport.register(MemoryRegion(pool.ctypes.data, pool.nbytes))
    completions, _ = transport.poll()
    assert completions == [PostEnd(3, "no such grant is open", is_refused=True)]
    transport.close()


def auto_end(name: str, memory: SharedPoolMemory, fabric: LoopbackFabric) -> tuple[AutoTransport, KvMetadata]:
    choices = {"shm": ShmTransport(memory, name), "loopback": LoopbackTransport(fabric, name)}
    transport = AutoTransport(name, choices)
    allocate = pool_allocator(TransferConfig(transport="auto"), memory)
    pool = np.frombuffer(allocate(PAGE * NUM_PAGES), dtype=np.uint8)
    region = MemoryRegion(pool.ctypes.data, pool.nbytes)
    agent = transport.register(region)
    # The loopback transport takes no blob but the worker's name.
    return transport, KvMetadata(name, 0, "auto", agent, region.address, region.num_bytes, PAGE, "cpu", 0, "same")


def test_no_shared_memory_is_refused_by_shm_and_logged_by_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", refuse)
    before = open_descriptors()
    config = TransferConfig(transport="shm")
    with pytest.raises(ConfigError, match="No space left"):
        pool_allocator(config, shared_memory(config))(PAGE)
    memory = SharedPoolMemory()
    transport, metadata = auto_end("a", memory, LoopbackFabric())
    assert set(msgspec.msgpack.decode(metadata.agent)) == {"loopback"}
    assert "No space left" in caplog.text
    transport.close()
    assert open_descriptors() == before


def test_a_pool_that_is_not_in_shared_memory_is_refused() -> None:
    memory = SharedPoolMemory()
    pool = np.zeros(PAGE, dtype=np.uint8)
    for region in (MemoryRegion(pool.ctypes.data, pool.nbytes), MemoryRegion(pool.ctypes.data, pool.nbytes, "cuda")):
        with pytest.raises(FatalError, match="shared memory"):
            ShmTransport(memory, "w").register(region)
    for name in ("shm", "auto", "loopback"):
        with pytest.raises(ConfigError):
            build_transport(TransferConfig(transport=name), "w")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("total_bytes", [STREAM_FROM_BYTES // 4, STREAM_FROM_BYTES * 3])
def test_pieces_of_any_length_and_alignment_are_copied_exactly(total_bytes: int) -> None:
    """Small posts through the caches, large ones past them."""
    rng = np.random.default_rng(total_bytes)
    lengths = rng.choice([1, 63, 64, 65, 1023, 1024, 1100, 4096, 5000, 16384], 200)
    while lengths.sum() < total_bytes:
        lengths = np.append(lengths, rng.integers(1000, 100_000))
    order = rng.permutation(len(lengths))
    gaps = rng.integers(1, 100, len(lengths))
    read_offsets = np.cumsum(lengths + gaps) - lengths
    write_offsets = np.empty_like(read_offsets)
    write_offsets[order] = np.cumsum((lengths + gaps)[order]) - lengths[order]
    size = int((lengths + gaps).sum())
    source = rng.integers(1, 256, size, dtype=np.uint8)
    target, expected = np.zeros(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    for to, of, length in zip(write_offsets, read_offsets, lengths, strict=True):
        expected[to : to + length] = source[of : of + length]
    copy_pieces(target.ctypes.data, write_offsets, source.ctypes.data, read_offsets, lengths)
    np.testing.assert_array_equal(target, expected)


class CountedTransport(ShmTransport):
    num_polls = 0

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        self.num_polls += 1
        return super().poll()


@contextmanager
def running(worker_id: str) -> Iterator[tuple[TransferThread, CountedTransport, KvMetadata]]:
    """A transfer thread with a shared pool."""
    memory = SharedPoolMemory()
    pool = np.frombuffer(memory.allocate(PAGE), dtype=np.uint8)
    transport = CountedTransport(memory, worker_id)
    thread = TransferThread(transport, TransferConfig(transport="shm"))
    thread.start()
    try:
        agent = thread.register(MemoryRegion(pool.ctypes.data, pool.nbytes)).result(WAIT_S)
        yield thread, transport, KvMetadata(worker_id, 0, "shm", agent, pool.ctypes.data, PAGE, PAGE, "cpu", 0, "same")
    finally:
        thread.close()
        memory.close()


def test_an_open_hand_off_is_not_polled_for_and_a_notification_wakes_its_thread_up() -> None:
    with running("reader") as (reader, transport, metadata), running("writer") as (writer, _, _):
        notified: queue.Queue[bytes] = queue.Queue()
        reader.on_notification(notified.put)
        reader.open_handoff()
        writer.add_peer(metadata).result(WAIT_S)
        for number in range(3):
            time.sleep(0.05)  # a hundred poll intervals
            done: Future[str | None] = Future()
            payload = b"n%d" % number
            writer.submit(TransferOp.WRITE, "reader", NO_PIECES, payload, on_done=done.set_result)
            assert done.result(WAIT_S) is None
            assert notified.get(timeout=WAIT_S) == payload
        reader.add_peer(metadata).result(WAIT_S)  # commands still come through
        assert transport.num_polls < 15
