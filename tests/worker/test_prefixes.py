"""A prefix that another worker has: read from it under a grant, or computed, and nothing is lost or leaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from tests.patience import PATIENCE_S
from tests.worker.cluster import LOOPBACK, Client, Cluster, Node, cluster, expected, prompt
from tests.worker.test_prefill_first import PairedClient

from kvrelay.config import WorkerRole
from kvrelay.core.handoff import HandoffId, PrefixHolder
from kvrelay.core.messages import SessionPaused
from kvrelay.core.tier_stats import PEER, TierStats
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason
from kvrelay.handoff.messages import HandoffAbandon
from kvrelay.transfer.base import PostEnd
from kvrelay.transfer.values import TransferOp
from kvrelay.worker import prefixes, roles

HOT = prompt(1600, 7)
"""Worth fetching by the costs that an engine assumes before it has measured its own."""


@pytest.fixture(autouse=True)
def grant_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time within which a holder has to answer. A busy machine may take longer than workers wait."""

    def set_to(seconds: float) -> None:
        monkeypatch.setattr(prefixes, "MIN_GRANT_S", seconds)

    set_to(PATIENCE_S)
    return set_to


async def two(shared: Cluster, **engine: int) -> tuple[Node, Node, Client, Client]:
    """A worker that has computed HOT, and another one, each with its client."""
    holder = await shared.join(WorkerRole.BOTH)
    reader = await shared.join(WorkerRole.BOTH, **engine)
    await shared.until(lambda: all(len(node.worker.inspect().peers.addresses) == 2 for node in (holder, reader)))
    await shared.until(lambda: all(len(node.worker.inspect().peers.leased) == 2 for node in (holder, reader)))
    # By the costs that it has measured, the mock engine computes everything at once.
    reader.core.scheduler.token_budget.costs.add = lambda *_: None
    clients = await shared.client(holder), await shared.client(reader)
    clients[0].send("warm", HOT)
    assert await clients[0].answer("warm") == expected(HOT, 8)
    return holder, reader, *clients


async def ask(client: Client, name: str, tokens: tuple[int, ...], holder: str, num_tokens: int = 1600) -> int:
    """The answer is right; how many tokens of the prompt need not be computed."""
    client.send_message(name, tokens, holder=PrefixHolder(holder, num_tokens))
    assert await client.answer(name) == expected(tokens, 8)
    return client.cached[name]


def fetched(node: Node) -> TierStats:
    stats = node.worker.stats().prefixes
    assert stats is not None
    return stats


@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("transport", ["loopback", "shm", "p2p"])
async def test_a_prefix_is_read_from_the_worker_that_has_it(transport: str, checksums: bool) -> None:
    async with cluster(transfer=replace(LOOPBACK, transport=transport, kv_checksums=checksums)) as shared:
        holder, reader, _, client = await two(shared)
        assert await ask(client, "r", HOT + prompt(100, 3), holder.id) == 1600
        assert fetched(reader).counts.num_hits == 1
        assert fetched(reader).stores[PEER].num_loaded == 100
        await shared.until(lambda: holder.worker.stats().num_grants == 0)
        assert await ask(client, "again", HOT + prompt(90, 4), holder.id) == 1600
        assert fetched(reader).counts.num_hits == 1, "it is its own now"


async def test_only_what_the_reader_lacks_is_read_and_the_rest_is_computed() -> None:
    async with cluster() as shared:
        holder, reader, _, client = await two(shared)
        client.send("own", HOT[:320] + prompt(50, 9))
        await client.answer("own")
        assert await ask(client, "r", HOT[:1000] + prompt(300, 3), holder.id, 992) == 992
        assert fetched(reader).stores[PEER].num_loaded == (992 - 320) // 16


async def test_workers_with_other_block_sizes() -> None:
    async with cluster() as shared:
        holder, _, _, client = await two(shared, block_size=48)
        assert await ask(client, "r", HOT + prompt(100, 3), holder.id) == 1600 // 48 * 48


async def test_the_holder_has_less_by_now() -> None:
    async with cluster() as shared:
        holder, reader, _, client = await two(shared)
        tokens = HOT[:800] + prompt(800, 77)
        assert await ask(client, "r", tokens, holder.id, 1584) == 800, "as much as it has"
        assert fetched(reader).counts.num_failed_loads == 0


@pytest.mark.parametrize("why", ["evicted", "another salt", "switched off", "leaving", "no such worker"])
async def test_what_the_holder_does_not_give_is_computed(why: str) -> None:
    async with cluster() as shared:
        holder, reader, _, client = await two(shared)
        name = holder.id
        if why == "evicted":
            await holder.engine.call(lambda core: core.clear_cache())
        elif why in ("switched off", "leaving"):
            holder.worker.decode.handoffs.lends_prefixes = False
        elif why == "no such worker":
            name = "decode-of-yesterday"
        tokens = HOT + prompt(100, 3)
        salt = "mine" if why == "another salt" else None
        client.send_message("salted", tokens, holder=PrefixHolder(name, 1600), salt=salt)
        assert await client.answer("salted") == expected(tokens, 8)
        assert client.cached["salted"] == 0
        assert fetched(reader).counts.num_failed_loads >= 1
        assert holder.worker.stats().num_grants == 0


@pytest.mark.parametrize("number", [1, 2**61 - 1, 2**62])
async def test_a_prefix_is_not_lent_under_the_number_of_another_kind_of_hand_off(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.worker.prefixes.new_prefix_id", lambda holder: HandoffId(holder, number))
    async with cluster() as shared:
        holder, reader, _, client = await two(shared)
        assert await ask(client, "r", HOT + prompt(100, 3), holder.id) == 0
        assert fetched(reader).counts.num_failed_loads == 1
        assert holder.worker.stats().num_grants == 0


async def test_a_damaged_prefix_is_computed_if_there_are_checksums() -> None:
    async with cluster(transfer=replace(LOOPBACK, kv_checksums=True)) as shared:
        holder, reader, _, client = await two(shared)
        shared.fabric.faults.corrupt_next = 1
        assert await ask(client, "r", HOT + prompt(100, 3), holder.id) == 0
        assert fetched(reader).counts.num_failed_loads == 1
        assert reader.worker.stats().prefill.num_kv_checksum_mismatches == 1


async def test_a_read_that_fails_costs_the_read() -> None:
    async with cluster() as shared:
        holder, _, _, client = await two(shared)
        shared.fabric.faults.fail_next = 1
        assert await ask(client, "r", HOT + prompt(100, 3), holder.id) == 0


class AtRead:
    """Holds the reader's reads back: they are posted, and do not move."""

    def __init__(self, reader: Node) -> None:
        self.has_come, self.may_go = threading.Event(), threading.Event()
        self._post, self._poll = reader.transport.post, reader.transport.poll
        reader.transport.post, reader.transport.poll = self._posted, self._polled

    def _posted(self, op: TransferOp, *arguments: object) -> int:
        if op is TransferOp.READ:
            self.has_come.set()
        return self._post(op, *arguments)

    def _polled(self) -> tuple[list[PostEnd], list[bytes]]:
        return self._poll() if self.may_go.is_set() or not self.has_come.is_set() else ([], [])

    async def come(self) -> None:
        assert await asyncio.to_thread(self.has_come.wait, PATIENCE_S)


@pytest.mark.parametrize("fault", ["killed", "lease revoked", "reader's lease revoked", "abandoned", "connection"])
async def test_what_was_read_is_not_trusted_if_anything_has_ended_meanwhile(fault: str) -> None:
    async with cluster() as shared:
        holder, reader, _, client = await two(shared)
        read = AtRead(reader)
        client.send_message("r", HOT + prompt(100, 3), holder=PrefixHolder(holder.id, 1600))
        await read.come()
        if fault == "killed":
            await holder.kill(shared)
        elif fault == "lease revoked":
            await holder.lease.revoke()
            await shared.until(lambda: holder.id not in reader.worker.inspect().peers.leased)
        elif fault == "reader's lease revoked":
            reader.worker.prefill.give_up_all(EndReason.LEASE_LOST)
        elif fault == "abandoned":
            (handoff,) = reader.outgoing.handoffs.values()
            assert handoff.grant is not None
            abandon = HandoffAbandon(handoff.handoff_id, handoff.grant.generation)
            reader.worker.prefill.handoffs.handle(abandon)
        else:
            reader.worker.prefill.handoffs.handle(pe.DecodeConnectionLost(holder.id))
        read.may_go.set()
        assert await client.answer("r") == expected(HOT + prompt(100, 3), 8)
        assert client.cached["r"] == 0, "computed"
        assert fetched(reader).counts.num_failed_loads == 1


async def test_blocks_that_are_read_stay_with_the_holder_until_they_are_released() -> None:
    async with cluster() as shared:
        holder, reader, busy, client = await two(shared)
        read = AtRead(reader)
        client.send_message("r", HOT + prompt(100, 3), holder=PrefixHolder(holder.id, 1600))
        await read.come()
        await holder.engine.call(lambda core: core.clear_cache())
        for number in range(4):  # 6,400 tokens of 8,192
            busy.send(f"b{number}", prompt(1600, 100 + number))
        for number in range(4):
            assert await busy.answer(f"b{number}") == expected(prompt(1600, 100 + number), 8)
        assert holder.core.pool.num_in_use == 100
        read.may_go.set()
        assert await client.answer("r") == expected(HOT + prompt(100, 3), 8)
        assert client.cached["r"] == 1600
        await shared.until(lambda: holder.core.pool.num_in_use == 0)


async def test_a_request_that_is_aborted_while_it_reads_keeps_its_blocks_until_the_end() -> None:
    async with cluster() as shared:
        holder, reader, _, client = await two(shared)
        read = AtRead(reader)
        client.send_message("r", HOT + prompt(100, 3), holder=PrefixHolder(holder.id, 1600))
        await read.come()
        client.abort("r")
        await shared.until(lambda: reader.worker.inspect().num_requests == 0)
        assert reader.core.pool.num_in_use > 100
        read.may_go.set()
        await shared.until(lambda: reader.core.pool.num_in_use == 0)


async def test_a_holder_that_does_not_answer_costs_no_more_than_computing(grant_limit: Callable[[float], None]) -> None:
    grant_limit(0.25)
    async with cluster() as shared:
        holder, reader, _, client = await two(shared)
        held = threading.Event()
        holder.engine.post(lambda _: held.wait(PATIENCE_S))
        assert await ask(client, "r", HOT + prompt(100, 3), holder.id) == 0
        assert fetched(reader).stores[PEER].misses == {EndReason.CLAIM_TIMEOUT: 1}
        held.set()


async def test_only_a_part_of_the_pool_is_lent() -> None:
    """Else a few readers could keep a holder from serving its own requests."""
    async with cluster() as shared:
        holder, reader, _, client = await two(shared, num_blocks=1024)
        first = await shared.client(holder)
        for number in (1, 2):
            first.send(f"w{number}", prompt(1600, 200 + number))
            await first.answer(f"w{number}")
        read = AtRead(reader)
        client.send_message("r", HOT + prompt(10, 3), holder=PrefixHolder(holder.id, 1600))
        await read.come()
        for number in (1, 2):
            tokens = prompt(1600, 200 + number) + prompt(10, 3)
            client.send_message(f"r{number}", tokens, holder=PrefixHolder(holder.id, 1600))
        await shared.until(lambda: fetched(reader).counts.num_failed_loads == 2)
        read.may_go.set()
        for name in ("r", "r1", "r2"):
            await client.answer(name)
        assert [client.cached[name] for name in ("r", "r1", "r2")] == [1600, 0, 0]


# -- prefill workers ---------------------------------------------------------------------------------------------------


async def three(shared: Cluster, other: WorkerRole) -> tuple[Node, Node, Node, Client]:
    """A prefill worker, a decode worker that never had HOT, another worker that has it, and a client of the latter."""
    prefill, decode, _ = await shared.pair()
    holder = await shared.join(other)
    await shared.until(lambda: all(len(node.worker.inspect().peers.leased) == 3 for node in shared.nodes))
    prefill.core.scheduler.token_budget.costs.add = lambda *_: None
    return prefill, decode, holder, await shared.client(holder)


async def assert_prefix_is_read(pair: PairedClient, to_decode: Client, prefill: Node, holder: Node) -> None:
    """A pair answers HOT and 100 tokens more; its prefill worker reads the 1,600 that ``holder`` has."""
    tokens = HOT + prompt(100, 3)
    to_p, to_d = pair.halves(tokens)
    pair.to_prefill.connection.send(msgspec.structs.replace(to_p, holder=PrefixHolder(holder.id, 1600)))
    to_decode.connection.send(to_d)
    assert await pair.answer(to_p.request_id) == expected(tokens, 8)
    assert pair.num_remote == 2
    assert fetched(prefill).stores[PEER].num_loaded == 100


async def test_a_prefill_worker_reads_what_another_prefill_worker_has() -> None:
    """Prefill-first: the router names it in P's half."""
    async with cluster() as shared:
        prefill, decode, holder, to_holder = await three(shared, WorkerRole.PREFILL)
        to_decode = await shared.client(decode)
        warm = PairedClient(shared, holder, decode, to_holder, to_decode)
        assert await warm.answer(warm.send(HOT)) == expected(HOT, 8)
        await decode.engine.call(lambda core: core.clear_cache())
        pair = PairedClient(shared, prefill, decode, await shared.client(prefill), to_decode)
        await assert_prefix_is_read(pair, to_decode, prefill, holder)
        assert fetched(decode).counts.num_hits == 0


async def test_a_pairs_prefill_worker_reads_what_its_decode_worker_has() -> None:
    """Under a grant of its own, and it sends none of that back."""
    async with cluster() as shared:
        prefill, decode, other, to_other = await three(shared, WorkerRole.PREFILL)
        to_decode = await shared.client(decode)
        warm = PairedClient(shared, other, decode, to_other, to_decode)
        assert await warm.answer(warm.send(HOT)) == expected(HOT, 8)
        pair = PairedClient(shared, prefill, decode, await shared.client(prefill), to_decode)
        await assert_prefix_is_read(pair, to_decode, prefill, decode)
        await shared.until(lambda: decode.worker.stats().num_grants == 0)


async def test_a_prefill_worker_reads_what_the_decode_workers_request_names() -> None:
    """Decode-first, by the queue: what the decode worker has itself comes from there."""
    async with cluster() as shared:
        prefill, decode, holder, to_holder = await three(shared, WorkerRole.BOTH)
        to_holder.send("warm", HOT)
        assert await to_holder.answer("warm") == expected(HOT, 8)
        await shared.until(lambda: prefill.core.pool.num_in_use == 0)
        await prefill.engine.call(lambda core: core.clear_cache())
        decode.worker.decode.handoffs.lends_prefixes = False
        # Every long prompt goes to a prefill worker, whatever could be read.
        decode.core.scheduler.admission.num_held_tokens = lambda request: 0
        client = await shared.client(decode)
        client.send("own", HOT[:48])
        await client.answer("own")
        assert await ask(client, "r", HOT + prompt(100, 3), holder.id) == 48
        assert decode.worker.stats().decode.num_remote_done == 1
        assert fetched(prefill).stores[PEER].num_loaded == 100 - 3
        assert prefill.worker.stats().prefill.num_failed == 0


async def test_what_no_one_lends_a_prefill_worker_computes() -> None:
    async with cluster() as shared:
        prefill, decode, holder, _ = await three(shared, WorkerRole.PREFILL)
        client = await shared.client(decode)
        tokens = HOT + prompt(100, 3)
        pair = PairedClient(shared, prefill, decode, await shared.client(prefill), client)
        to_p, to_d = pair.halves(tokens)
        pair.to_prefill.connection.send(msgspec.structs.replace(to_p, holder=PrefixHolder(holder.id, 1600)))
        client.connection.send(to_d)
        assert await pair.answer(to_p.request_id) == expected(tokens, 8)
        assert fetched(prefill).counts.num_failed_loads == 1
        assert pair.num_remote == 1


async def test_a_worker_that_leaves_lends_while_sessions_wait_for_their_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "LEAVING_LENDS_S", PATIENCE_S)
    async with cluster() as shared:
        holder, reader, first, second = await two(shared)
        first.connection.send(SessionPaused("warm", "bash"))
        await shared.until(lambda: holder.core.pauses is not None and holder.core.pauses.counts.num_named == 1)
        holder.worker.request_drain()
        await shared.until(lambda: holder.id not in reader.worker.inspect().peers.addresses)
        assert await ask(second, "r", HOT + prompt(100, 3), holder.id) == 1600
        assert fetched(reader).counts.num_hits == 1
        assert not holder.running.done()
        reader.worker.request_drain()
        assert await shared.gone(holder) is None, "no one is left who could read"
        assert await shared.gone(reader) is None


async def test_a_worker_that_leaves_waits_for_no_session_without_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "LEAVING_LENDS_S", 2 * PATIENCE_S)
    async with cluster() as shared:
        holder, _, _, _ = await two(shared)
        holder.worker.request_drain()
        assert await shared.gone(holder) is None
