"""A NATS cluster of three: leases and queue outlive the server that leads them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.contracts.prefill_queue_contract import PARTITION, prefill
from tests.patience import PATIENCE_S
from tests.ports import free_ports

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.base import ControlPlane, PrefillDelivery
from kvrelay.control.nats.connection import NatsConnection
from kvrelay.control.nats_process import NatsServerProcess, find_binary
from kvrelay.errors import ControlUnavailableError

STREAMS = ("KV_kvrelay_test", "kvrelay_test_keepalives", "kvrelay_test_prefill", "kvrelay_test_prefill_dead")
LEASE_TTL_S = 30.0

T = TypeVar("T")


class Cluster:
    """``count`` servers with JetStream that know each other, by name."""

    def __init__(self, directory: Path, count: int) -> None:
        self._ports = {f"n{number}": free_ports(2) for number in range(1, count + 1)}
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{client}" for client, _ in self._ports.values())

    def start(self) -> None:
        routes = ",".join(f"nats://127.0.0.1:{route}" for _, route in self._ports.values())
        for name, (client, route) in self._ports.items():
            command = [find_binary(), "--jetstream", "--addr", "127.0.0.1", "--port", str(client), "--name", name]
            command += ["--cluster_name", "test", "--cluster", f"nats://127.0.0.1:{route}", "--routes", routes]
            command += ["--store_dir", str(self._directory / name)]
            with (self._directory / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def check(self) -> None:
        """Servers that nobody killed run; the others would wait for one that has ended, without end."""
        for name, process in self._processes.items():
            assert process.poll() is None, (self._directory / f"{name}.log").read_text()

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for name in list(self._processes):
            self.kill(name)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, 3)
    cluster.start()
    yield cluster
    cluster.stop()


def test_the_server_that_leads_everything_dies(cluster: Cluster) -> None:
    async def scenario() -> None:
        lost: list[str] = []
        control = await _connect_when_ready(cluster)
        try:
            lease = await control.discovery.grant(LEASE_TTL_S)
            lease.on_lost(lambda: lost.append("lost"))
            await control.discovery.put("kvrelay/test/x", b"1", lease)
            await control.prefill_queue.push(prefill("before"))
            leaders = [(await _stream_info(cluster.url, stream))["cluster"]["leader"] for stream in STREAMS]
            cluster.kill(leaders[0])

            await _until_it_succeeds(lambda: control.discovery.put("kvrelay/test/y", b"2", lease))
            listed = await _until_it_succeeds(lambda: control.discovery.list("kvrelay/test/"))
            assert listed == {"kvrelay/test/x": b"1", "kvrelay/test/y": b"2"}
            await _until_it_succeeds(lambda: control.prefill_queue.push(prefill("after")))
            delivery = await _until_it_succeeds(lambda: _pull(control))
            assert delivery.request.request_id == "before"
            assert not lost
        finally:
            await control.close()

    asyncio.run(scenario())


def test_a_cluster_of_three_keeps_three_copies_by_itself(cluster: Cluster) -> None:
    async def scenario() -> None:
        await (await _connect_when_ready(cluster)).close()
        await (await connect_control(ControlConfig(control=cluster.url, namespace="auto"))).close()
        for stream in STREAMS:
            info = await _stream_info(cluster.url, stream.replace("test", "auto"))
            assert info["config"]["num_replicas"] == 3

    asyncio.run(scenario())


def test_a_server_alone_keeps_one_copy_and_refuses_more() -> None:
    async def scenario(url: str) -> None:
        await (await connect_control(ControlConfig(control=url, namespace="test"))).close()
        for stream in STREAMS:
            assert (await _stream_info(url, stream))["config"]["num_replicas"] == 1
        with pytest.raises(ControlUnavailableError, match="replicas"):
            await connect_control(ControlConfig(control=url, namespace="other", control_replicas=3))

    server = NatsServerProcess()
    server.start()
    try:
        asyncio.run(scenario(server.url))
    finally:
        server.stop()


async def _connect_when_ready(cluster: Cluster) -> ControlPlane:
    """Three copies are refused until all three servers have met."""
    config = ControlConfig(control=cluster.url, namespace="test", control_replicas=3)

    async def connected() -> ControlPlane:
        cluster.check()
        return await connect_control(config)

    return await _until_it_succeeds(connected)


async def _until_it_succeeds(attempt: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await attempt()
            except ControlUnavailableError:
                await asyncio.sleep(0.1)


async def _pull(control: ControlPlane) -> PrefillDelivery:
    """The queue is not empty: no delivery means that nobody leads its consumer yet."""
    delivery = await control.prefill_queue.pull(PARTITION, 1.0)
    if delivery is None:
        raise ControlUnavailableError("nothing was delivered")
    return delivery


async def _stream_info(url: str, stream: str) -> dict[str, Any]:
    connection = await NatsConnection.connect(url, PATIENCE_S)
    try:
        reply = await connection.request(f"$JS.API.STREAM.INFO.{stream}", b"")
        info: dict[str, Any] = json.loads(reply.data)
        return info
    finally:
        await connection.close()
