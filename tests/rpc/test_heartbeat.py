"""Heartbeats: how they follow a lease, and what they do to peers that stand still."""

from __future__ import annotations

import asyncio

import pytest
from tests.contracts.waiting import eventually
from tests.patience import stop
from tests.rpc.test_zmq import CHILD_CLIENT, CHILD_SERVER, connected, spawn, started

from kvrelay.config import ControlConfig
from kvrelay.core.messages import Ping
from kvrelay.rpc import Heartbeat, Peer, ZmqRpcClient, ZmqRpcServer
from kvrelay.rpc.heartbeat import MIN_TIMEOUT_S
from kvrelay.rpc.wire import Message

QUICK = Heartbeat(interval_s=0.2, timeout_s=0.8)
SLOW = Heartbeat(interval_s=10.0, timeout_s=30.0)
CALM = Heartbeat(interval_s=0.5, timeout_s=2.5)
"""Its ends are not lost when a busy machine holds them up."""


@pytest.mark.parametrize("ttl_s", [1.0, 2.0, 10.0, 60.0, 3600.0])
def test_silence_is_noticed_within_a_lease(ttl_s):
    heartbeat = Heartbeat.for_lease(ttl_s)
    assert heartbeat.detection_s <= ttl_s
    assert heartbeat.timeout_s > 2 * heartbeat.interval_s


def test_the_shortest_lease_does_not_make_a_busy_peer_a_silent_one():
    assert Heartbeat.for_lease(0.5).timeout_s == MIN_TIMEOUT_S


def test_the_defaults_are_those_of_the_default_lease():
    assert Heartbeat() == Heartbeat.for_lease(ControlConfig().lease_ttl_s)


async def test_a_server_that_stands_still_is_lost():
    child = spawn(CHILD_SERVER)
    assert child.stdout is not None
    try:
        address = (await asyncio.to_thread(child.stdout.readline)).strip()
        async with connected(ZmqRpcClient(address, heartbeat=QUICK)) as client:
            losses: list[str] = []
            client.on_disconnect(lambda: losses.append("lost"))
            await asyncio.to_thread(stop, child.pid)
            await eventually(lambda: losses == ["lost"])
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


async def test_a_client_that_stands_still_is_gone():
    async with started(ZmqRpcServer(heartbeat=QUICK)) as server:
        heard: list[Peer] = []
        gone: list[Peer] = []
        server.on_message(lambda peer, _: heard.append(peer))
        server.on_peer_gone(gone.append)
        child = spawn(CHILD_CLIENT, server.address)
        try:
            await eventually(lambda: bool(heard))
            await asyncio.to_thread(stop, child.pid)
            await eventually(lambda: gone == heard)
        finally:
            child.kill()
            child.communicate()


@pytest.mark.parametrize(("servers", "clients"), [(CALM, SLOW), (SLOW, CALM)])
async def test_ends_with_different_leases_keep_their_connection(servers, clients):
    async with started(ZmqRpcServer(heartbeat=servers)) as server:
        received: list[Message] = []
        gone: list[Peer] = []
        server.on_message(lambda _, message: received.append(message))
        server.on_peer_gone(gone.append)
        async with connected(ZmqRpcClient(server.address, heartbeat=clients)) as client:
            client.send(Ping(1))
            # Nothing happens, for longer than the shorter timeout allows.
            await asyncio.sleep(1.2 * CALM.detection_s)
            client.send(Ping(2))
            await eventually(lambda: received == [Ping(1), Ping(2)])
            assert client.is_connected
            assert gone == []
