"""The control plane's contracts, in memory and on a real NATS server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contracts.control_servers import (
    MemoryBusServer,
    MemoryDiscoveryServer,
    MemoryQueueServer,
    NatsBusServer,
    NatsDiscoveryServer,
    NatsQueueServer,
    closing,
)
from tests.contracts.discovery_contract import DiscoveryContract
from tests.contracts.event_bus_contract import EventBusContract
from tests.contracts.prefill_queue_contract import PrefillQueueContract
from tests.patience import PATIENCE_S

from kvrelay.control.nats_process import NatsServerProcess

pytestmark = pytest.mark.slow  # It waits for a minute, so it should begin early.


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServerProcess]:
    process = NatsServerProcess()
    process.start()
    yield process
    process.stop()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a busy disk is waited for; one that goes away ends what is asked of it."""
    monkeypatch.setattr("kvrelay.control.nats.connection.REQUEST_TIMEOUT_S", PATIENCE_S)


class TestMemoryDiscovery(DiscoveryContract):
    @pytest.fixture
    def open_server(self) -> object:
        return lambda: closing(MemoryDiscoveryServer())


class TestMemoryPrefillQueue(PrefillQueueContract):
    @pytest.fixture
    def open_server(self) -> object:
        return lambda: closing(MemoryQueueServer())


class TestMemoryEventBus(EventBusContract):
    @pytest.fixture
    def open_server(self) -> object:
        return lambda: closing(MemoryBusServer())


class TestNatsDiscovery(DiscoveryContract):
    @pytest.fixture
    def open_server(self, nats: NatsServerProcess) -> object:
        return lambda: closing(NatsDiscoveryServer(nats))


class TestNatsPrefillQueue(PrefillQueueContract):
    @pytest.fixture
    def open_server(self, nats: NatsServerProcess) -> object:
        return lambda: closing(NatsQueueServer(nats))


class TestNatsEventBus(EventBusContract):
    @pytest.fixture
    def open_server(self, nats: NatsServerProcess) -> object:
        return lambda: closing(NatsBusServer(nats))
