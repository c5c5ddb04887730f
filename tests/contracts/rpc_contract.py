"""What every pair of RpcServer and RpcClient does. A subclass brings the fixture ``open_network``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pytest
from tests.contracts.waiting import eventually
from tests.patience import PATIENCE_S
from tests.ports import free_ports

from kvrelay.core.messages import AdminReply, GenerateRequest, OutputBatch, Ping, Pong, TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.token_ids import to_bytes
from kvrelay.errors import AddressInUseError, PayloadTooLargeError, WorkerUnavailableError
from kvrelay.rpc import CurveKeys, new_curve_keys
from kvrelay.rpc.base import Peer, RpcClient, RpcServer
from kvrelay.rpc.wire import MAX_FRAME_BYTES, Message


class RpcNetwork(Protocol):
    """Makes both ends; none is started."""

    def server(self, port: int = 0) -> RpcServer: ...

    def client(self, address: str) -> RpcClient: ...

    def send_garbage(self, client: RpcClient, frame: bytes) -> None:
        """Bytes instead of a message, on the client's connection."""


OpenNetwork = Callable[[], AbstractAsyncContextManager[RpcNetwork]]


class Desk:
    """A started server, with what it heard."""

    def __init__(self, server: RpcServer) -> None:
        self.server = server
        self.received: list[tuple[Peer, Message]] = []
        self.gone: list[Peer] = []
        server.on_message(lambda peer, message: self.received.append((peer, message)))
        server.on_peer_gone(self.gone.append)

    @property
    def messages(self) -> list[Message]:
        return [message for _, message in self.received]


class Caller:
    """A started client, with what it heard."""

    def __init__(self, client: RpcClient) -> None:
        self.client = client
        self.received: list[Message] = []
        self.num_losses = 0
        client.on_message(self.received.append)
        client.on_disconnect(self._lost)

    def _lost(self) -> None:
        self.num_losses += 1


async def started_desk(network: RpcNetwork, port: int = 0) -> Desk:
    """The port that the kernel gives goes to another program once the desk is closed."""
    desk = Desk(network.server(port))
    await desk.server.start()
    return desk


async def started_caller(network: RpcNetwork, address: str) -> Caller:
    caller = Caller(network.client(address))
    await caller.client.start()
    return caller


class RpcContract:
    """The suite."""

    def test_messages_go_both_ways_in_order(self, open_network: OpenNetwork) -> None:
        async def scenario(network: RpcNetwork) -> None:
            desk = await started_desk(network)
            one, two = [await started_caller(network, desk.server.address) for _ in range(2)]
            request = GenerateRequest("r", "w", to_bytes(range(5000)), SamplingParams())
            for caller in (one, two):
                caller.client.send(request)
                for number in range(300):
                    caller.client.send(Ping(number))
            await eventually(lambda: len(desk.received) == 602)
            by_peer: dict[Peer, list[Message]] = {}
            for peer, message in desk.received:
                by_peer.setdefault(peer, []).append(message)
            assert list(by_peer.values()) == [[request, *map(Ping, range(300))]] * 2
            for index, peer in enumerate(by_peer):
                for number in range(300):
                    assert desk.server.send(peer, Pong(number, f"peer {index}"))
            await eventually(lambda: len(one.received) == len(two.received) == 300)
            answers = {str(message) for message in (one.received[0], two.received[0])}
            assert answers == {str(Pong(0, "peer 0")), str(Pong(0, "peer 1"))}
            assert [message.nonce for message in one.received if isinstance(message, Pong)] == list(range(300))
            await close(desk, one, two)

        run(open_network, scenario)

    def test_connecting_without_a_server_fails(self, open_network: OpenNetwork) -> None:
        async def scenario(network: RpcNetwork) -> None:
            desk = await started_desk(network, *free_ports(1))
            await desk.server.close()
            client = network.client(desk.server.address)
            with pytest.raises(WorkerUnavailableError):
                await client.start()
            assert not client.is_connected
            with pytest.raises(WorkerUnavailableError):
                client.send(Ping(1))
            await client.close()

        run(open_network, scenario)

    def test_a_port_belongs_to_one_server(self, open_network: OpenNetwork) -> None:
        async def scenario(network: RpcNetwork) -> None:
            desk = await started_desk(network, *free_ports(1))
            port = int(desk.server.address.rsplit(":", 1)[1])
            with pytest.raises(AddressInUseError):
                await network.server(port).start()
            await desk.server.close()
            again = network.server(port)
            await again.start()
            assert again.address == desk.server.address
            await again.close()

        run(open_network, scenario)

    def test_the_server_hears_when_a_client_leaves(self, open_network: OpenNetwork) -> None:
        async def scenario(network: RpcNetwork) -> None:
            desk = await started_desk(network)
            leaving, staying = [await started_caller(network, desk.server.address) for _ in range(2)]
            staying.client.send(Ping(1))
            await eventually(lambda: len(desk.received) == 1)
            leaving.client.send(Ping(2))
            leaving.client.send(Ping(3))
            await leaving.client.close()
            await eventually(lambda: bool(desk.gone))
            assert desk.messages == [Ping(1), Ping(2), Ping(3)]
            peer = desk.received[1][0]
            assert desk.gone == [peer]
            assert not desk.server.send(peer, Ping(4))
            assert not desk.server.send(Peer(b"nobody"), Ping(4))
            staying.client.send(Ping(5))
            await eventually(lambda: desk.messages[-1] == Ping(5))
            assert desk.gone == [peer]
            assert leaving.num_losses == 0
            await close(desk, staying)

        run(open_network, scenario)

    def test_messages_sent_before_the_end_arrive(self, open_network: OpenNetwork) -> None:
        """Also when it is more than sockets take at once."""
        burst = [OutputBatch((TokenOutput("r", tuple(range(2_000)), num_cached_tokens=n),)) for n in range(500)]

        async def scenario(network: RpcNetwork) -> None:
            desk = await started_desk(network)
            leaving, staying = [await started_caller(network, desk.server.address) for _ in range(2)]
            for message in burst:
                leaving.client.send(message)
            await leaving.client.close()
            await eventually(lambda: len(desk.gone) == 1)
            assert desk.messages == burst
            staying.client.send(Ping(1))
            await eventually(lambda: desk.messages[-1] == Ping(1))
            for message in burst:
                assert desk.server.send(desk.received[-1][0], message)
            await desk.server.close()
            await eventually(lambda: staying.num_losses == 1)
            assert staying.received == burst
            await staying.client.close()

        run(open_network, scenario)

    def test_the_client_hears_when_the_server_leaves(self, open_network: OpenNetwork) -> None:
        async def scenario(network: RpcNetwork) -> None:
            desk = await started_desk(network, *free_ports(1))
            caller = await started_caller(network, desk.server.address)
            caller.client.send(Ping(1))
            await eventually(lambda: len(desk.received) == 1)
            last = OutputBatch((TokenOutput("r", (1, 2, 3)),))
            assert desk.server.send(desk.received[0][0], last)
            await desk.server.close()
            await eventually(lambda: caller.num_losses == 1)
            assert caller.received == [last]
            assert not caller.client.is_connected
            with pytest.raises(WorkerUnavailableError):
                caller.client.send(Ping(2))
            late: list[str] = []
            caller.client.on_disconnect(lambda: late.append("called"))
            await eventually(lambda: late == ["called"])
            again = Desk(network.server(int(desk.server.address.rsplit(":", 1)[1])))
            await again.server.start()
            await asyncio.sleep(0.2)
            assert (caller.num_losses, caller.client.is_connected, again.received) == (1, False, [])
            await caller.client.close()
            await caller.client.close()
            await again.server.close()

        run(open_network, scenario)

    def test_a_server_ends_a_connection_for_both_sides(self, open_network: OpenNetwork) -> None:
        """The client hears what was sent before, then the end; nothing that it sends afterwards is heard."""

        async def scenario(network: RpcNetwork) -> None:
            desk = await started_desk(network)
            unwanted, staying = [await started_caller(network, desk.server.address) for _ in range(2)]
            unwanted.client.send(Ping(1))
            staying.client.send(Ping(2))
            await eventually(lambda: len(desk.received) == 2)
            peers = {message: peer for peer, message in desk.received}
            peer = peers[Ping(1)]
            burst = [Pong(number, "w") for number in range(300)]
            for message in burst:
                assert desk.server.send(peer, message)
            desk.server.disconnect(peer)
            desk.server.disconnect(peer)
            desk.server.disconnect(Peer(b"nobody"))
            assert not desk.server.send(peer, Pong(0, "w"))
            unwanted.client.send(Ping(3))
            await eventually(lambda: desk.gone == [peer] and unwanted.num_losses == 1)
            assert unwanted.received == burst
            with pytest.raises(WorkerUnavailableError):
                unwanted.client.send(Ping(4))
            await unwanted.client.close()
            staying.client.send(Ping(5))
            await eventually(lambda: desk.messages[-1] == Ping(5))
            assert desk.server.send(peers[Ping(2)], Pong(5, "w"))
            await eventually(lambda: staying.received == [Pong(5, "w")])
            assert desk.messages == [Ping(1), Ping(2), Ping(5)] or desk.messages == [Ping(2), Ping(1), Ping(5)]
            assert desk.gone == [peer]
            again = await started_caller(network, desk.server.address)
            again.client.send(Ping(6))
            await eventually(lambda: desk.messages[-1] == Ping(6))
            await close(desk, staying, again)

        run(open_network, scenario)

    def test_a_message_above_the_limit_is_refused_by_its_sender(self, open_network: OpenNetwork) -> None:
        async def scenario(network: RpcNetwork) -> None:
            desk = await started_desk(network)
            caller = await started_caller(network, desk.server.address)
            huge = AdminReply(1, payload="x" * MAX_FRAME_BYTES)
            with pytest.raises(PayloadTooLargeError):
                caller.client.send(huge)
            caller.client.send(Ping(1))
            await eventually(lambda: desk.messages == [Ping(1)])
            with pytest.raises(PayloadTooLargeError):
                desk.server.send(desk.received[0][0], huge)
            assert desk.server.send(desk.received[0][0], Pong(1, "w"))
            await eventually(lambda: caller.received == [Pong(1, "w")])
            assert (caller.num_losses, desk.gone) == (0, [])
            await close(desk, caller)

        run(open_network, scenario)

    def test_garbage_is_dropped_and_the_rest_goes_on(self, open_network: OpenNetwork) -> None:
        async def scenario(network: RpcNetwork) -> None:
            desk = await started_desk(network)
            caller = await started_caller(network, desk.server.address)
            for frame in (
                b"",
                b"\x00",
                b"\x02",
                b"\x01\xff",
                b"\x02\x81\xa4type\xa4Nope",
                b"\xff" * 1000,
                b"\x80\x04.",
            ):
                network.send_garbage(caller.client, frame)
            caller.client.send(Ping(1))
            await eventually(lambda: desk.messages == [Ping(1)])
            assert desk.server.num_malformed == 7  # type: ignore[attr-defined]
            assert desk.gone == []
            await close(desk, caller)

        run(open_network, scenario)


class KeyedNetwork(Protocol):
    """Both ends have keys; a client has those that it is given."""

    def server(self, port: int = 0) -> RpcServer: ...

    def client(self, address: str, keys: CurveKeys | None = None) -> RpcClient: ...


OpenKeyedNetwork = Callable[[], AbstractAsyncContextManager[KeyedNetwork]]


class Doorman:
    """Knows some keys, and others as soon as they are written down, for which it waits so long."""

    def __init__(self, wait_s: float = 0.2) -> None:
        self._wait_s = wait_s
        self.known: dict[str, str] = {}
        self.asked: list[str] = []
        self.changed = asyncio.Event()

    def learn(self, keys: CurveKeys, identity: str) -> None:
        self.known[keys.public.decode()] = identity
        self.changed.set()

    async def admit(self, public_key: str) -> str | None:
        self.asked.append(public_key)
        if public_key not in self.known:
            try:
                async with asyncio.timeout(self._wait_s):
                    await self.changed.wait()
            except TimeoutError:
                return None
        return self.known.get(public_key)


class AdmissionContract:
    """The suite for servers that ask who calls. A subclass brings the fixture ``open_network``."""

    def test_a_message_carries_its_senders_identity(self, open_network: OpenKeyedNetwork) -> None:
        async def scenario(network: KeyedNetwork) -> None:
            doorman, keys = Doorman(), [new_curve_keys() for _ in range(2)]
            doorman.learn(keys[0], "first")
            doorman.learn(keys[1], "second")
            desk = await guarded_desk(network, doorman)
            callers = [Caller(network.client(desk.server.address, each)) for each in keys]
            for number, caller in enumerate(callers):
                await caller.client.start()
                caller.client.send(Ping(number))
            await eventually(lambda: len(desk.received) == 2)
            heard = {(desk.server.identity(peer), message) for peer, message in desk.received}
            assert heard == {("first", Ping(0)), ("second", Ping(1))}
            peers = {message: peer for peer, message in desk.received}
            await callers[0].client.close()
            await eventually(lambda: desk.gone == [peers[Ping(0)]])
            assert [desk.server.identity(peers[Ping(number)]) for number in (0, 1)] == ["", "second"]
            await close(desk, callers[1])

        run_keyed(open_network, scenario)

    def test_an_unknown_client_is_refused_at_once(self, open_network: OpenKeyedNetwork) -> None:
        async def scenario(network: KeyedNetwork) -> None:
            doorman = Doorman()
            desk = await guarded_desk(network, doorman)
            for keys in (new_curve_keys(), new_curve_keys()):
                with pytest.raises(WorkerUnavailableError, match="refused the connection"):
                    await network.client(desk.server.address, keys).start()
                assert doorman.asked[-1] == keys.public.decode()
            assert desk.received == []
            await desk.server.close()

        run_keyed(open_network, scenario)

    def test_a_client_that_becomes_known_is_admitted(self, open_network: OpenKeyedNetwork) -> None:
        async def scenario(network: KeyedNetwork) -> None:
            doorman, keys = Doorman(PATIENCE_S), new_curve_keys()
            desk = await guarded_desk(network, doorman)
            caller = Caller(network.client(desk.server.address, keys))
            starting = asyncio.create_task(caller.client.start())
            await eventually(lambda: doorman.asked == [keys.public.decode()])
            doorman.learn(keys, "late")
            await starting
            caller.client.send(Ping(1))
            await eventually(lambda: desk.messages == [Ping(1)])
            assert desk.server.identity(desk.received[0][0]) == "late"
            await close(desk, caller)

        run_keyed(open_network, scenario)


async def guarded_desk(network: KeyedNetwork, doorman: Doorman) -> Desk:
    desk = Desk(network.server())
    desk.server.admit_by(doorman.admit)
    await desk.server.start()
    return desk


async def close(desk: Desk, *callers: Caller) -> None:
    for caller in callers:
        await caller.client.close()
    await desk.server.close()


def run(open_network: OpenNetwork, scenario: Callable[[RpcNetwork], Awaitable[None]]) -> None:
    """Play a scenario on a network of its own."""

    async def play() -> None:
        async with open_network() as network:
            await scenario(network)

    asyncio.run(play())


def run_keyed(open_network: OpenKeyedNetwork, scenario: Callable[[KeyedNetwork], Awaitable[None]]) -> None:
    """As ``run``, where both ends have keys."""

    async def play() -> None:
        async with open_network() as network:
            await scenario(network)

    asyncio.run(play())
