"""The request plane's contract: ZMQ in the clear, with CURVE, with uvloop, and loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvloop
import zmq
from tests.contracts.rpc_contract import AdmissionContract, RpcContract

from kvrelay.rpc import CurveKeys, RpcClient, RpcServer, ZmqRpcClient, ZmqRpcServer, new_curve_keys
from kvrelay.rpc.loopback import LoopbackNetwork, LoopbackRpcClient


class ZmqNetwork:
    """Loopback TCP."""

    def __init__(self, keys: CurveKeys | None) -> None:
        self._keys = keys

    def server(self, port: int = 0) -> RpcServer:
        return ZmqRpcServer(port=port, curve_keys=self._keys)

    def client(self, address: str, keys: CurveKeys | None = None) -> RpcClient:
        server_key = self._keys.public if self._keys is not None else None
        return ZmqRpcClient(address, 2.0, server_key=server_key, curve_keys=keys)

    def send_garbage(self, client: RpcClient, frame: bytes) -> None:
        assert isinstance(client, ZmqRpcClient)
        assert client.endpoint is not None
        client.endpoint.socket.send(frame, zmq.NOBLOCK)


class MemoryNetwork(LoopbackNetwork):
    def send_garbage(self, client: RpcClient, frame: bytes) -> None:
        assert isinstance(client, LoopbackRpcClient)
        client.send_frame(frame)


class KeyedMemoryNetwork(LoopbackNetwork):
    def client(self, address: str, keys: CurveKeys | None = None) -> LoopbackRpcClient:  # type: ignore[override]
        return super().client(address, keys.public.decode() if keys is not None else "")


@contextlib.asynccontextmanager
async def keyed_memory_network() -> AsyncIterator[KeyedMemoryNetwork]:
    yield KeyedMemoryNetwork()


@contextlib.asynccontextmanager
async def zmq_network(keys: CurveKeys | None) -> AsyncIterator[ZmqNetwork]:
    yield ZmqNetwork(keys)


@contextlib.asynccontextmanager
async def memory_network() -> AsyncIterator[MemoryNetwork]:
    yield MemoryNetwork()


class TestZmq(RpcContract):
    @pytest.fixture
    def open_network(self) -> object:
        return lambda: zmq_network(None)


class TestZmqWithCurve(RpcContract):
    @pytest.fixture
    def open_network(self) -> object:
        keys = new_curve_keys()
        return lambda: zmq_network(keys)


class TestZmqOnUvloop(RpcContract):
    @pytest.fixture
    def open_network(self, monkeypatch: pytest.MonkeyPatch) -> object:
        monkeypatch.setattr(asyncio, "run", uvloop.run)
        return lambda: zmq_network(None)


class TestLoopback(RpcContract):
    @pytest.fixture
    def open_network(self) -> object:
        return memory_network


class TestAdmissionToZmq(AdmissionContract):
    @pytest.fixture
    def open_network(self) -> object:
        keys = new_curve_keys()
        return lambda: zmq_network(keys)


class TestAdmissionToZmqOnUvloop(AdmissionContract):
    @pytest.fixture
    def open_network(self, monkeypatch: pytest.MonkeyPatch) -> object:
        monkeypatch.setattr(asyncio, "run", uvloop.run)
        keys = new_curve_keys()
        return lambda: zmq_network(keys)


class TestAdmissionToLoopback(AdmissionContract):
    @pytest.fixture
    def open_network(self) -> object:
        return keyed_memory_network
