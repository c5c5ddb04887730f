"""``deploy/nats.conf`` on a real server: every role does its work, and is refused what is not its work."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.contracts.prefill_queue_contract import PARTITION, prefill
from tests.contracts.waiting import eventually, watching
from tests.control.configured_server import configured_server

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.control.nats.connection import NatsConnection, NatsMessage
from kvrelay.control.nats.discovery import NatsDiscovery
from kvrelay.control.nats.keeper_election import KeeperState
from kvrelay.control.nats.plane import NatsControlPlane

CONFIG = Path(__file__).parents[2] / "deploy" / "nats.conf"
KEYS = Keys("default")
TTL_S = 1.0
BUCKET = "$KV.kvrelay_default.kvrelay.default."
WORKER = KEYS.worker("w")

FORBIDDEN = {
    "frontend": [
        f"{BUCKET}workers.w",
        f"{BUCKET}kv_metadata.w.0",
        f"{BUCKET}operators.o",
        f"{BUCKET}planners.p",
        f"{BUCKET}hosts.h",
        f"{BUCKET}orders.h.1",
        f"{BUCKET}config.disagg=2Emax_local_prefill_length",
        "kvrelay.default.lease_keeper",
        f"kvrelay.default.prefill.queue.{PARTITION}",
        "kvrelay.default.load.w",
        "kvrelay.default.kv_events.w",
        f"$JS.API.CONSUMER.MSG.NEXT.kvrelay_default_prefill.prefill_{PARTITION}",
        "$JS.API.CONSUMER.CREATE.kvrelay_default_prefill.spy",
        "$JS.API.STREAM.CREATE.KV_kvrelay_default",
        "$JS.API.STREAM.DELETE.KV_kvrelay_default",
        "$JS.API.STREAM.PURGE.KV_kvrelay_default",
        "$JS.API.STREAM.UPDATE.KV_kvrelay_default",
        "_INBOX_worker.x",
    ],
    "worker": [
        "kvrelay.default.figures.f",
        "kvrelay.default.requests.f",
        f"{BUCKET}frontends.f",
        f"{BUCKET}operators.o",
        f"{BUCKET}planners.p",
        f"{BUCKET}adapters.sql",
        f"{BUCKET}config.disagg=2Emax_local_prefill_length",
        "$JS.API.STREAM.DELETE.KV_kvrelay_default",
        "$JS.API.STREAM.PURGE.kvrelay_default_prefill",
        "$JS.API.STREAM.UPDATE.kvrelay_default_prefill",
        "$JS.API.CONSUMER.DELETE.kvrelay_default_prefill.x",
        "_INBOX_frontend.x",
    ],
    "operator": [
        f"kvrelay.default.prefill.queue.{PARTITION}",
        "kvrelay.default.load.w",
        "kvrelay.default.kv_events.w",
        "_INBOX_worker.x",
    ],
}
UNHEARD = {
    "frontend": [
        "_INBOX.>",
        "_INBOX_worker.>",
        ">",
        "kvrelay.default.prefill.queue.*",
        "$KV.>",
        "kvrelay.default.replay.*",
    ],
    "worker": [
        "_INBOX_frontend.>",
        "_INBOX_operator.>",
        ">",
        "kvrelay.default.kv_events.*",
        "kvrelay.default.load.*",
        "kvrelay.default.figures.*",
        "kvrelay.default.requests.*",
    ],
    "operator": ["_INBOX_frontend.>", "_INBOX_worker.>", ">", "kvrelay.default.load.*"],
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with configured_server(tmp_path_factory.mktemp("roles"), CONFIG.read_text()) as address:
        # The streams are a worker's to make.
        asyncio.run(_make_streams(address))
        yield address


async def _make_streams(address: str) -> None:
    async with role(address, "worker"):
        pass


def url_of(address: str, name: str) -> str:
    return f"nats://{name}:change-me-{name}@{address}"


@asynccontextmanager
async def role(address: str, name: str) -> AsyncIterator[ControlPlane]:
    plane = await connect_control(ControlConfig(control=url_of(address, name), connect_timeout_s=10.0))
    try:
        yield plane
    finally:
        await plane.close()


def refusals(plane: ControlPlane) -> set[str]:
    assert isinstance(plane, NatsControlPlane)
    return plane.connection.denied


async def test_every_role_does_its_work(address: str) -> None:
    async with (
        role(address, "worker") as worker,
        role(address, "worker") as other,
        role(address, "frontend") as frontend,
        role(address, "frontend") as asking,
    ):
        lease = await worker.discovery.grant(TTL_S)
        await worker.discovery.put(WORKER, b"{}", lease)
        await worker.discovery.put(KEYS.worker_kv_metadata("w", 0), b"{}", lease)
        events: list[bytes] = []
        load: list[bytes] = []
        await frontend.events.subscribe(KEYS.kv_events, lambda _, data: events.append(data))
        await frontend.events.subscribe(KEYS.load_metrics, lambda _, data: load.append(data))
        await worker.events.serve(KEYS.worker_replay("w"), _shout)
        async with (
            watching(frontend.discovery, KEYS.workers) as seen,
            watching(worker.discovery, KEYS.config) as settings,
            watching(other.discovery, KEYS.kv_metadata) as memory,
        ):
            assert seen.state == {WORKER: b"{}"}
            own = await frontend.discovery.grant(60.0)
            await frontend.discovery.put(KEYS.frontend("f"), b"{}", own)
            assert await worker.discovery.get(KEYS.frontend("f")) == b"{}"
            await own.revoke()
            await frontend.discovery.put(KEYS.adapter("org/sql"), b"{}")
            assert await worker.discovery.list(KEYS.adapters) == {KEYS.adapter("org/sql"): b"{}"}
            await frontend.discovery.delete(KEYS.adapter("org/sql"))
            assert memory.state == {KEYS.worker_kv_metadata("w", 0): b"{}"}
            await worker.events.publish(KEYS.worker_kv_events("w"), b"event")
            await worker.events.publish(KEYS.worker_load("w"), b"load")
            await eventually(lambda: (events, load) == ([b"event"], [b"load"]))
            assert await frontend.events.request(KEYS.worker_replay("w"), b"ping", 5.0) == b"PING"
            for subject in (KEYS.frontend_figures("f"), KEYS.frontend_requests("f")):
                await frontend.events.serve(subject, _shout)
                assert await asking.events.request(subject, b"ping", 5.0) == b"PING"
            await worker.prefill_queue.push(prefill("h", timeout_s=60.0))
            assert await worker.prefill_queue.size(PARTITION) == 1
            assert await frontend.prefill_queue.size() == 1
            delivery = await other.prefill_queue.pull(PARTITION, 10.0)
            assert delivery is not None
            await delivery.in_progress()
            await delivery.ack()
            async with role(address, "operator") as operator:
                assert await operator.discovery.list(KEYS.workers) == {WORKER: b"{}"}
                assert await operator.prefill_queue.size() == 0
                caller = await operator.discovery.grant(60.0)
                await operator.discovery.put(KEYS.operator("o"), b"{}", caller)
                assert await worker.discovery.get(KEYS.operator("o")) == b"{}"
                await caller.revoke()
                await operator.discovery.put(KEYS.config_value("disagg.x"), b"1")
                await eventually(lambda: bool(settings.state))
                await operator.discovery.delete(KEYS.config_value("disagg.x"))
                await eventually(lambda: not settings.state)
                assert await operator.discovery.revoke_lease_of(WORKER)
            await eventually(lambda: not seen.state)
        assert refusals(worker) == refusals(other) == set()
        # A frontend that hears no keeper of leases for a while offers to be it, once.
        assert refusals(frontend) | refusals(asking) <= {KEYS.lease_keeper}


async def _shout(data: bytes) -> bytes:
    return data.upper()


@pytest.mark.parametrize("busy_s", [0.0, 1.5 * TTL_S])
async def test_a_frontend_leaves_it_to_the_workers_to_end_a_lease(address: str, busy_s: float) -> None:
    """It hears of the dead like everybody else, as long as a worker is there, and it is never the keeper.

    If it was busy for longer than a lease, it learns at one time that the lease is overdue, that nobody keeps leases,
    and that it may not either."""
    async with role(address, "frontend") as frontend, watching(frontend.discovery, KEYS.workers) as seen:
        async with role(address, "worker") as dying:
            lease = await dying.discovery.grant(TTL_S)
            await dying.discovery.put(WORKER, b"{}", lease)
            await eventually(lambda: bool(seen.state))
        time.sleep(busy_s)  # noqa: ASYNC251
        assert isinstance(frontend.discovery, NatsDiscovery)
        election = frontend.discovery.mirror.election
        await eventually(lambda: not election.may_keep, 30.0)
        await asyncio.sleep(TTL_S)
        assert seen.state == {WORKER: b"{}"}
        async with role(address, "worker") as other:
            await other.discovery.list(KEYS.workers)
            await eventually(lambda: not seen.state, 30.0)


@pytest.mark.parametrize("name", list(FORBIDDEN))
async def test_a_role_is_refused_what_is_not_its_work(address: str, name: str) -> None:
    connection = await NatsConnection.connect(url_of(address, name), 10.0)
    try:
        for subject in FORBIDDEN[name]:
            await connection.publish(subject, b"")
        await connection.flush()
        await eventually(lambda: all(connection.is_denied(subject) for subject in FORBIDDEN[name]))
    finally:
        await connection.close()


@pytest.mark.parametrize("name", list(UNHEARD))
async def test_a_role_hears_nothing_that_is_not_for_it(
    address: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    connection = await NatsConnection.connect(url_of(address, name), 10.0)
    monkeypatch.setattr(connection, "report", lambda error: refused.append(str(error)))

    async def ignore(message: NatsMessage) -> None: ...

    try:
        for subject in UNHEARD[name]:
            await connection.subscribe(subject, ignore)
        await connection.flush()

        def subjects() -> set[str]:
            return set(re.findall(r'for subscription to "([^"]+)"', " ".join(refused).lower()))

        await eventually(lambda: {subject.lower() for subject in UNHEARD[name]} <= subjects())
    finally:
        await connection.close()


@pytest.mark.parametrize("login", ["frontend:wrong", "nobody:change-me-worker", ""])
async def test_other_logins_are_refused(address: str, login: str) -> None:
    with pytest.raises(Exception, match=r"[Aa]uthorization"):
        await NatsConnection.connect(f"nats://{login}@{address}" if login else f"nats://{address}", 10.0)


async def test_a_permission_that_is_given_later_is_used(tmp_path: Path) -> None:
    """Without a keeper nobody would end the leases of the dead until another process comes."""
    keeper = KEYS.lease_keeper
    config = "authorization {{ users: [{{ user: u, password: p, permissions: {{ publish: {{ {} }} }} }}] }}"
    with configured_server(tmp_path, config.format(f'deny: "{keeper}"')) as address:
        (ports,) = tmp_path.glob("nats-server_*.ports")  # noqa: ASYNC240
        plane = await connect_control(ControlConfig(control=f"nats://u:p@{address}", connect_timeout_s=10.0))
        try:
            assert isinstance(plane, NatsControlPlane)
            assert isinstance(plane.discovery, NatsDiscovery)
            election, connection = plane.discovery.mirror.election, plane.connection
            lease = await plane.discovery.grant(TTL_S)
            await plane.discovery.put(WORKER, b"{}", lease)
            async with watching(plane.discovery, KEYS.workers):
                await eventually(lambda: not election.may_keep)
                (tmp_path / "nats.conf").write_text(config.format('allow: ">"'))
                os.kill(int(ports.stem.rpartition("_")[2]), signal.SIGHUP)
                while connection.is_denied(keeper):
                    await connection.publish(keeper, b"")
                    await connection.flush()
                await connection.client.force_reconnect()
                await eventually(lambda: election.state is KeeperState.KEEPING)
        finally:
            await plane.close()
