"""Changes of role while the worker works: a door opens at once, the other closes, and nothing is lost or late."""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.worker.cluster import Node, cluster, expected, prompt

from kvrelay.config import RunnerConfig, WorkerRole
from kvrelay.core.cores import may_change_niceness
from kvrelay.core.messages import AdminRequest
from kvrelay.errors import ControlUnavailableError, LeaseLostError
from kvrelay.worker import roles


async def test_a_widened_prefill_worker_serves_at_once_and_goes_on_prefilling():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        prefill.slow_down(0.05)
        client.send("remote", prompt(1500))
        await shared.until(lambda: prefill.worker.inspect().queue.num_held == 1)
        async with asyncio.timeout(10):
            await prefill.worker.set_role(WorkerRole.BOTH)
        assert prefill.worker.inspect().queue.num_held == 1, "nothing was drained"
        own = await shared.client(prefill)
        own.send("direct", prompt(20, 3))
        assert await own.answer("direct") == expected(prompt(20, 3), 8)
        assert await client.answer("remote") == expected(prompt(1500), 8)
        assert decode.worker.stats().decode.num_recomputed == 0
        client.send("again", prompt(600, 4))
        assert await client.answer("again") == expected(prompt(600, 4), 8)
        await shared.check_idle()
        assert prefill.worker.stats().prefill.num_prefills == 2, "it still pulls"


async def test_a_widened_decode_worker_helps_to_prefill_and_goes_on_decoding():
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        second = await shared.join(WorkerRole.DECODE)
        to_second = await shared.client(second)
        to_second.send("running", prompt(20), max_tokens=300)
        await to_second.until(lambda: "running" in to_second.tokens)
        await second.worker.set_role(WorkerRole.BOTH)
        assert second.worker.inspect().queue.is_pulling
        for number in range(12):
            client.send(f"r{number}", prompt(600, number))
        for number in range(12):
            assert await client.answer(f"r{number}") == expected(prompt(600, number), 8)
        assert await to_second.answer("running") == expected(prompt(20), 300)
        assert decode.worker.stats().decode.num_recomputed == 0


async def test_it_computes_its_own_queue_entries_without_a_hand_off():
    """The only worker that pulls is the one that has asked."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        prefill.worker.request_drain()
        client.send("r", prompt(600))
        assert await shared.gone(prefill) is None
        await decode.worker.set_role(WorkerRole.BOTH)
        client.send("s", prompt(600, 2))
        assert await client.answer("r") == expected(prompt(600), 8)
        assert await client.answer("s") == expected(prompt(600, 2), 8)
        assert decode.worker.stats().prefill.num_prefills == 0


async def test_narrowing_ends_what_has_begun_and_begins_nothing_more():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        await decode.worker.set_role(WorkerRole.BOTH)
        client.send("long", prompt(20), max_tokens=200)
        await client.until(lambda: "long" in client.tokens)
        changing = asyncio.create_task(decode.worker.set_role(WorkerRole.PREFILL))
        await shared.until(lambda: not decode.worker.inspect().is_accepting)
        client.send("late", prompt(20))
        await client.until(lambda: "late" in client.refused)
        assert client.refused["late"].retryable
        assert await client.answer("long") == expected(prompt(20), 200)
        await changing
        assert decode.worker.role is WorkerRole.PREFILL
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.prefill)
        for node in (prefill, decode):
            node.core.check_integrity()


async def test_many_changes_under_load_lose_nothing():
    roles = (WorkerRole.BOTH, WorkerRole.PREFILL, WorkerRole.BOTH, WorkerRole.DECODE)
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        other = await shared.join(WorkerRole.DECODE)
        await shared.until(lambda: other.id in decode.worker.inspect().peers.serving)
        for number in range(24):
            client.send(f"r{number}", prompt(100 + 40 * number, number))
            await other.worker.set_role(roles[number % 4])
        for number in range(24):
            assert await client.answer(f"r{number}") == expected(prompt(100 + 40 * number, number), 8)
        await shared.until(lambda: not decode.ledger.handoffs)
        for node in (decode, other):
            node.core.check_integrity()


async def test_a_planner_does_not_undo_what_was_done_by_hand_meanwhile():
    """Its command names the role that it saw, and waits behind the change by hand."""
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        await decode.worker.set_role(WorkerRole.BOTH)
        client.send("long", prompt(20), max_tokens=200)
        await client.until(lambda: "long" in client.tokens)
        by_hand = asyncio.create_task(decode.worker.set_role(WorkerRole.PREFILL))
        await shared.until(lambda: not decode.worker.inspect().is_accepting)
        by_planner = AdminRequest(1, "role", "decode from both")
        reply = await decode.worker.run_admin_command(by_planner)
        assert by_hand.done(), "one change at a time"
        assert "changed meanwhile" in (reply.error or "")
        assert decode.worker.role is WorkerRole.PREFILL
        again = await decode.worker.run_admin_command(AdminRequest(2, "role", "both from prefill"))
        assert again.error is None
        assert decode.worker.role is WorkerRole.BOTH


async def test_a_narrowing_that_cannot_be_told_is_not_begun():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        await decode.worker.set_role(WorkerRole.BOTH)
        mend = decode.cut_from_nats()
        with pytest.raises(ControlUnavailableError):
            await decode.worker.set_role(WorkerRole.PREFILL)
        assert decode.worker.role is WorkerRole.BOTH
        client.send("still here", prompt(20))
        assert await client.answer("still here") == expected(prompt(20), 8)
        mend()
        await listed_as(WorkerRole.BOTH, decode.id, prefill)
        client.send("and now", prompt(600))
        assert await client.answer("and now") == expected(prompt(600), 8)


async def test_a_change_that_the_end_of_the_lease_meets_is_not_begun(monkeypatch):
    """etcd knows at once that a lease is gone; the worker registers again under another one."""
    async with cluster() as shared:
        prefill, decode, _ = await shared.pair()
        discovery, losses = decode.control.discovery, ["lost"]
        put = discovery.put

        async def losing(key, value, lease=None):
            if losses:
                raise LeaseLostError(losses.pop())
            await put(key, value, lease)

        monkeypatch.setattr(discovery, "put", losing)
        with pytest.raises(LeaseLostError):
            await decode.worker.set_role(WorkerRole.PREFILL)
        assert decode.worker.role is WorkerRole.DECODE
        await listed_as(WorkerRole.DECODE, decode.id, prefill)
        await decode.worker.set_role(WorkerRole.PREFILL)
        await listed_as(WorkerRole.PREFILL, decode.id, prefill)


async def test_a_control_plane_that_goes_away_while_a_worker_narrows_finds_it_in_the_role_it_was_told():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        await decode.worker.set_role(WorkerRole.BOTH)
        client.send("long", prompt(20), max_tokens=200)
        await client.until(lambda: "long" in client.tokens)
        changing = asyncio.create_task(decode.worker.set_role(WorkerRole.PREFILL))
        await shared.until(lambda: not decode.worker.inspect().is_accepting)
        mend = decode.cut_from_nats()
        assert await client.answer("long") == expected(prompt(20), 200)
        await changing
        assert decode.worker.role is WorkerRole.PREFILL
        mend()
        await listed_as(WorkerRole.PREFILL, decode.id, prefill)


async def test_a_worker_that_drains_leaves_the_list_once_the_control_plane_is_back():
    """Until then each request that comes to it goes on to another worker, for as long as its longest answer takes."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        go_on = decode.hold_steps()  # before the request comes: 200 tokens are computed in a blink
        client.send("long", prompt(20), max_tokens=200)
        await shared.until(lambda: decode.is_held)
        mend = decode.cut_from_nats()
        decode.worker.request_drain()
        await shared.until(lambda: not decode.worker.inspect().is_accepting)
        assert decode.id in str(await prefill.control.discovery.list("kvrelay/default/workers/"))
        mend()
        async with asyncio.timeout(60):
            while decode.id in str(await prefill.control.discovery.list("kvrelay/default/workers/")):
                await asyncio.sleep(0.01)
        go_on.set()
        assert await client.answer("long") == expected(prompt(20), 200)
        await shared.gone(decode)


async def listed_as(role: WorkerRole, worker_id: str, looking: Any) -> None:
    """Once discovery says so."""
    key = f"kvrelay/default/workers/{worker_id}"
    async with asyncio.timeout(60):
        while f'"role":"{role}"'.encode() not in (await looking.control.discovery.get(key) or b""):
            await asyncio.sleep(0.01)


@pytest.mark.skipif(not may_change_niceness(), reason="this user may not undo niceness")
async def test_a_worker_yields_the_cores_to_decode_as_long_as_it_only_prefills(monkeypatch):
    async def niceness(node: Node) -> int:
        def own(_: object) -> int:
            return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        return await node.engine.call(own) - os.getpriority(os.PRIO_PROCESS, os.getpid())

    monkeypatch.setattr(roles, "niceness_of_prefills", lambda settings, engine: 4)
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        assert (await niceness(prefill), await niceness(decode)) == (4, 0)
        await prefill.worker.set_role(WorkerRole.BOTH)
        assert await niceness(prefill) == 0
        await prefill.worker.set_role(WorkerRole.PREFILL)
        assert await niceness(prefill) == 4
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)


@pytest.mark.parametrize(
    ("engine_kind", "device", "num_threads", "in_ranks", "niceness"),
    [
        ("torch", "cpu", 1, False, 5),
        ("torch", "cpu", 2, False, 0),  # a team is as slow as its last thread
        ("torch", "cuda", 1, False, 0),
        ("torch", "cpu", 1, True, 0),
        ("vllm", "cpu", 1, False, 0),
    ],
)
def test_only_a_thread_that_computes_alone_yields(
    monkeypatch, engine_kind: str, device: str, num_threads: int, in_ranks: bool, niceness: int
):
    monkeypatch.setattr(roles, "may_change_niceness", lambda: True)
    runner = RunnerConfig(num_threads=num_threads)
    settings: Any = SimpleNamespace(engine_kind=engine_kind, computes_in_ranks=in_ranks, runner=runner)
    engine: Any = SimpleNamespace(kv_region=SimpleNamespace(device=device))
    assert roles.niceness_of_prefills(settings, engine) == niceness
