"""A worker that others may count as dead writes nothing; the fixture checks every write against the grants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.worker.cluster import WAIT_S, Cluster, Node, cluster, expected, expire_lease, prompt

from kvrelay.control.base import Keys, WatchKind
from kvrelay.control.nats.connection import NatsMessage
from kvrelay.errors import EngineDeadError
from kvrelay.handoff.messages import HandoffAbandon, HandoffGrant
from kvrelay.rpc.wire import Message

KEYS = Keys("default")
STUCK = 1_000_000_000


async def granted(shared: Cluster, decode: Node) -> None:
    await shared.until(lambda: decode.ledger.num_grants > 0)


async def revoke_lease(node: Node, by: Node) -> None:
    """As an operator does with ``nats kv del``."""
    await by.control.discovery.delete(KEYS.lease(node.lease.lease_id))


@contextmanager
def no_keepalives(node: Node) -> Iterator[None]:
    """What the node asks the server about its lease waits, keepalives included."""
    connection, lease_id, go_on = node.control.connection, node.lease.lease_id, asyncio.Event()
    request = connection.request

    async def held(subject: str, data: bytes, **options: object) -> NatsMessage:
        if lease_id in subject or lease_id.encode() in data:
            await go_on.wait()
        return await request(subject, data, **options)

    connection.request = held
    try:
        yield
    finally:
        connection.request = request
        go_on.set()


def hold_back(node: Node, kind: type[Message]) -> list[Callable[[], object]]:
    """Messages of ``kind`` do not leave the node; gives what sends them after all."""
    held = []
    send = node.server.send

    def hold(peer, message):
        if isinstance(message, kind):
            held.append(lambda: send(peer, message))
            return True
        return send(peer, message)

    node.server.send = hold
    return held


async def test_a_prefill_worker_cut_off_from_the_control_plane_stops_in_time():
    """It computes on, and its way to the decode worker is open, but its lease ends and its blocks are given away."""
    async with cluster(lease_ttl_s=1.0) as shared:
        prefill, decode, client = await shared.pair()
        prefill.slow_down(0.15)
        client.send("r", prompt(3000))
        await granted(shared, decode)
        mend = prefill.cut_from_nats()
        assert await client.answer("r") == expected(prompt(3000), 8)
        await shared.until(lambda: prefill.worker.inspect().queue.num_held == 0)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 0)
        mend()
        await shared.until(lambda: prefill.lease.alive_until_s > time.monotonic())
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 1)
        await shared.until(lambda: prefill.id in decode.worker.inspect().peers.leased)
        client.send("again", prompt(300, 5))
        assert await client.answer("again") == expected(prompt(300, 5), 8)


async def test_a_lost_lease_withdraws_what_is_queued_and_what_moves():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        shared.fabric.faults.delay_polls = STUCK
        client.send("r", prompt(3000))
        await shared.until(lambda: prefill.worker.stats().transfer.num_unfinished >= 5)
        await expire_lease(prefill)
        assert await client.answer("r") == expected(prompt(3000), 8)
        await shared.until(lambda: decode.ledger.num_grants == 0)
        await shared.until(lambda: prefill.worker.stats().transfer.num_unfinished == 0)
        assert not prefill.transport.posts


async def test_a_grant_that_comes_after_the_lease_was_lost_is_not_used():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        held = hold_back(decode, HandoffGrant)
        hold_back(decode, HandoffAbandon)
        client.send("r", prompt(3000))
        await shared.until(lambda: bool(held))
        lease = prefill.lease
        old = await expire_lease(prefill)
        await shared.until(lambda: lease.lease_id not in ("", old))
        await shared.until(lambda: decode.ledger.num_grants == 0)
        assert await client.answer("r") == expected(prompt(3000), 8)
        for deliver in held:
            deliver()
        await shared.until(lambda: prefill.worker.stats().prefill.num_failed == 1)
        assert prefill.worker.stats().prefill.num_sent_bytes == 0
        assert decode.worker.inspect().num_grants == 0


async def test_a_claim_by_a_worker_whose_lease_has_ended_is_turned_down():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        decode.ledger.leases.ended(prefill.id, 0.0)
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_refused == 1)
        assert decode.ledger.counters.num_granted == 0


async def test_transfers_stop_before_the_lease_is_given_back():
    """The engine dies with writes queued: the worker leaves at once, and its blocks are reused at once."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        order = []
        revoke, close = prefill.lease.revoke, prefill.transport.close

        async def revoking():
            order.append("lease")
            await revoke()

        def closing():
            order.append("transfers")
            close()

        prefill.lease.revoke, prefill.transport.close = revoking, closing
        shared.fabric.faults.delay_polls = STUCK
        prefill.fail_at_step(6)
        client.send("r", prompt(3000))
        assert await client.answer("r") == expected(prompt(3000), 8)
        assert isinstance(await shared.gone(prefill), EngineDeadError)
        assert order == ["transfers", "lease"]
        assert prefill.worker.inspect().queue.num_held == 0
        await shared.until(lambda: decode.ledger.num_grants == 0)


async def test_an_engine_that_dies_while_the_worker_drains_does_not_keep_it():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        prefill.fail_at_step(5)
        go_on = prefill.hold_steps()
        client.send("r", prompt(3000))
        await granted(shared, decode)
        prefill.worker.request_drain()
        go_on.set()
        assert isinstance(await shared.gone(prefill), EngineDeadError)
        assert await client.answer("r") == expected(prompt(3000), 8)


async def test_a_worker_whose_transfer_thread_fails_leaves():
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)

        def broken():
            raise RuntimeError("no such device")

        decode.transport.poll = broken
        decode.worker.transfer.open_handoff()
        assert "no such device" in str(await shared.gone(decode))


async def test_a_role_change_and_a_drain_at_once_end_outside():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        client.send("long", prompt(20), max_tokens=400)
        await client.until(lambda: "long" in client.tokens)
        ordered = asyncio.create_task(decode.worker.set_role(prefill.worker.role))
        await asyncio.sleep(0)
        decode.worker.request_drain()
        assert await shared.gone(decode) is None
        await asyncio.gather(ordered, return_exceptions=True)
        assert ordered.exception() is not None
        assert not decode.worker.inspect().queue.is_pulling
        assert decode.id not in str(await prefill.control.discovery.list("kvrelay/"))


async def test_a_prefill_worker_whose_lease_is_revoked_leaves_and_costs_time_only():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        prefill.slow_down(0.05)
        for number in range(4):
            client.send(f"r{number}", prompt(1500, number))
        await granted(shared, decode)
        await revoke_lease(prefill, by=decode)
        assert await shared.gone(prefill) is None
        for number in range(4):
            assert await client.answer(f"r{number}") == expected(prompt(1500, number), 8)
        assert prefill.id not in str(await decode.control.discovery.list("kvrelay/"))


async def test_a_decode_worker_whose_lease_is_revoked_finishes_its_requests():
    """Those that it decodes, and those whose prefill is elsewhere or still in the queue."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        prefill.slow_down(0.05)
        client.send("decoding", prompt(20), max_tokens=600)
        for number in range(4):
            client.send(f"r{number}", prompt(1500, number))
        await granted(shared, decode)
        listed = []
        watch = asyncio.create_task(keep_listings(prefill, decode.id, listed))
        await revoke_lease(decode, by=prefill)
        assert await shared.gone(decode) is None
        for number in range(4):
            assert await client.answer(f"r{number}") == expected(prompt(1500, number), 8)
        assert await client.answer("decoding") == expected(prompt(20), 600)
        await shared.until(lambda: len(listed) > 1)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert listed == [WatchKind.PUT, WatchKind.DELETE]


async def test_a_revoked_lease_is_replaced_when_the_last_write_under_it_has_ended():
    """Peers that find its memory again take back at once what it was allowed to write."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        began, may_end = hold_a_post(prefill)
        try:
            client.send("r", prompt(3000))
            await shared.until(began.is_set)
            lease = prefill.lease
            old = lease.lease_id
            await revoke_lease(prefill, by=decode)
            await shared.until(lambda: lease.lease_id not in ("", old))
            # Behind whatever else waits for the new lease.
            await prefill.control.discovery.put("kvrelay/default/config/last", b"", lease)
            assert prefill.id not in str(await decode.control.discovery.list("kvrelay/default/kv_metadata/"))
            assert decode.ledger.num_grants == 1
        finally:
            may_end.set()
        assert await client.answer("r") == expected(prompt(3000), 8)
        assert await shared.gone(prefill) is None
        await shared.until(lambda: decode.ledger.num_grants == 0)


def hold_a_post(node: Node) -> tuple[threading.Event, threading.Event]:
    """The node's next post blocks for its copy: set when it does, and what lets it go on."""
    began, may_end = threading.Event(), threading.Event()
    post = node.transport.post

    def held(*arguments: object) -> int:
        began.set()
        assert may_end.wait(WAIT_S)
        return post(*arguments)

    node.transport.post = held
    return began, may_end


async def keep_listings(node: Node, worker_id: str, kinds: list[WatchKind]) -> None:
    """What ``node`` sees of the other one's entry among the workers."""
    async for event in node.control.discovery.watch("kvrelay/default/workers/"):
        if event.key.endswith(worker_id):
            kinds.append(event.kind)


async def test_what_a_worker_may_write_outlives_a_lease_that_ended_before_its_time():
    """The prefill worker does not hear of it for a while and writes on; the fixture sees whether that is still safe."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        prefill.slow_down(0.1)
        hold_back(decode, HandoffAbandon)
        client.send("r", prompt(3000))
        await granted(shared, decode)
        with no_keepalives(prefill):
            await revoke_lease(prefill, by=decode)
            await shared.until(lambda: prefill.id not in decode.worker.inspect().peers.leased)
            num_bytes = prefill.worker.stats().transfer.num_bytes
            await shared.until(lambda: prefill.worker.stats().transfer.num_bytes > num_bytes)
            assert decode.ledger.num_grants == 1
        assert await client.answer("r") == expected(prompt(3000), 8)
        assert await shared.gone(prefill) is None
        await shared.until(lambda: decode.ledger.num_grants == 0)
