"""The peer-to-peer transport among several workers: bounded, evictable, and unharmed by peers that die, stop or lie."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from tests.patience import HAS_IPV6, stop
from tests.transfer.p2p.ends import PAGE, End, page_pieces

from kvrelay.config import TransferConfig
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.core.workers import KvMetadata
from kvrelay.core.zmq_keys import new_curve_keys
from kvrelay.errors import ConfigError, FatalError, TransferError
from kvrelay.transfer.p2p.address import P2pAddress
from kvrelay.transfer.p2p.messages import (
    Accept,
    Close,
    CommunicatorMade,
    Connect,
    Get,
    Landed,
    Message,
    PeerHello,
    Put,
    Rendezvous,
    Tell,
    Unknown,
    decode,
    encode,
)
from kvrelay.transfer.p2p.transport import P2pAgent
from kvrelay.transfer.values import TransferOp

CONFIG = TransferConfig(transport="p2p", transfer_timeout_s=60.0)


@pytest.fixture
def make() -> Iterator[Callable[..., End]]:
    """Ends in this process. Afterwards each is whole, and has given its threads and descriptors back."""
    before = _held()
    ends: list[End] = []

    def make_end(worker_id: str, config: TransferConfig = CONFIG, **more: object) -> End:
        ends.append(End(worker_id, config, **more))
        return ends[-1]

    yield make_end
    for end in ends:
        end.transport.check_integrity()
        end.close()
    deadline = time.monotonic() + 60
    while _held() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _held() <= before


def _held() -> tuple[int, int]:
    """Sockets of this process, and threads of the transport."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("p2p-")]
    return sum(link.startswith("socket:") for link in links), len(threads)


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")
def test_workers_meet_over_ipv6(make: Callable[..., End]) -> None:
    p, d = (make(name, address=P2pAddress("::1", is_guarded=False)) for name in ("p", "d"))
    assert p.outcome(p.write(d, [1], [2])) is None
    np.testing.assert_array_equal(d.pool[2], p.pool[1])


@pytest.mark.parametrize("param", ["kv_buffer_size", "p2p_pool_bytes"])
def test_memory_for_messages_that_the_host_has_not_is_refused_at_start(param: str) -> None:
    with pytest.raises(ConfigError, match=rf"{param}: the host cannot map 1048576\.0TiB for messages"):
        End("p", replace(CONFIG, **{param: 2**60}))


def test_more_peers_than_connections_take_turns(make: Callable[..., End]) -> None:
    hub = make("hub", replace(CONFIG, p2p_max_connections=2))
    peers = [make(f"peer{number}") for number in range(5)]
    for turn in range(3):
        for peer in peers:
            hub.pool[turn] = turn + 1
            assert hub.outcome(hub.write(peer, [turn], [turn + 7])) is None
            np.testing.assert_array_equal(peer.pool[turn + 7], hub.pool[turn])
            assert len(hub.node.shared.table.pairs) <= 2
    counters = hub.transport.p2p_counters()
    assert (counters.num_connections, counters.num_evicted, counters.num_failed) == (15, 13, 0)


def test_an_acceptor_that_has_no_connection_left_lets_others_wait(make: Callable[..., End]) -> None:
    """The first message holds the only communicator while it waits for room."""
    full = make("full", replace(CONFIG, p2p_max_connections=1, kv_buffer_size=PAGE, p2p_pool_bytes=0))
    first, second = (make(f"peer{number}", replace(CONFIG, send_type="GET")) for number in range(2))
    taken = full.node.control.ask(lambda: full.node.shared.rooms.room.reserve(PAGE))
    waiting = first.write(full, [1], [1])
    first.until(lambda: full.node.shared.rooms.num_waiting == 1)
    refused = second.write(full, [2], [2])
    second.until(lambda: full.transport.p2p_counters().num_busy > 0)
    full.node.control.ask(lambda: full.node.shared.rooms.release(taken))
    assert first.outcome(waiting) is None
    assert second.outcome(refused) is None
    np.testing.assert_array_equal(full.pool[1], first.pool[1])
    np.testing.assert_array_equal(full.pool[2], second.pool[2])
    assert full.transport.p2p_counters().num_evicted == 1


def test_an_idle_connection_is_closed_and_made_again(make: Callable[..., End]) -> None:
    p, d = make("p", replace(CONFIG, p2p_idle_s=0.1)), make("d")
    for page in (1, 2):
        assert p.outcome(p.write(d, [page], [page])) is None
        p.until(lambda: not p.node.shared.table.pairs and not d.node.shared.table.pairs)
        p.until(lambda: not any(thread.name in ("p2p-send", "p2p-receive") for thread in threading.enumerate()))
    assert p.transport.p2p_counters().num_connections == 2
    np.testing.assert_array_equal(d.pool[1:3], p.pool[1:3])


def test_both_directions_at_once(make: Callable[..., End]) -> None:
    a, b = make("a"), make("b")
    a.transport.add_peer(b.metadata)
    b.transport.add_peer(a.metadata)
    expected = b.pool[16:32].copy()
    handles = [
        (end, end.transport.post(op, peer.worker_id, page_pieces(local, remote)))
        for end, peer, op, local, remote in (
            (a, b, TransferOp.WRITE, list(range(8)), list(range(8))),
            (b, a, TransferOp.WRITE, list(range(8, 16)), list(range(8, 16))),
            (a, b, TransferOp.READ, list(range(16, 32)), list(range(16, 32))),
        )
    ]
    assert [end.outcome(handle) for end, handle in handles] == [None] * 3
    np.testing.assert_array_equal(b.pool[:8], a.pool[:8])
    np.testing.assert_array_equal(a.pool[8:16], b.pool[8:16])
    np.testing.assert_array_equal(a.pool[16:32], expected)


def test_more_messages_than_torch_has_tags(make: Callable[..., End]) -> None:
    p, d = make("p"), make("d")
    p.node.control.ask(lambda: setattr(p.node.initiator, "_next_number", 2**31 - 3))
    for page in range(1, 5):
        assert p.outcome(p.write(d, [page], [page])) is None
    np.testing.assert_array_equal(d.pool[1:5], p.pool[1:5])


def test_a_port_that_is_taken_is_refused_at_start(make: Callable[..., End]) -> None:
    first = make("first")
    port = int(first.node.control.address.rsplit(":", 1)[1])
    with pytest.raises(FatalError, match=str(port)):
        End("second", replace(CONFIG, kv_port=port))


# -- peers that die, stop or lie ---------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[tuple[KvMetadata, subprocess.Popen[bytes]]]:
    """A worker in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("ends.py")), "child", msgspec.json.encode(CONFIG).decode()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert process.stdin is not None
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line
    yield msgspec.msgpack.decode(base64.b64decode(line), type=KvMetadata), process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_peer_that_is_stopped_and_one_that_is_killed_cost_their_transfers_and_no_others(
    make: Callable[..., End], child: tuple[KvMetadata, subprocess.Popen[bytes]]
) -> None:
    (metadata, process), p, d = child, make("p"), make("d")
    assert p.outcome(p.write(metadata, [1], [1])) is None
    stop(process.pid)
    lost = p.write(metadata, list(range(16)), list(range(16)))
    assert p.outcome(p.write(d, [1], [2])) is None, "one peer that stands still holds no other up"
    p.transport.remove_peer("child")
    p.poll()
    assert p.completed[lost] is not None, "after remove_peer no post is pending, whatever the peer does"
    p.until(lambda: p.node.initiator.num_open == 0)
    os.kill(process.pid, signal.SIGCONT)
    assert p.outcome(p.write(metadata, [3], [3])) is None
    stop(process.pid)
    more = [p.write(metadata, [page], [page]) for page in range(8)]
    os.kill(process.pid, signal.SIGKILL)
    assert all(p.outcome(handle) is not None for handle in more)
    assert not p.transport.has_peer("child")
    p.until(lambda: p.node.initiator.num_open == 0)
    assert p.node.shared.rooms.room.num_reserved == 0


class Liar:
    """A client of a worker's control port that says what it likes."""

    def __init__(self, target: End, name: str = "liar") -> None:
        agent = P2pAgent.of(target.metadata)
        assert agent is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 60_000
        self.socket.connect(agent.address)
        self.say(PeerHello(name, target.worker_id))

    def say(self, message: Message, payload: bytes | None = None) -> None:
        self.socket.send_multipart([encode(message), *([] if payload is None else [payload])])

    def hear(self) -> Message:
        return decode(self.socket.recv_multipart()[0])

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def liar(make: Callable[..., End]) -> Iterator[tuple[End, Liar]]:
    target = make("target", replace(CONFIG, kv_buffer_size=2 * PAGE, p2p_pool_bytes=0))
    liar = Liar(target)
    yield target, liar
    liar.close()


def pages(*pages: int, size: int = PAGE) -> dict[str, object]:
    """Fields of a Put or Get."""
    offsets, lengths = np.array(pages, "<i8") * PAGE, np.full(len(pages), size, "<i8")
    return {"num_bytes": size * len(pages), "offsets": offsets.tobytes(), "lengths": lengths.tobytes()}


def test_data_that_never_comes_costs_the_liar_its_communicator(
    liar: tuple[End, Liar], make: Callable[..., End]
) -> None:
    (target, liar_end), honest = liar, make("honest")
    liar_end.say(Connect("lie"))
    assert liar_end.hear() == CommunicatorMade("lie")
    # Only this communicator's deadline is short: an honest peer may be slow on a busy machine.
    target.node.shared.table.pairs["lie"].timeout_s = 0.5
    liar_end.say(Put("lie", 1, **pages(1)))
    assert liar_end.hear() == Accept(1)
    # The rest of the room is for others meanwhile.
    assert honest.outcome(honest.write(target, [5], [5])) is None
    honest.until(lambda: target.transport.p2p_counters().num_failed == 1)
    honest.until(lambda: target.node.shared.rooms.room.num_reserved == 0)
    assert honest.outcome(honest.write(target, [6], [6])) is None


@pytest.mark.parametrize(
    "fields",
    [
        pages(1000),
        pages(31, size=PAGE + 1),
        {"num_bytes": PAGE, "offsets": b"", "lengths": b""},
        {**pages(1), "num_bytes": PAGE - 1},
        {**pages(1), "offsets": b"\0" * 7},
        {**pages(1), "offsets": np.array([-1], "<i8").tobytes()},
        {**pages(1), "lengths": np.array([0], "<i8").tobytes()},
        {**pages(1, 2), "lengths": np.array([2**63 - 1, 2**63 - 1], "<i8").tobytes()},
        {**pages(1), "offsets": np.array([2**63 - 8], "<i8").tobytes()},
    ],
)
def test_pieces_that_cannot_be_are_refused(liar: tuple[End, Liar], fields: dict[str, object]) -> None:
    target, liar_end = liar
    before = target.pool.copy()
    liar_end.say(Connect("lie"))
    liar_end.hear()
    for pair in ("lie", ""):
        for kind in (Put, Get):
            liar_end.say(kind(pair, 1, **fields), b"x" * 100)
            answer = liar_end.hear()
            assert isinstance(answer, Landed)
            assert answer.error
    np.testing.assert_array_equal(target.pool, before)
    assert target.node.responder.num_open == 0


def test_a_small_message_with_other_bytes_than_it_names_is_refused(liar: tuple[End, Liar]) -> None:
    target, liar_end = liar
    before = target.pool.copy()
    for payload in (b"", b"x" * 99, b"x" * 101, None):
        liar_end.say(Put("", 1, **pages(1, size=100)), payload)
        answer = liar_end.hear()
        assert isinstance(answer, Landed)
        assert answer.error
    np.testing.assert_array_equal(target.pool, before)


def test_without_a_grant_nothing_is_written_and_nothing_is_read(make: Callable[..., End]) -> None:
    target = make("target", address=P2pAddress())
    liar_end = Liar(target)
    before = target.pool.copy()
    liar_end.say(Connect("lie"))
    liar_end.hear()
    for message in (Put("lie", 1, **pages(1)), Get("lie", 2, **pages(1)), Get("", 3, **pages(1, size=100))):
        liar_end.say(message)
        answer = liar_end.hear()
        assert isinstance(answer, Landed)
        assert answer.is_refused
    liar_end.say(Put("", 4, **pages(1, size=100)), b"x" * 100)
    assert liar_end.hear() == Landed(4, "no such grant is open", True)
    np.testing.assert_array_equal(target.pool, before)
    assert target.transport.p2p_counters().num_refused == 4
    liar_end.close()


def test_an_earlier_incarnation_is_not_meant(make: Callable[..., End]) -> None:
    target = make("target")
    liar_end = Liar(target)
    liar_end.say(PeerHello("liar", "an-earlier-worker-at-this-port"))
    liar_end.say(Connect("x"))
    assert liar_end.hear() == CommunicatorMade("x"), "the first PeerHello still counts"
    stale = Liar(target, "stale")
    stale.say(PeerHello("stale", "target-of-yesterday"))
    target.until(lambda: target.transport.p2p_counters().num_dropped_frames == 2)
    liar_end.close()
    stale.close()


# -- keys --------------------------------------------------------------------------------------------------------------


def test_only_workers_whose_keys_are_known_get_in(make: Callable[..., End]) -> None:
    addresses = [P2pAddress(keys=new_curve_keys(), is_guarded=False) for _ in range(3)]
    d, p, stranger = (make(name, address=address) for name, address in zip("dps", addresses, strict=True))
    d.transport.learn("p", addresses[1].keys.public.decode())
    assert p.outcome(p.write(d, [1], [2])) is None
    np.testing.assert_array_equal(d.pool[2], p.pool[1])
    before = d.pool.copy()
    kept_out = stranger.write(d, [3], [3])
    # It is let in as soon as discovery tells of it: libzmq asks again.
    assert p.outcome(p.write(d, [1], [4])) is None
    stranger.poll()
    assert kept_out not in stranger.completed
    np.testing.assert_array_equal(d.pool[3], before[3])
    d.transport.learn("s", addresses[2].keys.public.decode())
    assert stranger.outcome(kept_out) is None


def test_a_key_that_was_replaced_admits_no_one(make: Callable[..., End]) -> None:
    addresses = [P2pAddress(keys=new_curve_keys(), is_guarded=False) for _ in range(3)]
    d, p, q = (make(name, address=address) for name, address in zip("dpq", addresses, strict=True))
    keys = [address.keys.public.decode() for address in addresses]
    d.transport.learn("q", keys[2])
    for key in (keys[1], new_curve_keys().public.decode()):
        d.transport.learn("p", key)
    kept_out = p.write(d, [3], [3])
    assert q.outcome(q.write(d, [1], [2])) is None, "the key of another worker stays"
    p.poll()
    assert kept_out not in p.completed
    d.transport.learn("p", keys[1])
    assert p.outcome(kept_out) is None


def test_a_worker_cannot_speak_in_the_name_of_another(make: Callable[..., End]) -> None:
    addresses = [P2pAddress(keys=new_curve_keys(), is_guarded=False) for _ in range(2)]
    d, p = make("d", address=addresses[0]), make("p", address=addresses[1])
    d.transport.learn("somebody-else", addresses[1].keys.public.decode())
    p.write(d, [1], [2])
    d.until(lambda: d.transport.p2p_counters().num_dropped_frames > 0)
    p.until(lambda: not p.transport.has_peer("d"))


def test_an_impossible_address_is_refused(make: Callable[..., End]) -> None:
    p, d = make("p"), make("d")
    agent = P2pAgent.of(d.metadata)
    broken = msgspec.msgpack.encode(msgspec.structs.replace(agent, address="nowhere"))
    with pytest.raises(TransferError):
        p.transport.add_peer(msgspec.structs.replace(d.metadata, agent=broken))


# -- fuzz --------------------------------------------------------------------------------------------------------------


def frames_of(rng: np.random.Generator) -> list[bytes]:
    """Something like a control message: valid, damaged, cut off, or random; sometimes with a payload."""
    number = int(rng.integers(0, 4))
    name = ("lie", "", "other")[int(rng.integers(0, 3))]
    some = pages(*rng.integers(-1, 33, int(rng.integers(0, 4))).tolist(), size=int(rng.integers(-1, 3)))
    try:
        message: Message = (
            PeerHello("liar", "target"),
            Connect(f"{name}{number}"),
            Rendezvous(name, "0/1", rng.bytes(number)),
            Close(name),
            Put(name, number, **some, waits=bool(number % 2)),
            Get(name, number, **some),
            Tell(number, b"x"),
            Landed(number, "no"),
            Accept(number),
            Unknown(),
        )[int(rng.integers(0, 10))]
        frame = bytearray(encode(message))
    except (msgspec.ValidationError, OverflowError):
        frame = bytearray(rng.bytes(20))
    kind = int(rng.integers(0, 5))
    if kind == 0:
        frame = bytearray(rng.bytes(int(rng.integers(0, 60))))
    elif kind == 1:
        frame[int(rng.integers(0, len(frame)))] ^= 1 << int(rng.integers(0, 8))
    elif kind == 2:
        frame = frame[: int(rng.integers(0, len(frame)))]
    payload = [rng.bytes(int(rng.integers(0, 5)))] if rng.integers(0, 3) == 0 else []
    return [bytes(frame), *payload, *([b"", b""] if rng.integers(0, 50) == 0 else [])]


def fuzz(make: Callable[..., End], num_frames: int) -> None:
    target, honest = make("target", address=P2pAddress()), make("honest")
    before, rng = target.pool.copy(), np.random.default_rng(12)
    liar_end = Liar(target)
    for number in range(num_frames):
        liar_end.socket.send_multipart(frames_of(rng))
        if number % 200 == 0:
            liar_end.say(Tell(999_999_999, b"in step"))
            while liar_end.hear() != Landed(999_999_999):
                pass
    np.testing.assert_array_equal(target.pool, before)
    assert target.transport.p2p_counters().num_dropped_frames > num_frames // 4
    assert len(target.node.shared.table.pairs) <= CONFIG.p2p_max_connections
    liar_end.close()
    # An honest worker gets through, with a grant.
    key = RemoteKey("h", 1)
    target.transport.open_window(MemoryWindow(key, 1, "honest", (), (0,), PAGE, PAGE))
    honest.transport.add_peer(target.metadata)
    handle = honest.transport.post(TransferOp.WRITE, "target", page_pieces([1], [0]), b"done", key)
    assert honest.outcome(handle) is None
    np.testing.assert_array_equal(target.pool[0], honest.pool[1])
    target.until(lambda: b"done" in target.payloads)


def test_frames_that_nobody_should_send_break_nothing(make: Callable[..., End]) -> None:
    fuzz(make, 2000)


@pytest.mark.matrix
def test_a_hundred_thousand_frames_break_nothing(make: Callable[..., End]) -> None:
    fuzz(make, 100_000)
