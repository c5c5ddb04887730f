"""The contract of discovery, on a real etcd server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.contracts.discovery_contract import DiscoveryContract
from tests.control.etcd_server import EtcdServer, running_etcd
from tests.patience import PATIENCE_S

from kvrelay.control.base import Discovery, Lease
from kvrelay.control.etcd import EtcdDiscovery

pytestmark = pytest.mark.system


class EtcdDiscoveryServer:
    """What the suite mistreats: one server, and a connection per "process"."""

    def __init__(self, server: EtcdServer) -> None:
        self.ttl_s = 1.0
        self._server = server
        self._open: list[EtcdDiscovery] = []

    async def connect(self) -> Discovery:
        discovery = await EtcdDiscovery.connect(self._server.url, connect_timeout_s=PATIENCE_S)
        self._open.append(discovery)
        return discovery

    async def disconnect(self, discovery: Discovery) -> None:
        assert isinstance(discovery, EtcdDiscovery)
        await discovery.close()

    async def revoke_lease(self, lease: Lease) -> None:
        result = await asyncio.to_thread(self._server.ctl, "lease", "revoke", lease.lease_id)
        assert result.returncode == 0 or "lease not found" in result.stderr, result.stderr

    async def go_away(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def come_back(self, *, is_wiped: bool) -> None:
        if is_wiped:
            self._server.wipe()
        await asyncio.to_thread(self._server.start)

    async def close(self) -> None:
        for discovery in self._open:
            await discovery.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@contextlib.asynccontextmanager
async def emptied(etcd: EtcdServer) -> AsyncIterator[EtcdDiscoveryServer]:
    if etcd.process is None:
        etcd.start()
    etcd.ctl("del", "--prefix", "kvrelay/")
    server = EtcdDiscoveryServer(etcd)
    try:
        yield server
    finally:
        await server.close()


class TestEtcdDiscovery(DiscoveryContract):
    @pytest.fixture
    def open_server(self, etcd: EtcdServer) -> object:
        return lambda: emptied(etcd)
