"""EtcdDiscovery against a real server that is restarted, wiped, compacted and asked to revoke leases."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kvrelay.control.base import WatchEvent, WatchKind
from kvrelay.control.etcd import EtcdDiscovery
from kvrelay.control.etcd_channel import EtcdAddress
from kvrelay.errors import ConfigError, ControlUnavailableError, LeaseLostError

pytestmark = pytest.mark.system

PREFIX = "kvrelay/test/workers/"
TTL_S = 1.0


class EtcdServer:
    """A real server on loopback, with a short election timeout, which lets leases be as short as one second."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.client_port, self.peer_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.client_port}"

    def start(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.client_port, self.peer_port))
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    "etcd",
                    "--name=test",
                    "--log-level=error",
                    f"--data-dir={self.directory / 'data'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=test={peer}",
                    "--heartbeat-interval=10",
                    "--election-timeout=100",
                ],
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + 20
        while self.ctl("endpoint", "health").returncode != 0:
            assert time.monotonic() < end, (self.directory / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wipe(self) -> None:
        shutil.rmtree(self.directory / "data")

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["etcdctl", f"--endpoints=127.0.0.1:{self.client_port}", *words],
            env={**os.environ, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_etcd() -> None:
    if shutil.which("etcd") and shutil.which("etcdctl"):
        return
    if os.environ.get("CI") == "true":
        pytest.fail("etcd and etcdctl are not installed (Debian: etcd-server, etcd-client)")
    pytest.skip("etcd and etcdctl are not installed (Debian: etcd-server, etcd-client)")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    require_etcd()
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: EtcdServer) -> EtcdServer:
    """Running, and empty below our prefix."""
    if shared_server.process is None:
        shared_server.start()
    shared_server.ctl("del", "--prefix", "kvrelay/")
    return shared_server


@contextlib.asynccontextmanager
async def connected(server: EtcdServer) -> AsyncIterator[EtcdDiscovery]:
    discovery = await EtcdDiscovery.connect(server.url, namespace="test", connect_timeout_s=5.0)
    try:
        yield discovery
    finally:
        await discovery.close()


class Watching:
    """A watch that runs in a task and keeps what it saw."""

    def __init__(self, discovery: EtcdDiscovery, prefix: str = PREFIX) -> None:
        self.events: list[WatchEvent] = []
        self.state: dict[str, bytes] = {}
        self.task = asyncio.create_task(self._run(discovery, prefix))

    async def _run(self, discovery: EtcdDiscovery, prefix: str) -> None:
        async for event in discovery.watch(prefix):
            self.events.append(event)
            if event.kind is WatchKind.PUT:
                self.state[event.key] = event.value
            elif event.kind is WatchKind.DELETE:
                del self.state[event.key]

    @property
    def synced(self) -> bool:
        return any(event.kind is WatchKind.SYNCED for event in self.events)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.01)


async def test_keys_are_readable_with_etcdctl_and_go_with_their_lease(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        lease = await discovery.grant(TTL_S)
        await discovery.put(PREFIX + "a", b'{"role": "decode"}', lease)
        await discovery.put("kvrelay/test/config/x", b"1")
        assert 'workers/a\n{"role": "decode"}' in server.ctl("get", "--prefix", "kvrelay/test/").stdout
        assert lease.lease_id in server.ctl("lease", "list").stdout
        await asyncio.sleep(lease.ttl_s * 1.5)
        assert await discovery.get(PREFIX + "a") == b'{"role": "decode"}'
        await lease.revoke()
        await lease.revoke()
        assert await discovery.list("kvrelay/test/") == {"kvrelay/test/config/x": b"1"}
        with pytest.raises(LeaseLostError):
            await discovery.put(PREFIX + "b", b"", lease)


async def test_a_silent_process_is_gone_within_one_and_a_half_ttl(server: EtcdServer) -> None:
    async with connected(server) as reader:
        watching = Watching(reader)
        async with connected(server) as dying:
            lease = await dying.grant(2 * TTL_S)
            await dying.put(PREFIX + "a", b"1", lease)
            await until(lambda: PREFIX + "a" in watching.state)
        begin = time.monotonic()
        await until(lambda: not watching.state)
        assert time.monotonic() - begin < 1.5 * lease.ttl_s + 0.5
        await watching.stop()


async def test_a_lease_revoked_by_hand_is_seen_and_granted_again(server: EtcdServer) -> None:
    async with connected(server) as owner, connected(server) as reader:
        lost: list[str] = []
        lease = await owner.grant(TTL_S)
        lease.on_lost(lambda: lost.append(lease.lease_id))
        await owner.put(PREFIX + "a", b"1", lease)
        watching = Watching(reader)
        await until(lambda: watching.synced)
        first = lease.lease_id
        assert server.ctl("lease", "revoke", first).returncode == 0
        await until(lambda: WatchEvent(WatchKind.DELETE, PREFIX + "a") in watching.events)
        await until(lambda: watching.state == {PREFIX + "a": b"1"})
        assert lost == [first]
        assert lease.lease_id != first
        await watching.stop()


async def test_a_put_under_a_lease_that_is_gone_registers_everything_again(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        lease = await discovery.grant(3600)
        lost: list[int] = []
        lease.on_lost(lambda: lost.append(1))
        await discovery.put(PREFIX + "a", b"1", lease)
        await discovery.put(PREFIX + "gone", b"1", lease)
        await discovery.delete(PREFIX + "gone")
        server.ctl("lease", "revoke", lease.lease_id)
        await discovery.put(PREFIX + "b", b"2", lease)
        assert await discovery.list(PREFIX) == {PREFIX + "a": b"1", PREFIX + "b": b"2"}
        assert lost == [1]
        await lease.revoke()


async def test_a_watch_reports_the_difference_after_a_restart_with_data_kept(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        await discovery.put(PREFIX + "stays", b"1")
        lease = await discovery.grant(5 * TTL_S)
        await discovery.put(PREFIX + "leased", b"1", lease)
        watching = Watching(discovery)
        await until(lambda: watching.synced)
        server.stop()
        with pytest.raises(ControlUnavailableError):
            await discovery.put(PREFIX + "stays", b"lost")
        await until(lambda: not discovery.is_connected)
        server.start()
        server.ctl("put", PREFIX + "new", "2")
        await until(lambda: watching.state.get(PREFIX + "new") == b"2")
        await until(lambda: discovery.is_connected)
        assert not any(event.kind is WatchKind.DELETE for event in watching.events)
        await discovery.put(PREFIX + "stays", b"3")
        await until(lambda: watching.state.get(PREFIX + "stays") == b"3")
        assert watching.state == await discovery.list(PREFIX)
        assert sum(event.kind is WatchKind.SYNCED for event in watching.events) == 1
        await watching.stop()
        await lease.revoke()


async def test_a_server_that_lost_its_data_gets_the_living_back_and_nobody_seems_gone(server: EtcdServer) -> None:
    async with connected(server) as owner, connected(server) as reader:
        lost: list[int] = []
        lease = await owner.grant(10)
        lease.on_lost(lambda: lost.append(1))
        await owner.put(PREFIX + "a", b"1", lease)
        await owner.put(PREFIX + "unleased", b"2")
        # As in every process, one watch tells the lease that the server is back.
        own, watching = Watching(owner), Watching(reader)
        await until(lambda: watching.synced and own.synced)
        server.stop()
        server.wipe()
        server.start()
        await until(lambda: watching.state == {PREFIX + "a": b"1"} == own.state)
        assert lost == [1]
        assert [event.key for event in watching.events if event.kind is WatchKind.DELETE] == [PREFIX + "unleased"]
        assert await reader.get(PREFIX + "a") == b"1"
        await own.stop()
        await watching.stop()
        await lease.revoke()


async def test_an_outage_longer_than_the_lease_is_a_loss(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        lost: list[int] = []
        lease = await discovery.grant(TTL_S)
        lease.on_lost(lambda: lost.append(1))
        await discovery.put(PREFIX + "a", b"1", lease)
        first = lease.lease_id
        server.stop()
        await until(lambda: lost == [1])
        server.start()
        await until(lambda: lease.lease_id != first)
        await asyncio.sleep(1.5 * lease.ttl_s)
        assert await discovery.list(PREFIX) == {PREFIX + "a": b"1"}
        assert lost == [1]
        await lease.revoke()


async def test_a_watch_survives_the_compaction_of_what_it_wanted_next(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        await discovery.put(PREFIX + "a", b"0")
        watching = Watching(discovery)
        await until(lambda: watching.synced)
        server.stop()
        server.start()
        # While the watch is away: changes, and a compaction that swallows them.
        for value in range(20):
            server.ctl("put", PREFIX + "a", str(value))
        server.ctl("put", PREFIX + "b", "1")
        revision = (
            server.ctl("put", PREFIX + "a", "last", "--write-out=json").stdout.split('"revision":')[1].split(",")[0]
        )
        assert server.ctl("compact", revision).returncode == 0
        await until(lambda: watching.state == {PREFIX + "a": b"last", PREFIX + "b": b"1"})
        await discovery.delete(PREFIX + "b")
        await until(lambda: watching.state == {PREFIX + "a": b"last"})
        await watching.stop()


async def test_a_stream_from_a_compacted_revision_ends_instead_of_raising(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        for value in range(5):
            await discovery.put(PREFIX + "a", str(value).encode())
        _, revision = await discovery._list(PREFIX)
        assert server.ctl("compact", str(revision)).returncode == 0
        assert [event async for event in discovery._stream(PREFIX, revision - 2)] == []


async def test_close_ends_watches_and_later_calls_are_refused(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        watching = Watching(discovery)
        await until(lambda: watching.synced)
        await discovery.close()
        await asyncio.wait_for(watching.task, 5)
        with pytest.raises(ControlUnavailableError):
            await discovery.get("x")


async def test_users_with_passwords(tmp_path: Path) -> None:
    require_etcd()
    server = EtcdServer(tmp_path)
    server.start()
    try:
        for words in (("user", "add", "root:se/cret"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
            assert server.ctl(*words).returncode == 0
        address = f"127.0.0.1:{server.client_port}"
        discovery = await EtcdDiscovery.connect(f"etcd://root:se%2Fcret@{address}", connect_timeout_s=5.0)
        lease = await discovery.grant(TTL_S)
        await discovery.put(PREFIX + "a", b"1", lease)
        # A token that the server has forgotten: every kind of call gets a new one.
        discovery._channel.metadata = (("token", "stale.1"),)
        assert await discovery.list(PREFIX) == {PREFIX + "a": b"1"}
        discovery._channel.metadata = (("token", "stale.2"),)
        watching = Watching(discovery)
        await until(lambda: watching.synced)
        discovery._channel.metadata = (("token", "stale.3"),)
        await asyncio.sleep(1.5 * lease.ttl_s)
        assert await discovery.list(PREFIX) == {PREFIX + "a": b"1"}
        await watching.stop()
        await lease.revoke()
        await discovery.close()
        for userinfo in ("root:wrong@", ""):
            with pytest.raises(ConfigError) as caught:
                await EtcdDiscovery.connect(f"etcd://{userinfo}{address}", connect_timeout_s=5.0)
            assert "wrong" not in caught.value.message
    finally:
        server.stop()


async def test_a_server_that_is_not_there_is_one_clear_error_in_time() -> None:
    port = free_port()
    begin = time.monotonic()
    with pytest.raises(ControlUnavailableError) as caught:
        await EtcdDiscovery.connect(f"etcd://127.0.0.1:{port}", namespace="n", connect_timeout_s=0.5)
    assert time.monotonic() - begin < 5
    assert f"127.0.0.1:{port}" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "url", ["http://x:1", "etcd://", "etcd://h:99999999", "etcd://user@h", "etcd://h/path", "etcd://h?x=1", "h:2379"]
)
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        EtcdAddress.parse(url)


def test_urls() -> None:
    assert EtcdAddress.parse("etcd://h") == EtcdAddress("h", 2379, False, None, None)
    assert EtcdAddress.parse("etcds://u:p%40@h:1") == EtcdAddress("h", 1, True, "u", "p@")
    assert EtcdAddress.parse("etcd://[::1]:7").target == "[::1]:7"
    assert "secret" not in repr(EtcdAddress.parse("etcd://u:secret@h"))
