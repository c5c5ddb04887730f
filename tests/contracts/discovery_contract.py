"""What every Discovery does. A subclass brings the fixture ``open_server``; see ``DiscoveryServer``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pytest
from tests.contracts.waiting import eventually, watching
from tests.patience import PATIENCE_S

from kvrelay.control.base import Discovery, Lease, WatchEvent, WatchKind
from kvrelay.errors import ControlUnavailableError, LeaseLostError

ROOT = "kvrelay/test/"
WORKERS = f"{ROOT}workers/"
SETTINGS = f"{ROOT}config/"
KINDS_UNDER_A_LEASE = ("workers/w", "kv_metadata/w/0", "frontends/f", "operators/o", "anything", "workers/config/x")


class DiscoveryServer(Protocol):
    """A server, or what stands for one, that the suite may mistreat."""

    ttl_s: float
    """A short lease time that this server honours. A busy machine may be late with the keepalives of such a lease: a
    test counts with a loss of which the holder is told."""

    async def connect(self) -> Discovery:
        """As another process."""

    async def disconnect(self, discovery: Discovery) -> None:
        """That process dies without a word: leases are not revoked."""

    async def revoke_lease(self, lease: Lease) -> None:
        """As an operator with the server's own tool."""

    async def go_away(self) -> None: ...

    async def come_back(self, *, is_wiped: bool) -> None: ...


OpenServer = Callable[[], AbstractAsyncContextManager[DiscoveryServer]]


class DiscoveryContract:
    """The suite."""

    def test_values_are_put_listed_and_deleted(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease, other = await one.grant(60.0), await two.grant(60.0)
            await one.put(f"{WORKERS}b", b"\x00binary\xff", lease)
            await one.put(f"{WORKERS}a", b"{}", lease)
            await one.put(f"{ROOT}config/x", b"1")
            assert await two.get(f"{WORKERS}b") == b"\x00binary\xff"
            assert await two.get(f"{WORKERS}c") is None
            assert await two.list(WORKERS) == {f"{WORKERS}a": b"{}", f"{WORKERS}b": b"\x00binary\xff"}
            await two.put(f"{WORKERS}a", b"new", other)
            await two.delete(f"{WORKERS}b")
            await two.delete(f"{WORKERS}never was")
            assert await one.list(ROOT) == {f"{ROOT}config/x": b"1", f"{WORKERS}a": b"new"}

        run(open_server, scenario)

    def test_keys_of_any_text(self, open_server: OpenServer) -> None:
        keys = [f"{SETTINGS}{name}" for name in ("a.b", ".", "..c", "d e", "f:1", "g=h", "*", ">", "ü/Ω", "i%2F", "-_")]

        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            for key in keys:
                await one.put(key, key.encode())
            assert await two.list(SETTINGS) == {key: key.encode() for key in keys}
            assert [await two.get(key) for key in keys] == [key.encode() for key in keys]
            for key in keys:
                await two.delete(key)
            assert await one.list(SETTINGS) == {}

        run(open_server, scenario)

    def test_a_read_sees_what_others_have_written_before(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease = await one.grant(60.0)
            for number in range(50):
                await one.put(f"{WORKERS}w", str(number).encode(), lease)
                assert await two.get(f"{WORKERS}w") == str(number).encode()

        run(open_server, scenario)

    def test_a_watch_starts_with_what_is_there_and_goes_on(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease = await one.grant(60.0)
            await one.put(f"{WORKERS}a", b"1", lease)
            await one.put(f"{WORKERS}b", b"2", lease)
            await one.put(f"{ROOT}config/x", b"3")
            async with watching(two, WORKERS) as watch, watching(two, WORKERS) as second:
                start = {(event.kind, event.key, event.value) for event in watch.events[:2]}
                assert start == {(WatchKind.PUT, f"{WORKERS}a", b"1"), (WatchKind.PUT, f"{WORKERS}b", b"2")}
                assert watch.events[2:] == [WatchEvent(WatchKind.SYNCED, "")]
                await one.put(f"{WORKERS}c", b"4", lease)
                await one.put(f"{ROOT}config/x", b"5")
                await one.put(f"{WORKERS}a", b"6", lease)
                await one.delete(f"{WORKERS}b")
                await eventually(lambda: len(watch.events) == 6 and len(second.events) == 6)
                assert watch.events[3:] == [
                    WatchEvent(WatchKind.PUT, f"{WORKERS}c", b"4"),
                    WatchEvent(WatchKind.PUT, f"{WORKERS}a", b"6"),
                    WatchEvent(WatchKind.DELETE, f"{WORKERS}b"),
                ]
                assert second.state == watch.state == {f"{WORKERS}a": b"6", f"{WORKERS}c": b"4"}

        run(open_server, scenario)

    def test_revoking_a_lease_takes_its_keys_along(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease = await one.grant(60.0)
            await one.put(f"{WORKERS}a", b"1", lease)
            await one.put(f"{WORKERS}b", b"2", lease)
            await one.put(f"{ROOT}config/x", b"3")
            async with watching(two, ROOT) as watch:
                assert len(watch.state) == 3
                await lease.revoke()
                await eventually(lambda: watch.state == {f"{ROOT}config/x": b"3"})
                await lease.revoke()
            assert await two.list(ROOT) == {f"{ROOT}config/x": b"3"}
            with pytest.raises(LeaseLostError):
                await one.put(f"{WORKERS}a", b"1", lease)

        run(open_server, scenario)

    def test_the_last_put_decides_about_the_lease(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one = await server.connect()
            first, second = await one.grant(60.0), await one.grant(60.0)
            await one.put(f"{SETTINGS}free", b"1", first)
            await one.put(f"{SETTINGS}free", b"2")
            await one.put(f"{WORKERS}moved", b"3", first)
            await one.put(f"{WORKERS}moved", b"4", second)
            await first.revoke()
            assert await one.list(ROOT) == {f"{SETTINGS}free": b"2", f"{WORKERS}moved": b"4"}
            await second.revoke()
            assert await one.list(ROOT) == {f"{SETTINGS}free": b"2"}

        run(open_server, scenario)

    def test_only_settings_count_without_a_lease(self, open_server: OpenServer) -> None:
        """Any other entry would count for ever after its process has ended."""

        async def scenario(server: DiscoveryServer) -> None:
            rogue, one, late = await server.connect(), await server.connect(), await server.connect()
            async with watching(one, ROOT) as watch:
                for kind in KINDS_UNDER_A_LEASE:
                    await rogue.put(f"{ROOT}{kind}", b"1")
                    await rogue.put(f"{ROOT}{kind}", b"2")
                await rogue.put(f"{SETTINGS}x", b"3")
                await eventually(lambda: watch.state == {f"{SETTINGS}x": b"3"})
                assert one.num_unleased == len(KINDS_UNDER_A_LEASE)
                assert watch.num_deletes == 0
            assert await late.list(ROOT) == {f"{SETTINGS}x": b"3"}
            assert [await late.get(f"{ROOT}{kind}") for kind in KINDS_UNDER_A_LEASE] == [None] * len(
                KINDS_UNDER_A_LEASE
            )
            async with watching(late, ROOT) as watch:
                assert watch.state == {f"{SETTINGS}x": b"3"}
            assert late.num_unleased == len(KINDS_UNDER_A_LEASE)

        run(open_server, scenario)

    def test_an_entry_that_is_replaced_without_a_lease_ends(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            rogue, one, two = await server.connect(), await server.connect(), await server.connect()
            lease = await one.grant(60.0)
            await one.put(f"{WORKERS}w", b"1", lease)
            async with watching(two, WORKERS) as watch:
                assert watch.state == {f"{WORKERS}w": b"1"}
                await rogue.put(f"{WORKERS}w", b"1")
                await eventually(lambda: watch.state == {})
                assert await one.get(f"{WORKERS}w") is None
                await one.put(f"{WORKERS}w", b"1", lease)
                await eventually(lambda: watch.state == {f"{WORKERS}w": b"1"})
                await lease.revoke()
                await eventually(lambda: watch.state == {})
            assert two.num_unleased == 1

        run(open_server, scenario)

    def test_a_lease_that_is_revoked_between_read_and_watch_takes_its_keys_along(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease = await one.grant(60.0)
            await one.put(f"{WORKERS}w", b"1", lease)
            assert await two.list(WORKERS) == {f"{WORKERS}w": b"1"}
            await server.revoke_lease(lease)
            async with watching(two, WORKERS) as watch:
                await eventually(lambda: watch.state == {})
            assert await two.get(f"{WORKERS}w") is None

        run(open_server, scenario)

    def test_a_lease_lives_while_its_process_does(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two, third = await server.connect(), await server.connect(), await server.connect()
            kept = await one.grant(server.ttl_s)
            ended = await third.grant(server.ttl_s)
            told = listen(kept)
            await eventually_puts(one, f"{WORKERS}lives", b"1", kept)
            await eventually_puts(third, f"{WORKERS}dies", b"2", ended)
            async with watching(two, WORKERS) as watch:
                await eventually(lambda: f"{WORKERS}dies" in watch.state)
                alive_until_s, num_deletes = ended.alive_until_s, watch.num_deletes
                await server.disconnect(third)
                await eventually(lambda: f"{WORKERS}dies" not in watch.state)
                # Nobody counts it as dead before it would have done so itself.
                assert time.monotonic() >= alive_until_s
                await asyncio.sleep(kept.ttl_s)
                await eventually(lambda: watch.state == {f"{WORKERS}lives": b"1"})
                await eventually(lambda: watch.num_deletes <= num_deletes + 1 + len(told))
            await eventually_succeeds(await server.connect(), f"{WORKERS}lives", b"1")

        run(open_server, scenario)

    def test_a_newcomer_sees_nothing_of_the_dead(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one = await server.connect()
            lease = await one.grant(server.ttl_s)
            await eventually_puts(one, f"{WORKERS}w", b"1", lease)
            await server.disconnect(one)
            await asyncio.sleep(1.5 * lease.ttl_s)
            newcomer = await server.connect()
            assert await newcomer.list(WORKERS) == {}
            assert await newcomer.get(f"{WORKERS}w") is None
            async with watching(newcomer, WORKERS) as watch:
                assert watch.events == [WatchEvent(WatchKind.SYNCED, "")]

        run(open_server, scenario)

    def test_a_lost_lease_is_granted_again_with_its_keys(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease = await one.grant(server.ttl_s)
            told = listen(lease)
            await eventually_puts(one, f"{WORKERS}w", b"1", lease)
            await eventually_puts(one, f"{WORKERS}gone", b"1", lease)
            await one.delete(f"{WORKERS}gone")
            first_id = lease.lease_id
            async with watching(two, WORKERS) as watch:
                await server.go_away()
                await server.come_back(is_wiped=True)
                await eventually(lambda: bool(told) and lease.lease_id not in ("", first_id))
                await eventually_succeeds(two, f"{WORKERS}w", b"1")
                await eventually(lambda: watch.state == {f"{WORKERS}w": b"1"})
                assert set(told) == {"lost"}
                await lease.revoke()
                await eventually(lambda: watch.state == {})

        run(open_server, scenario)

    def test_the_keys_of_a_revoked_lease_do_not_return(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease = await one.grant(server.ttl_s)
            told = listen(lease)
            await eventually_puts(one, f"{WORKERS}w", b"1", lease)
            await eventually_puts(one, f"{ROOT}metadata/w", b"2", lease)
            await one.put(f"{SETTINGS}other", b"3")
            async with watching(two, ROOT) as watch:
                await eventually(lambda: len(watch.state) == 3)
                first_id = lease.lease_id
                await revoke(server, lease, told)
                await eventually(lambda: watch.state == {f"{SETTINGS}other": b"3"})
                assert told[-2:] == ["lost", "revoked"]
                # Who leaves may have something to finish.
                await eventually(lambda: lease.lease_id not in ("", first_id))
                await eventually(lambda: lease.alive_until_s > time.monotonic())
                await asyncio.sleep(1.2 * lease.ttl_s)
                assert watch.state == {f"{SETTINGS}other": b"3"}
                assert told.count("revoked") == 1
                await eventually_puts(one, f"{WORKERS}w", b"4", lease)
                await eventually(lambda: watch.state == {f"{WORKERS}w": b"4", f"{SETTINGS}other": b"3"})
                await revoke(server, lease, told)
            assert await (await server.connect()).list(ROOT) == {f"{SETTINGS}other": b"3"}

        run(open_server, scenario)

    def test_an_operator_revokes_the_lease_of_an_entry(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, operator = await server.connect(), await server.connect()
            lease, other = await one.grant(60.0), await one.grant(60.0)
            told, told_other = listen(lease), listen(other)
            await one.put(f"{WORKERS}w", b"no JSON", lease)
            await one.put(f"{ROOT}kv_metadata/w/0", b"2", lease)
            await one.put(f"{WORKERS}w2", b"3", other)
            await one.put(f"{SETTINGS}x", b"4")
            async with watching(one, ROOT) as watch:
                for wrong in (WORKERS, f"{WORKERS}w/0", f"{WORKERS}never was", f"{SETTINGS}x"):
                    assert not await operator.revoke_lease_of(wrong)
                assert await operator.revoke_lease_of(f"{WORKERS}w")
                await eventually(lambda: watch.state == {f"{WORKERS}w2": b"3", f"{SETTINGS}x": b"4"})
                await eventually(lambda: told == ["lost", "revoked"])
                assert not await operator.revoke_lease_of(f"{WORKERS}w"), "it has ended"
            assert told_other == []

        run(open_server, scenario)

    def test_the_lease_of_a_process_that_is_gone_is_revoked(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, operator = await server.connect(), await server.connect()
            lease = await one.grant(3600.0)
            await one.put(f"{WORKERS}w", b"1", lease)
            await server.disconnect(one)
            async with watching(operator, WORKERS) as watch:
                assert watch.state == {f"{WORKERS}w": b"1"}
                assert await operator.revoke_lease_of(f"{WORKERS}w")
                await eventually(lambda: watch.state == {})
            assert await (await server.connect()).list(WORKERS) == {}

        run(open_server, scenario)

    def test_a_holder_that_watches_its_keys_gets_notice_of_a_revocation_at_once(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one = await server.connect()
            lease = await one.grant(3600.0)
            told = listen(lease)
            await one.put(f"{WORKERS}w", b"1", lease)
            async with watching(one, WORKERS):
                await server.revoke_lease(lease)
                await eventually(lambda: told == ["lost", "revoked"])

        run(open_server, scenario)

    def test_a_process_that_is_cut_off_knows_by_itself_that_its_lease_is_lost(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one = await server.connect()
            lease = await one.grant(server.ttl_s)
            await eventually_puts(one, f"{WORKERS}w", b"1", lease)
            lost: list[float] = []
            before_s = time.monotonic()
            assert lease.alive_until_s <= before_s + lease.ttl_s
            await eventually(lambda: lease.alive_until_s > before_s + lease.ttl_s)
            last_s = lease.alive_until_s
            lease.on_lost(lambda: lost.append(lease.alive_until_s))
            told = listen(lease)
            await server.go_away()
            await eventually(lambda: bool(lost))
            assert lost == [-math.inf]
            assert time.monotonic() >= last_s
            assert lease.alive_until_s == -math.inf
            await server.come_back(is_wiped=False)
            await eventually(lambda: lease.alive_until_s > time.monotonic())
            await eventually_succeeds(one, f"{WORKERS}w", b"1")
            assert set(lost) == {-math.inf}
            assert set(told) == {"lost"}
            await lease.revoke()
            assert lease.alive_until_s == -math.inf

        run(open_server, scenario)

    def test_without_a_server_everything_fails_at_once(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one = await server.connect()
            await one.put(f"{SETTINGS}x", b"1")
            await server.go_away()
            await asyncio.sleep(0.2)
            for call in (one.get(f"{SETTINGS}x"), one.list(WORKERS), one.put(f"{SETTINGS}x", b"2"), one.grant(1.0)):
                with pytest.raises(ControlUnavailableError):
                    await asyncio.wait_for(call, PATIENCE_S)
            await server.come_back(is_wiped=False)
            await eventually_succeeds(one, f"{SETTINGS}x", b"1")

        run(open_server, scenario)

    def test_a_restart_of_the_server_is_not_noticed(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease = await one.grant(server.ttl_s)
            told = listen(lease)
            await eventually_puts(one, f"{WORKERS}w", b"1", lease)
            async with watching(two, WORKERS) as watch:
                await server.go_away()
                await server.come_back(is_wiped=False)
                await eventually_succeeds(one, f"{WORKERS}w", b"1")
                await eventually_puts(one, f"{WORKERS}x", b"2", lease)
                await eventually(lambda: f"{WORKERS}x" in watch.state)
                await eventually(lambda: watch.num_deletes <= len(told))
                assert "revoked" not in told

        run(open_server, scenario)

    def test_a_wiped_server_gets_everything_again(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease, other = await one.grant(server.ttl_s), await one.grant(60.0)
            told = listen(lease)
            await eventually_puts(one, f"{WORKERS}w", b"1", lease)
            await one.put(f"{ROOT}config/x", b"2")
            async with watching(two, ROOT) as watch:
                await server.go_away()
                with pytest.raises(ControlUnavailableError):
                    await one.put(f"{WORKERS}w", b"3", other)
                await server.come_back(is_wiped=True)
                await eventually(lambda: bool(told))
                await eventually(lambda: watch.state == {f"{WORKERS}w": b"1"})
                await eventually_succeeds(two, f"{WORKERS}w", b"1")
                await asyncio.sleep(1.2 * lease.ttl_s)
                await eventually(lambda: watch.state == {f"{WORKERS}w": b"1"})
                assert "revoked" not in told

        run(open_server, scenario)

    def test_a_process_that_died_during_a_server_outage_is_reported(self, open_server: OpenServer) -> None:
        async def scenario(server: DiscoveryServer) -> None:
            one, two = await server.connect(), await server.connect()
            lease = await one.grant(server.ttl_s)
            await eventually_puts(one, f"{WORKERS}w", b"1", lease)
            async with watching(two, WORKERS) as watch:
                await server.go_away()
                await server.disconnect(one)
                await server.come_back(is_wiped=False)
                await eventually(lambda: watch.state == {})

        run(open_server, scenario)


async def revoke(server: DiscoveryServer, lease: Lease, told: list[str]) -> None:
    """As an operator does it, until the holder has understood: with etcd, one that stood still for a whole lease cannot
    tell that it was revoked."""
    num_revoked = told.count("revoked")
    while told.count("revoked") == num_revoked:
        old_id = lease.lease_id
        await server.revoke_lease(lease)
        await eventually(lambda: lease.lease_id not in ("", old_id))  # noqa: B023


def listen(lease: Lease) -> list[str]:
    """What its callbacks are told."""
    told: list[str] = []
    lease.on_lost(lambda: told.append("lost"))
    lease.on_revoked(lambda: told.append("revoked"))
    return told


async def eventually_puts(discovery: Discovery, key: str, value: bytes, lease: Lease) -> None:
    """A short lease may be lost at any time, and is granted again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(ControlUnavailableError):
                await discovery.put(key, value, lease)
                return
            await asyncio.sleep(0.05)


async def eventually_succeeds(discovery: Discovery, key: str, value: bytes) -> None:
    """The connection comes back by itself, and then the key has the value."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(ControlUnavailableError):
                if await discovery.get(key) == value:
                    return
            await asyncio.sleep(0.05)


def run(open_server: OpenServer, scenario: Callable[[DiscoveryServer], Awaitable[None]]) -> None:
    """Play a scenario with a server of its own."""

    async def play() -> None:
        async with open_server() as server:
            await scenario(server)

    asyncio.run(play())
