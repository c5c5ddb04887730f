"""NIXL between two processes: equality of bytes, notifications behind their bytes, and a peer that is killed."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from tests.patience import stop

from kvrelay.config import TransferConfig
from kvrelay.core.layout import MemoryRegion, paged_kv
from kvrelay.core.workers import KvMetadata
from kvrelay.transfer import TransferOp, TransferThread, block_pieces, build_transport
from kvrelay.transfer.nixl import NixlTransport

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="NIXL is not installed")

LAYOUT = paged_kv(num_layers=2, num_kv_heads=2, block_size=16, head_dim=32, dtype="bfloat16")
NUM_BLOCKS = 256
CONFIG = TransferConfig(transfer_timeout_s=60.0)


class Child:
    """``nixl_worker.py`` in a process of its own."""

    def __init__(self, worker_id: str, config: TransferConfig) -> None:
        script = Path(__file__).with_name("nixl_worker.py")
        # Without what a transport of this process has set for UCX.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        self.process = subprocess.Popen(
            [sys.executable, str(script), worker_id, msgspec.json.encode(config).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, "OMP_NUM_THREADS": "1"},
        )
        self.hello = self.hear()
        self.metadata = msgspec.msgpack.decode(base64.b64decode(str(self.hello["metadata"])), type=KvMetadata)

    def hear(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(60)}"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def tell(self, **order: object) -> dict[str, object]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class Parent:
    """The prefill side, here."""

    def __init__(self, config: TransferConfig = CONFIG) -> None:
        self.pool = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
        self.thread = TransferThread(build_transport(config, "parent"), config)
        self.thread.start()
        self.region = MemoryRegion(self.pool.ctypes.data, self.pool.nbytes)
        self.agent = self.thread.register(self.region).result(60)
        self.ended: list[str | None] = []

    def metadata(self) -> str:
        metadata = KvMetadata(
            "parent",
            0,
            "nixl",
            self.agent,
            self.region.address,
            self.region.num_bytes,
            LAYOUT.block_bytes,
            "cpu",
            0,
            "k",
        )
        return base64.b64encode(msgspec.msgpack.encode(metadata)).decode()

    def submit(
        self, op: TransferOp, peer: str, local: list[int], remote: list[int], notify: bytes | None = None
    ) -> None:
        pieces = block_pieces(LAYOUT, local, remote)
        self.thread.submit(op, peer, pieces, notify, on_done=self.ended.append)

    def wait(self, count: int, limit_s: float = 60.0) -> list[str | None]:
        end = time.monotonic() + limit_s
        while len(self.ended) < count:
            assert time.monotonic() < end, f"{len(self.ended)} of {count} transfers ended"
            time.sleep(0.0005)
        return self.ended

    def digest(self, blocks: list[int]) -> str:
        return xxhash.xxh3_64_hexdigest(self.pool[blocks].tobytes())


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Parent, Child]]]:
    made: list[tuple[Parent, Child]] = []

    def make(config: TransferConfig = CONFIG) -> tuple[Parent, Child]:
        child = Child("child", config)
        parent = Parent(config)
        parent.thread.add_peer(child.metadata).result(60)
        made.append((parent, child))
        return parent, child

    yield make
    for parent, child in made:
        parent.thread.close()
        child.end()


@pytest.mark.parametrize("ucx_tls", ["auto", "tcp,self"])
def test_blocks_cross_in_both_directions(start: Callable[..., tuple[Parent, Child]], ucx_tls: str) -> None:
    parent, child = start(TransferConfig(transfer_timeout_s=60.0, ucx_tls=ucx_tls))
    assert child.hello["torch"] is False, "the transfer room must not import torch"
    assert child.hello["hooked"] is (ucx_tls != "auto"), "our own transports need no memory hooks; others may"
    assert child.hello["keeps_signals"] is True, "SIGHUP ends a worker; to UCX it means to log at level debug"
    rng = np.random.default_rng(5)
    for round_ in range(8):
        count = int(rng.integers(1, NUM_BLOCKS))
        local, remote = (rng.permutation(NUM_BLOCKS)[:count].tolist() for _ in range(2))
        parent.pool[:] = rng.integers(0, 256, parent.pool.shape, dtype=np.uint8)
        parent.submit(TransferOp.WRITE, "child", local, remote, json.dumps(remote).encode())
        notified = child.hear()
        assert notified == {"notified": remote, "digest": parent.digest(local)}
        child.tell(do="fill", seed=round_)
        parent.submit(TransferOp.READ, "child", local, remote)
        assert parent.wait(2 * round_ + 2)[-1] is None
        assert child.tell(do="digest", blocks=remote)["digest"] == parent.digest(local)


def test_a_thousand_small_writes_arrive_before_the_notification_that_follows(
    start: Callable[..., tuple[Parent, Child]],
) -> None:
    parent, child = start()
    for index in range(1000):
        parent.submit(TransferOp.WRITE, "child", [index % NUM_BLOCKS], [(index * 7) % NUM_BLOCKS])
    blocks = [(index * 7) % NUM_BLOCKS for index in range(1000 - NUM_BLOCKS, 1000)]
    parent.submit(TransferOp.WRITE, "child", [], [], json.dumps(blocks).encode())
    assert parent.wait(1001) == [None] * 1001
    sources = [index % NUM_BLOCKS for index in range(1000 - NUM_BLOCKS, 1000)]
    assert child.hear() == {"notified": blocks, "digest": parent.digest(sources)}
    row = parent.thread.stats().peers[0]
    assert (row.num_transfers, row.num_errors, row.num_pieces) == (1001, 0, 1000)


def test_both_sides_may_write_at_once(start: Callable[..., tuple[Parent, Child]]) -> None:
    parent, child = start()
    parent.thread.open_handoff()
    child.tell(do="fill", seed=9)
    child.tell(do="connect", metadata=parent.metadata())
    for _ in range(20):
        parent.submit(TransferOp.WRITE, "child", [1, 2, 3], [101, 102, 103])
    answer = child.tell(do="write", to="parent", local=[200, 201], remote=[8, 9])
    assert answer == {"written": None}
    assert parent.wait(20) == [None] * 20
    assert child.tell(do="digest", blocks=[101, 102, 103])["digest"] == parent.digest([1, 2, 3])
    assert child.tell(do="digest", blocks=[200, 201])["digest"] == parent.digest([8, 9])


def test_a_killed_peer_ends_every_transfer_with_an_error(start: Callable[..., tuple[Parent, Child]]) -> None:
    parent, child = start()
    parent.submit(TransferOp.WRITE, "child", [1], [2], b"[2]")
    assert parent.wait(1) == [None]
    for _ in range(200):
        parent.submit(TransferOp.WRITE, "child", list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS)))
    child.process.send_signal(signal.SIGKILL)
    child.process.wait(60)
    # From here on nothing may succeed, and nothing may hang or take this process down.
    before = len(parent.wait(201))
    for op in (TransferOp.WRITE, TransferOp.READ):
        parent.submit(op, "child", [1], [2], b"[2]" if op is TransferOp.WRITE else None)
    parent.submit(TransferOp.WRITE, "child", [], [], b"[]")
    errors = parent.wait(before + 3)[before:]
    assert all(error is not None for error in errors)
    parent.thread.remove_peer("child").result(60)
    second = Child("second", CONFIG)
    parent.thread.add_peer(second.metadata).result(60)
    parent.submit(TransferOp.WRITE, "second", [1], [2], b"[2]")
    assert second.hear() == {"notified": [2], "digest": parent.digest([1])}
    assert second.end() == 0


@pytest.mark.parametrize("ucx_tls", ["auto", "tcp,self"])
def test_an_open_hand_off_is_not_polled_for_and_neither_is_a_killed_peer(
    start: Callable[..., tuple[Parent, Child]], ucx_tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_polls = 0
    original = NixlTransport.poll

    def counted(transport: NixlTransport) -> object:
        nonlocal num_polls
        num_polls += 1
        return original(transport)

    monkeypatch.setattr(NixlTransport, "poll", counted)
    parent, child = start(TransferConfig(transfer_timeout_s=60.0, ucx_tls=ucx_tls))
    notified: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    parent.thread.on_notification(notified.put)
    parent.thread.open_handoff()
    child.tell(do="connect", metadata=parent.metadata())
    for block in (1, 2, 3):
        time.sleep(0.1)  # two hundred poll intervals
        assert child.tell(do="write", to="parent", local=[4], remote=[block]) == {"written": None}
        assert notified.get(timeout=60) == b"[%d]" % block
    assert num_polls < 200
    child.process.kill()
    child.process.wait(60)
    end, before = time.monotonic() + 60.0, -1
    while before != num_polls:
        assert time.monotonic() < end, "what is left of the peer keeps the thread awake"
        before = num_polls
        time.sleep(0.2)


def test_a_stopped_peer_runs_into_the_deadline_and_can_be_reconnected(
    start: Callable[..., tuple[Parent, Child]],
) -> None:
    parent, child = start(TransferConfig(transfer_timeout_s=2.0))
    parent.submit(TransferOp.WRITE, "child", [1], [2], b"[2]")
    assert parent.wait(1) == [None]
    assert "notified" in child.hear()
    stop(child.process.pid)
    try:
        parent.submit(TransferOp.WRITE, "child", [3], [4], b"[4]")
        error = parent.wait(2)[1]
    finally:
        child.process.send_signal(signal.SIGCONT)
    assert "deadline" in (error or "")
    parent.submit(TransferOp.WRITE, "child", [5], [6], b"[6]")
    assert parent.wait(3)[2] is None
    heard = child.hear()
    while heard.get("notified") != [6]:
        heard = child.hear()
    assert heard["digest"] == parent.digest([5])


def test_a_process_that_lost_its_peer_exits_cleanly(start: Callable[..., tuple[Parent, Child]]) -> None:
    _, child = start()
    third = Child("third", CONFIG)
    child.tell(do="connect", metadata=base64.b64encode(msgspec.msgpack.encode(third.metadata)).decode())
    assert child.tell(do="write", to="third", local=[1], remote=[2]) == {"written": None}
    third.process.kill()
    third.process.wait(60)
    assert child.tell(do="write", to="third", local=[1], remote=[2])["written"] is not None
    third.end()
    assert child.end() == 0
