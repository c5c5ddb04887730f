"""EtcdDiscovery against a real server that is restarted, wiped, compacted and asked to revoke leases."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.certificates import make_certificate, make_rsa_keys
from tests.contracts.discovery_contract import eventually_puts, eventually_succeeds
from tests.contracts.waiting import Watching, eventually
from tests.control.etcd_server import EtcdServer, require_etcd, running_etcd
from tests.patience import PATIENCE_S
from tests.ports import free_ports

from kvrelay.control.base import Lease, WatchEvent, WatchKind
from kvrelay.control.etcd import EtcdDiscovery
from kvrelay.control.etcd_channel import EtcdAddress
from kvrelay.control.etcd_lease import EtcdLease
from kvrelay.control.tls import TlsFiles
from kvrelay.errors import ConfigError, ControlUnavailableError, LeaseLostError

pytestmark = pytest.mark.system

PREFIX = "kvrelay/test/workers/"
SETTINGS = "kvrelay/test/config/"
TTL_S = 1.0


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def server(shared_server: EtcdServer) -> EtcdServer:
    """Running, and empty below our prefix."""
    if shared_server.process is None:
        shared_server.start()
    shared_server.ctl("del", "--prefix", "kvrelay/")
    return shared_server


@contextlib.asynccontextmanager
async def connected(server: EtcdServer) -> AsyncIterator[EtcdDiscovery]:
    discovery = await EtcdDiscovery.connect(server.url, namespace="test", connect_timeout_s=PATIENCE_S)
    try:
        yield discovery
    finally:
        await discovery.close()


async def stop(*watches: Watching) -> None:
    for watch in watches:
        watch.task.cancel()
    await asyncio.gather(*(watch.task for watch in watches), return_exceptions=True)


async def test_keys_are_readable_with_etcdctl_and_go_with_their_lease(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        lease = await discovery.grant(TTL_S)
        await eventually_puts(discovery, PREFIX + "a", b'{"role": "decode"}', lease)
        await discovery.put("kvrelay/test/config/x", b"1")
        assert 'workers/a\n{"role": "decode"}' in server.ctl("get", "--prefix", "kvrelay/test/").stdout
        await eventually(lambda: lease.lease_id in server.ctl("lease", "list").stdout)
        await asyncio.sleep(lease.ttl_s * 1.5)
        await eventually_succeeds(discovery, PREFIX + "a", b'{"role": "decode"}')
        await lease.revoke()
        await lease.revoke()
        assert await discovery.list("kvrelay/test/") == {"kvrelay/test/config/x": b"1"}
        with pytest.raises(LeaseLostError):
            await discovery.put(PREFIX + "b", b"", lease)


async def test_a_silent_process_is_gone(server: EtcdServer) -> None:
    async with connected(server) as reader:
        watching = Watching(reader, PREFIX)
        async with connected(server) as dying:
            lease = await dying.grant(2 * TTL_S)
            await dying.put(PREFIX + "a", b"1", lease)
            await eventually(lambda: PREFIX + "a" in watching.state)
        await eventually(lambda: not watching.state)
        await stop(watching)


async def test_a_put_under_a_lease_that_somebody_has_revoked_is_refused(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        lease = await discovery.grant(3600)
        told: list[str] = []
        lease.on_lost(lambda: told.append("lost"))
        lease.on_revoked(lambda: told.append("revoked"))
        await discovery.put(PREFIX + "a", b"1", lease)
        first = lease.lease_id
        server.ctl("lease", "revoke", first)
        with pytest.raises(LeaseLostError):
            await discovery.put(PREFIX + "a", b"2", lease)
        assert told == ["lost", "revoked"]
        await eventually(lambda: lease.lease_id != first and lease.alive_until_s > time.monotonic())
        assert await discovery.list(PREFIX) == {}
        await discovery.put(PREFIX + "b", b"2", lease)
        assert await discovery.list(PREFIX) == {PREFIX + "b": b"2"}
        await lease.revoke()


async def test_a_put_under_a_lease_that_the_server_lost_registers_everything_again(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        lease = await discovery.grant(3600)
        told: list[str] = []
        lease.on_lost(lambda: told.append("lost"))
        lease.on_revoked(lambda: told.append("revoked"))
        await discovery.put(PREFIX + "a", b"1", lease)
        await discovery.put(PREFIX + "gone", b"1", lease)
        await discovery.delete(PREFIX + "gone")
        server.stop()
        server.wipe()
        server.start()
        await put_when_connected(discovery, PREFIX + "b", b"2", lease)
        assert await discovery.list(PREFIX) == {PREFIX + "a": b"1", PREFIX + "b": b"2"}
        assert told == ["lost"]
        await lease.revoke()


async def put_when_connected(discovery: EtcdDiscovery, key: str, value: bytes, lease: Lease | None = None) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await discovery.put(key, value, lease)
            except ControlUnavailableError:
                await asyncio.sleep(0.05)


async def test_a_watch_reports_the_difference_after_a_restart_with_data_kept(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        await discovery.put(SETTINGS + "stays", b"1")
        lease = await discovery.grant(5 * TTL_S)
        await discovery.put(SETTINGS + "leased", b"1", lease)
        watching = Watching(discovery, SETTINGS)
        await eventually(lambda: watching.is_synced)
        server.stop()
        with pytest.raises(ControlUnavailableError):
            await discovery.put(SETTINGS + "stays", b"lost")
        await eventually(lambda: not discovery.is_connected)
        server.start()
        server.ctl("put", SETTINGS + "new", "2")
        await eventually(lambda: watching.state.get(SETTINGS + "new") == b"2")
        await eventually(lambda: discovery.is_connected)
        assert not any(event.kind is WatchKind.DELETE for event in watching.events)
        await discovery.put(SETTINGS + "stays", b"3")
        await eventually(lambda: watching.state.get(SETTINGS + "stays") == b"3")
        assert watching.state == await discovery.list(SETTINGS)
        assert sum(event.kind is WatchKind.SYNCED for event in watching.events) == 1
        await stop(watching)
        await lease.revoke()


async def test_a_server_that_lost_its_data_gets_the_living_back_and_nobody_seems_gone(server: EtcdServer) -> None:
    async with connected(server) as owner, connected(server) as reader:
        lost: list[int] = []
        lease = await owner.grant(10)
        lease.on_lost(lambda: lost.append(1))
        await owner.put(SETTINGS + "a", b"1", lease)
        await owner.put(SETTINGS + "unleased", b"2")
        # As in every process, one watch tells the lease that the server is back.
        own, watching = Watching(owner, SETTINGS), Watching(reader, SETTINGS)
        await eventually(lambda: watching.is_synced and own.is_synced)
        server.stop()
        server.wipe()
        server.start()
        await eventually(lambda: watching.state == {SETTINGS + "a": b"1"} == own.state)
        assert lost == [1]
        assert [event.key for event in watching.events if event.kind is WatchKind.DELETE] == [SETTINGS + "unleased"]
        assert await reader.get(SETTINGS + "a") == b"1"
        await stop(own)
        await stop(watching)
        await lease.revoke()


async def test_a_revocation_is_known_when_the_put_under_the_lease_is_compacted(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        told: list[str] = []
        lease = await discovery.grant(60)
        lease.on_revoked(lambda: told.append("revoked"))
        await discovery.put(SETTINGS + "a", b"1", lease)
        server.ctl("put", SETTINGS + "b", "1")
        made = server.ctl("put", SETTINGS + "b", "2", "--write-out=json").stdout
        assert server.ctl("compact", made.split('"revision":')[1].split(",")[0]).returncode == 0
        server.ctl("lease", "revoke", lease.lease_id)
        assert isinstance(lease, EtcdLease)
        lease.wake()
        await eventually(lambda: told == ["revoked"])


@pytest.mark.parametrize("num_others", [0, 5])
async def test_a_lease_that_was_lost_with_the_data_is_not_taken_for_a_revoked_one(
    server: EtcdServer, num_others: int
) -> None:
    """Also when others have written so much meanwhile that the new server is not behind the old one."""
    async with connected(server) as discovery:
        told: list[str] = []
        lease = await discovery.grant(60)
        lease.on_lost(lambda: told.append("lost"))
        lease.on_revoked(lambda: told.append("revoked"))
        await discovery.put(SETTINGS + "a", b"1", lease)
        server.stop()
        server.wipe()
        server.start()
        for value in range(num_others):
            server.ctl("put", SETTINGS + "b", str(value))
        assert isinstance(lease, EtcdLease)
        lease.wake()
        await eventually(lambda: bool(told))
        async with asyncio.timeout(PATIENCE_S):
            while (await discovery.list(SETTINGS)).get(SETTINGS + "a") != b"1":
                await asyncio.sleep(0.05)
        assert told == ["lost"]
        await lease.revoke()


async def test_a_watch_notices_a_loss_of_data_at_any_moment(server: EtcdServer) -> None:
    """Also between the listing and the stream: on the new server a stream from the old one's next revision would say
    nothing until that revision comes."""
    async with connected(server) as discovery, connected(server) as writer:
        for value in range(50):
            await discovery.put(SETTINGS + "old", str(value).encode())
        async with contextlib.aclosing(discovery.watch(SETTINGS)) as events:
            while (await anext(events)).kind is not WatchKind.SYNCED:
                pass
            server.stop()
            server.wipe()
            server.start()
            async with asyncio.timeout(PATIENCE_S):
                assert await anext(events) == WatchEvent(WatchKind.DELETE, SETTINGS + "old")
                await put_when_connected(writer, SETTINGS + "new", b"1")
                assert await anext(events) == WatchEvent(WatchKind.PUT, SETTINGS + "new", b"1")


async def test_an_outage_longer_than_the_lease_is_a_loss(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        lost: list[str] = []
        lease = await discovery.grant(TTL_S)
        lease.on_lost(lambda: lost.append(lease.lease_id))
        await eventually_puts(discovery, PREFIX + "a", b"1", lease)
        server.stop()
        await eventually(lambda: lease.lease_id in lost)
        server.start()
        await eventually(lambda: lease.lease_id not in lost)
        await asyncio.sleep(1.5 * lease.ttl_s)
        await eventually_succeeds(discovery, PREFIX + "a", b"1")
        assert len(lost) == len(set(lost)), "each lease is lost once"
        await lease.revoke()


async def test_a_watch_survives_the_compaction_of_what_it_wanted_next(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        await discovery.put(SETTINGS + "a", b"0")
        watching = Watching(discovery, SETTINGS)
        await eventually(lambda: watching.is_synced)
        server.stop()
        server.start()
        # While the watch is away: changes, and a compaction that swallows them.
        for value in range(20):
            server.ctl("put", SETTINGS + "a", str(value))
        server.ctl("put", SETTINGS + "b", "1")
        revision = (
            server.ctl("put", SETTINGS + "a", "last", "--write-out=json").stdout.split('"revision":')[1].split(",")[0]
        )
        assert server.ctl("compact", revision).returncode == 0
        await eventually(lambda: watching.state == {SETTINGS + "a": b"last", SETTINGS + "b": b"1"})
        await discovery.delete(SETTINGS + "b")
        await eventually(lambda: watching.state == {SETTINGS + "a": b"last"})
        await stop(watching)


async def test_close_ends_watches_and_later_calls_are_refused(server: EtcdServer) -> None:
    async with connected(server) as discovery:
        watching = Watching(discovery, PREFIX)
        await eventually(lambda: watching.is_synced)
        await discovery.close()
        await asyncio.wait_for(watching.task, PATIENCE_S)
        with pytest.raises(ControlUnavailableError):
            await discovery.get("x")


@pytest.mark.parametrize("num_turns", range(9))
async def test_close_ends_a_watch_that_is_only_beginning(server: EtcdServer, num_turns: int) -> None:
    """So many turns of the event loop after its stream was opened."""
    async with connected(server) as discovery:
        stub = discovery.channel.watches
        closing: list[asyncio.Task[None]] = []

        async def close() -> None:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await discovery.close()

        class Watches:
            def Watch(self, **settings: object) -> object:
                call = stub.Watch(**settings)
                closing.append(asyncio.create_task(close()))
                return call

        discovery.channel.watches = Watches()
        await asyncio.wait_for(Watching(discovery, PREFIX).task, PATIENCE_S)
        await asyncio.gather(*closing)


async def test_expired_tokens_are_renewed_and_wrong_passwords_refused(tmp_path: Path) -> None:
    require_etcd()
    server = EtcdServer(tmp_path)
    server.start()
    try:
        for words in (("user", "add", "root:se/cret"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
            assert server.ctl(*words).returncode == 0
        address = f"127.0.0.1:{server.client_port}"
        discovery = await EtcdDiscovery.connect(f"etcd://root:se%2Fcret@{address}", connect_timeout_s=PATIENCE_S)
        lease = await discovery.grant(TTL_S)
        await discovery.put(PREFIX + "a", b"1", lease)
        # A token that the server has forgotten: every kind of call gets a new one.
        discovery.channel.metadata = (("token", "stale.1"),)
        await eventually_succeeds(discovery, PREFIX + "a", b"1")
        discovery.channel.metadata = (("token", "stale.2"),)
        watching = Watching(discovery, PREFIX)
        await eventually(lambda: watching.is_synced)
        discovery.channel.metadata = (("token", "stale.3"),)
        await asyncio.sleep(1.5 * lease.ttl_s)
        await eventually_succeeds(discovery, PREFIX + "a", b"1")
        await stop(watching)
        await lease.revoke()
        await discovery.close()
        for userinfo in ("root:wrong@", ""):
            with pytest.raises(ConfigError) as caught:
                await EtcdDiscovery.connect(f"etcd://{userinfo}{address}", connect_timeout_s=PATIENCE_S)
            assert "wrong" not in caught.value.message
    finally:
        server.stop()


async def test_a_change_of_roles_is_no_more_than_an_outage(tmp_path: Path) -> None:
    """With JWTs, which any change of users or roles makes invalid."""
    require_etcd()
    public, private = make_rsa_keys(tmp_path)
    server = EtcdServer(
        tmp_path, flags=[f"--auth-token=jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=10m"]
    )
    server.start()
    kv = ("kv", "readwrite", "kvrelay/")
    try:
        for words in (
            ("user", "add", "root:secret"),
            ("user", "grant-role", "root", "root"),
            ("role", "add", "kv"),
            ("role", "grant-permission", "--prefix=true", *kv),
            ("user", "add", "worker:secret"),
            ("user", "grant-role", "worker", "kv"),
            ("auth", "enable"),
        ):
            assert server.ctl(*words).returncode == 0
        url = f"etcd://worker:secret@127.0.0.1:{server.client_port}"
        discovery = await EtcdDiscovery.connect(url, connect_timeout_s=PATIENCE_S)
        await discovery.put(SETTINGS + "a", b"1")
        root = "--user=root:secret"
        assert server.ctl(root, "user", "add", "other:secret").returncode == 0
        assert await discovery.list(SETTINGS) == {SETTINGS + "a": b"1"}
        revoke = ("role", "revoke-permission", "--prefix=true", "kv", "kvrelay/")
        assert server.ctl(root, *revoke).returncode == 0
        with pytest.raises(ControlUnavailableError, match="refuses: etcdserver: permission denied"):
            await discovery.list(SETTINGS)
        watching = Watching(discovery, SETTINGS)
        await asyncio.sleep(0.5)
        assert not watching.task.done()
        assert server.ctl(root, "role", "grant-permission", "--prefix=true", *kv).returncode == 0
        await eventually(lambda: watching.state == {SETTINGS + "a": b"1"})
        await stop(watching)
        await discovery.close()
    finally:
        server.stop()


async def test_server_and_client_verify_each_others_certificates(tmp_path: Path) -> None:
    require_etcd()
    (tmp_path / "other").mkdir()
    certificate, key = make_certificate(tmp_path)
    other, other_key = make_certificate(tmp_path / "other")
    server = EtcdServer(tmp_path, tls=(certificate, key))
    server.start()
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    try:
        for files in (f"ca={certificate}&cert={certificate}&key={key}", f"ca={certificate}&cert={both}"):
            discovery = await EtcdDiscovery.connect(f"{server.url}?{files}", connect_timeout_s=PATIENCE_S)
            lease = await discovery.grant(TTL_S)
            await discovery.put(PREFIX + "a", b"1", lease)
            assert server.ctl("get", "--print-value-only", PREFIX + "a").stdout == "1\n"
            await lease.revoke()
            await discovery.close()
        for files in (f"ca={certificate}", f"ca={certificate}&cert={other}&key={other_key}", f"ca={other}&cert={both}"):
            with pytest.raises(ControlUnavailableError, match="cannot be reached") as caught:
                await EtcdDiscovery.connect(f"{server.url}?{files}", connect_timeout_s=2.0)
            assert "\n" not in caught.value.message
    finally:
        server.stop()


async def test_unusable_certificates_are_refused_by_name(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "nonsense.pem").write_text("nonsense")
    for files, reason in (
        (f"ca={tmp_path}/none.pem", "cannot read .*none.pem of the discovery URL: No such file"),
        (f"ca={tmp_path}", "cannot read .*: Is a directory"),
        (f"cert={certificate}&key={tmp_path}/none.key", "none.key"),
        (f"ca={tmp_path}/nonsense.pem", "cannot use the TLS files of the discovery URL"),
        (f"cert={certificate}", "cannot use the TLS files"),
        (f"key={key}", "a key without a cert"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            await EtcdDiscovery.connect(f"etcds://127.0.0.1:1?{files}", connect_timeout_s=0.5)
        assert "\n" not in caught.value.message


async def test_a_server_that_is_not_there_is_one_clear_error_in_time() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ControlUnavailableError) as caught:
        await EtcdDiscovery.connect(f"etcd://127.0.0.1:{port}", namespace="n", connect_timeout_s=0.5)
    assert f"127.0.0.1:{port}" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "http://x:1",
        "etcd://",
        "etcd://h:99999999",
        "etcd://user@h",
        "etcd://h/path",
        "etcd://h?x=1",
        "etcd://h?ca=ca.pem",
        "etcds://h?ca=ca.pem&x=1",
        "h:2379",
    ],
)
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        EtcdAddress.parse(url)


def test_a_url_is_parsed_into_host_port_and_credentials() -> None:
    assert EtcdAddress.parse("etcd://h") == EtcdAddress("h", 2379, None, None, None)
    assert EtcdAddress.parse("etcds://u:p%40@h:1") == EtcdAddress("h", 1, TlsFiles("discovery"), "u", "p@")
    files = TlsFiles("discovery", ca="a b.pem", cert="c", key="k")
    assert EtcdAddress.parse("etcds://h?ca=a%20b.pem&cert=c&key=k") == EtcdAddress("h", 2379, files, None, None)
    assert EtcdAddress.parse("etcd://[::1]:7").target == "[::1]:7"
    assert "secret" not in repr(EtcdAddress.parse("etcd://u:secret@h"))
