"""The ZMQ request plane where sockets matter: killed processes, full queues, foreign bytes, keys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import zmq
from tests.contracts.waiting import eventually

from kvrelay.cli.log_limit import LogLimit
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.messages import AbortRequest, AdminReply, Ping, Pong
from kvrelay.errors import ConfigError, WorkerUnavailableError
from kvrelay.rpc import (
    CurveKeys,
    Heartbeat,
    Peer,
    ZmqRpcClient,
    ZmqRpcServer,
    new_curve_keys,
    shared_context,
    zmq_server,
    zmq_socket,
)
from kvrelay.rpc.wire import Message, encode_message
from kvrelay.rpc.zmq_socket import FAREWELL_FRAME, HIGH_WATER_MARK, READ_BYTES, Endpoint, SocketReader

PATIENT = Heartbeat(interval_s=30.0, timeout_s=120.0)
"""A receiver that is paused for long is not yet given up."""
SELDOM = Heartbeat(interval_s=1000.0, timeout_s=3000.0)
"""What is noticed with these is not noticed by them."""
CHILD_CLIENT = """
import asyncio, sys
from kvrelay.core.messages import Ping
from kvrelay.rpc import ZmqRpcClient
async def main():
    client = ZmqRpcClient(sys.argv[1])
    await client.start()
    client.send(Ping(1))
    await asyncio.sleep(60)
asyncio.run(main())
"""
CHILD_SERVER = """
import asyncio
from kvrelay.rpc import ZmqRpcServer
async def main():
    server = ZmqRpcServer()
    await server.start()
    print(server.address, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def started(server: ZmqRpcServer) -> AsyncIterator[ZmqRpcServer]:
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def connected(client: ZmqRpcClient) -> AsyncIterator[ZmqRpcClient]:
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def spawn(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


def test_a_killed_client_is_gone_without_a_missed_heartbeat() -> None:
    async def scenario() -> None:
        async with started(ZmqRpcServer(heartbeat=SELDOM)) as server:
            heard: list[Peer] = []
            gone: list[Peer] = []
            server.on_message(lambda peer, _: heard.append(peer))
            server.on_peer_gone(gone.append)
            child = spawn(CHILD_CLIENT, server.address)
            try:
                await eventually(lambda: bool(heard))
            finally:
                child.send_signal(signal.SIGKILL)
                child.communicate()
            await eventually(lambda: gone == heard)
            assert server.peers == frozenset()

    asyncio.run(scenario())


def test_a_killed_server_is_noticed_without_a_missed_heartbeat() -> None:
    async def scenario() -> None:
        child = spawn(CHILD_SERVER)
        assert child.stdout is not None
        try:
            address = (await asyncio.to_thread(child.stdout.readline)).strip()
            async with connected(ZmqRpcClient(address, heartbeat=SELDOM)) as client:
                losses: list[str] = []
                client.on_disconnect(lambda: losses.append("lost"))
                child.send_signal(signal.SIGKILL)
                child.wait()
                await eventually(lambda: losses == ["lost"])
                with pytest.raises(WorkerUnavailableError):
                    client.send(Ping(1))
        finally:
            child.kill()
            child.wait()
            child.stdout.close()

    asyncio.run(scenario())


def send_until_full(client: ZmqRpcClient, message: Message) -> int:
    for num_sent in range(10 * HIGH_WATER_MARK):
        try:
            client.send(message)
        except WorkerUnavailableError:
            return num_sent
    pytest.fail("the queue has no end")


def test_queues_are_bounded_and_sending_never_waits() -> None:
    """The other end is stopped (its event loop never runs while we send), so both queues fill up."""

    async def scenario() -> None:
        async with started(ZmqRpcServer()) as server, connected(ZmqRpcClient(server.address)) as client:
            peers: list[Peer] = []
            server.on_message(lambda peer, _: peers.append(peer))
            client.send(Ping(1))
            await eventually(lambda: bool(peers))
            message = AdminReply(1, payload="x" * 2_000)
            num_sent = send_until_full(client, message)
            assert num_sent >= HIGH_WATER_MARK // 2
            answers = [server.send(peers[0], message) for _ in range(3 * HIGH_WATER_MARK)]
            assert answers[0]
            assert not all(answers)
            # What fails ends the connection: none gets through behind a gap.
            assert answers == sorted(answers, reverse=True)

    asyncio.run(scenario())


@pytest.mark.parametrize("curve_keys", [None, new_curve_keys()], ids=["plain", "curve"])
def test_a_send_that_fails_ends_the_connection_for_both(
    monkeypatch: pytest.MonkeyPatch, curve_keys: CurveKeys | None
) -> None:
    """The receiver is paused until the queue towards it is full: it hears what was taken, and then the end."""
    monkeypatch.setattr(zmq_socket, "HIGH_WATER_MARK", 4)
    server_key = curve_keys.public if curve_keys is not None else None

    async def scenario() -> None:
        async with (
            started(ZmqRpcServer(curve_keys=curve_keys, heartbeat=PATIENT)) as server,
            connected(ZmqRpcClient(server.address, server_key=server_key, heartbeat=PATIENT)) as client,
        ):
            peers: list[Peer] = []
            gone: list[Peer] = []
            received: list[Message] = []
            losses: list[int] = []
            server.on_message(lambda peer, _: peers.append(peer))
            server.on_peer_gone(gone.append)
            client.on_disconnect(lambda: losses.append(len(received)))
            client.send(Ping(1))
            await eventually(lambda: bool(peers))
            num_sent = 0
            while server.send(peers[0], AdminReply(num_sent, payload="x" * 100_000)):
                num_sent += 1
                # Let ZMQ's threads, and whoever else is ready, run; without a handler the client reads nothing.
                await asyncio.sleep(0)
            assert not server.send(peers[0], Ping(2))
            await eventually(lambda: gone == peers)
            assert server.peers == frozenset()
            client.send(Ping(3))
            await asyncio.sleep(0.05)
            assert (losses, client.is_connected) == ([], True)
            client.on_message(received.append)
            await eventually(lambda: bool(losses))
            assert losses == [num_sent]
            assert [message.nonce for message in received] == list(range(num_sent))  # type: ignore[union-attr]
            assert (len(peers), gone) == (1, peers)
            with pytest.raises(WorkerUnavailableError):
                client.send(Ping(4))
            await client.close()
            await eventually(lambda: "parting=0" in repr(server))
            # A farewell that had to wait for room is no reason to owe the next one.
            async with connected(ZmqRpcClient(server.address, server_key=server_key, heartbeat=PATIENT)) as other:
                other.on_message(received.append)
                other.on_disconnect(lambda: losses.append(-1))
                other.send(Ping(5))
                await eventually(lambda: len(peers) == 2)
                server.disconnect(peers[1])
                await eventually(lambda: losses[1:] == [-1])

    asyncio.run(scenario())


def test_a_disconnected_peer_that_stays_hears_one_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign client, which does not close its end. What is tried again is tried at once here."""
    monkeypatch.setattr(zmq_server, "FAREWELL_INTERVAL_S", 0.0)

    async def scenario() -> None:
        async with started(ZmqRpcServer()) as server, shared_context() as context:
            peers: list[Peer] = []
            server.on_message(lambda peer, _: peers.append(peer))
            foreign = [context.socket(zmq.DEALER) for _ in range(2)]
            for number, dealer in enumerate(foreign, 1):
                dealer.connect(server.address)
                dealer.send(encode_message(Ping(number)))
                await eventually(lambda: len(peers) == number)  # noqa: B023 - it is awaited here
                server.disconnect(peers[-1])
                await eventually(lambda: bool(dealer.poll(0)))  # noqa: B023
                assert dealer.recv() == FAREWELL_FRAME
            assert foreign[0].poll(0) == 0, "none between the two"
            assert "parting=2" in repr(server)

    asyncio.run(scenario())


def test_clients_that_share_a_context_end_one_by_one_and_share_its_thread() -> None:
    async def scenario() -> None:
        async with started(ZmqRpcServer()) as server, shared_context() as context:

            def echo(peer: Peer, message: Message) -> None:
                server.send(peer, message)

            server.on_message(echo)
            clients = [ZmqRpcClient(server.address, context=context) for _ in range(8)]
            await clients[0].start()
            threads = set(os.listdir("/proc/self/task"))
            for client in clients[1:]:
                await client.start()
            assert set(os.listdir("/proc/self/task")) <= threads
            received: list[Message] = []
            clients[-1].on_message(received.append)
            for client in clients[:-1]:
                await client.close()
            clients[-1].send(Ping(7))
            await eventually(lambda: received == [Ping(7)])
            await clients[-1].close()
        assert context.closed

    asyncio.run(scenario())


def test_a_handler_that_raises_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        async with started(ZmqRpcServer()) as server, connected(ZmqRpcClient(server.address)) as client:
            errors: list[object] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
            received: list[Message] = []

            def handle(_: Peer, message: Message) -> None:
                if isinstance(message, AbortRequest):
                    raise ValueError(message.request_id)
                received.append(message)

            server.on_message(handle)
            for number in range(20):
                client.send(AbortRequest(str(number)))
                client.send(Ping(number))
            await eventually(lambda: len(received) == 20)
            assert len(errors) == 20

    asyncio.run(scenario())


def test_messages_wait_for_a_handler_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with started(ZmqRpcServer()) as server, connected(ZmqRpcClient(server.address)) as client:
            server.on_message(lambda peer, _: server.send(peer, Pong(7, "w")))
            client.send(Ping(7))
            num_turns = 0
            real = SocketReader.drain

            def counted(reader: SocketReader, *limits: float) -> bool:
                nonlocal num_turns
                num_turns += 1
                return real(reader, *limits)

            monkeypatch.setattr(SocketReader, "drain", counted)
            await asyncio.sleep(0.1)
            assert num_turns < 20
            received: list[Message] = []
            client.on_message(received.append)
            await eventually(lambda: received == [Pong(7, "w")])

    asyncio.run(scenario())


def test_a_socket_without_messages_is_read_without_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raising it takes longer than reading a message, and every burst ends with an empty socket."""
    raised: list[object] = []

    async def scenario() -> None:
        async with started(ZmqRpcServer()) as server, connected(ZmqRpcClient(server.address)) as client:
            assert server.endpoint is not None
            assert client.endpoint is not None
            monkeypatch.setattr(zmq.Again, "__init__", lambda *_: raised.append(_))
            assert client.endpoint.reader.drain()
            assert server.endpoint.reader.drain()
            assert not raised

    asyncio.run(scenario())


def test_a_burst_of_large_messages_is_read_over_many_turns_of_the_loop() -> None:
    """So that what the loop sends and receives elsewhere does not wait for all of them."""
    num_messages = 40

    async def scenario() -> None:
        now, read_at = 0, []
        async with started(ZmqRpcServer()) as server, connected(ZmqRpcClient(server.address)) as client:
            client.send(Ping(1))
            await eventually(lambda: bool(server.peers))
            server.on_message(lambda peer, message: read_at.append(now))
            for _ in range(num_messages):
                client.send(AbortRequest("x" * READ_BYTES))
            # Some have arrived before the loop goes on. A call on the socket takes its edge.
            endpoint = server.endpoint
            assert endpoint is not None
            assert endpoint.socket.poll(60_000)
            endpoint.reader.wake()
            while len(read_at) < num_messages:
                await asyncio.sleep(0)
                now += 1
        assert max(read_at.count(turn) for turn in set(read_at)) == 1

    asyncio.run(scenario())


def test_foreign_bytes_on_the_port_do_not_disturb_clients(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rng = random.Random(0)

    async def scenario() -> None:
        async with started(ZmqRpcServer()) as server, connected(ZmqRpcClient(server.address)) as client:
            received: list[Message] = []
            server.on_message(lambda _, message: received.append(message))
            port = int(server.address.rsplit(":", 1)[1])
            greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
            for number in range(30):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write((greeting if number % 2 else b"") + rng.randbytes(rng.randrange(2000)))
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            client.send(Ping(0))
            await eventually(lambda: received[-1:] == [Ping(0)])
            num_before = server.num_malformed + len(received)
            assert client.endpoint is not None
            raw = client.endpoint.socket
            for _ in range(2000):
                raw.send(rng.randbytes(rng.randrange(40)), zmq.NOBLOCK)
            raw.send_multipart([b"two", b"frames"], zmq.NOBLOCK)
            client.send(Ping(1))
            await eventually(lambda: received[-1:] == [Ping(1)])
            assert server.num_malformed + len(received) - num_before == 2002
            assert len(received) < 20
            await eventually(lambda: len(server.peers) == 1)

    with caplog.filtering(LogLimit(MonotonicClock(), max_lines=10)):
        asyncio.run(scenario())
    assert 1 <= sum("dropped a frame" in record.message for record in caplog.records) <= 10


def test_a_server_that_does_not_speak_is_given_up() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = ZmqRpcClient(f"tcp://127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=0.2)
            with pytest.raises(WorkerUnavailableError, match=r"did not answer in 0\.2 s"):
                await client.start()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "http://x:1"]
)
def test_a_malformed_address_is_refused(address: str) -> None:
    async def scenario() -> None:
        with pytest.raises((ConfigError, WorkerUnavailableError)):
            await ZmqRpcClient(address, connect_timeout_s=0.5).start()

    asyncio.run(scenario())


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid", "a b"])
def test_binding_to_a_foreign_host_is_refused(host: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match=f"cannot listen on {host}: it is no name or address of this machine"):
            await ZmqRpcServer(host).start()

    asyncio.run(scenario())


def test_a_wildcard_is_advertised_by_name() -> None:
    async def scenario() -> None:
        async with started(ZmqRpcServer("0.0.0.0")) as server:
            assert server.address.startswith(f"tcp://{socket.gethostname()}:")

    asyncio.run(scenario())


def test_a_client_without_the_servers_key_cannot_connect() -> None:
    async def scenario() -> None:
        async with started(ZmqRpcServer(curve_keys=new_curve_keys())) as server:
            received: list[Message] = []
            server.on_message(lambda _, message: received.append(message))
            for key in (None, new_curve_keys().public):
                with pytest.raises(WorkerUnavailableError):
                    await ZmqRpcClient(server.address, connect_timeout_s=0.3, server_key=key).start()
            assert received == []

    asyncio.run(scenario())


def test_a_reused_routing_id_does_not_carry_the_old_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    use_curve = Endpoint.use_curve

    def impostor(endpoint: Endpoint, *keys: CurveKeys | bytes) -> None:
        """Chooses its routing id."""
        endpoint.socket.setsockopt(zmq.ROUTING_ID, b"somebody")
        use_curve(endpoint, *keys)

    async def scenario() -> None:
        ours = new_curve_keys()
        server = ZmqRpcServer(curve_keys=ours)
        heard: list[tuple[str, Message]] = []
        gone: list[Peer] = []

        async def admit(public_key: str) -> str:
            return public_key

        server.admit_by(admit)
        server.on_message(lambda peer, message: heard.append((server.identity(peer), message)))
        server.on_peer_gone(gone.append)
        async with started(server):
            keys = [new_curve_keys() for _ in range(2)]
            monkeypatch.setattr(Endpoint, "use_curve", impostor)
            # The first one's end is not noticed before the second one speaks.
            monkeypatch.setattr(zmq_server, "PROBE_DELAYS_S", (3600.0, 7200.0))
            for number, each in enumerate(keys):
                async with connected(ZmqRpcClient(server.address, server_key=ours.public, curve_keys=each)) as client:
                    client.send(Ping(number))
                    await eventually(lambda number=number: len(heard) == number + 1)  # type: ignore[misc]
            assert heard == [(each.public.decode(), Ping(number)) for number, each in enumerate(keys)]
            assert gone == [b"somebody"]

    asyncio.run(scenario())


def test_only_a_server_with_keys_can_tell_its_clients_apart() -> None:
    async def admit(_: str) -> str:
        return "somebody"

    with pytest.raises(ConfigError, match="without CURVE"):
        ZmqRpcServer().admit_by(admit)


def test_secrets_stay_out_of_repr() -> None:
    keys = new_curve_keys()
    assert keys.secret.decode() not in repr(keys)
    assert "secret" not in repr(ZmqRpcServer(curve_keys=keys))
