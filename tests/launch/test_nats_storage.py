"""A NATS server whose disk was full: how clients see it, and what ``serve`` does about it.

A limit on the size of the server's files stands for the full disk: its writes fail as they do there, and the server
does not recover when the limit is lifted.
"""

from __future__ import annotations

import asyncio
import resource
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.contracts.prefill_queue_contract import PARTITION, prefill
from tests.patience import PATIENCE_S

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control, nats_storage
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.control.nats.jetstream import NotStoredError
from kvrelay.control.nats_process import NatsServerProcess, _first_url, _ports_file
from kvrelay.core.clock import ManualClock
from kvrelay.errors import ControlUnavailableError
from kvrelay.launch.nats_supervisor import STORAGE_INTERVAL_S, NatsSupervisor

KEYS = Keys("test")
LEASE_S = 60.0


@pytest.fixture
def server() -> Iterator[NatsServerProcess]:
    process = NatsServerProcess()
    process.start()
    yield process
    process.stop()


@asynccontextmanager
async def plane(server: NatsServerProcess) -> AsyncIterator[ControlPlane]:
    control = await connect_control(ControlConfig(control=server.url, namespace="test"))
    try:
        yield control
    finally:
        await control.close()


def limit_files(server: NatsServerProcess, num_bytes: int) -> None:
    assert server.pid is not None
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


async def eventually_so(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def fill_disk(server: NatsServerProcess, control: ControlPlane) -> None:
    """The queue's next write fails; then there is room again."""
    limit_files(server, 1)
    with pytest.raises(ControlUnavailableError):
        await control.prefill_queue.push(prefill("h1"))
    limit_files(server, resource.RLIM_INFINITY)


async def test_clients_are_told_that_the_server_stores_nothing_more(server: NatsServerProcess) -> None:
    async with plane(server) as control:
        await control.prefill_queue.push(prefill("h0"))
        assert server.storage_problem() is None
        await fill_disk(server, control)

        failures: list[ControlUnavailableError] = []

        async def is_explained() -> bool:
            """A busy server may fail to answer the question whether it answers."""
            with pytest.raises(ControlUnavailableError) as failed:
                await control.prefill_queue.push(prefill("h2"))
            failures.append(failed.value)
            return isinstance(failed.value, NotStoredError)

        await eventually_so(is_explained)
        assert "stores nothing in stream kvrelay_test_prefill" in failures[-1].message
        # Other streams still store.
        await control.discovery.put(KEYS.config_value("router.policy"), b"1")


async def test_serve_restarts_its_server_and_nothing_is_lost(
    server: NatsServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock()
    supervisor = NatsSupervisor(server, clock)
    async with plane(server) as control, plane(server) as other:
        await supervisor.check()
        lease = await control.discovery.grant(LEASE_S)
        await control.discovery.put(KEYS.worker("w"), b"here", lease)
        await control.prefill_queue.push(prefill("h0"))
        old_pid = server.pid
        await fill_disk(server, control)

        async def is_restarted() -> bool:
            clock.advance(STORAGE_INTERVAL_S)
            await supervisor.check()
            return server.pid != old_pid

        await eventually_so(is_restarted)
        assert "write error" in capsys.readouterr().err

        async def stores_again() -> bool:
            try:
                await control.prefill_queue.push(prefill("h4"))
            except ControlUnavailableError:
                return False
            return True

        await eventually_so(stores_again)
        assert server.storage_problem() is None
        delivery = await other.prefill_queue.pull(PARTITION, LEASE_S)
        assert delivery is not None
        assert delivery.request.request_id == "h0"
        await delivery.ack()
        assert await other.discovery.get(KEYS.worker("w")) == b"here"


def test_other_users_of_the_machine_do_not_reach_the_health_check(server: NatsServerProcess) -> None:
    assert server.store_dir is not None
    assert server.pid is not None
    url = _first_url(_ports_file(server.store_dir, server.pid), "monitoring")
    for path in ("", "/", "/healthz", "/connz", "/varz"):
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"{url}{path}", timeout=LEASE_S)
        refused.value.close()
    assert server.storage_problem() is None


def test_a_server_that_does_not_answer_is_not_said_to_have_a_storage_problem(server: NatsServerProcess) -> None:
    server.kill()
    assert server.storage_problem() is None
    assert nats_storage.storage_problem("http://127.0.0.1:9") is None


def test_whether_there_is_room_is_found_by_writing(tmp_path: Path) -> None:
    assert nats_storage.room_problem(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        problem = nats_storage.room_problem(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert problem is not None
    assert "File too large" in problem
    assert list(tmp_path.iterdir()) == []
    missing = nats_storage.room_problem(tmp_path / "missing")
    assert missing is not None
    assert "No such file" in missing
