"""A decode worker without room: KV comes to its holding area, and prefill workers have their blocks back at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.worker.cluster import LOOPBACK, Node, cluster, expected, prompt
from tests.worker.test_prefill_first import PairedClient

from kvrelay.config import TransferConfig, WorkerRole
from kvrelay.core.messages import AbortRequest

NUM_PROMPTS = 6
TRANSPORTS = {
    "loopback": LOOPBACK,
    "shm": TransferConfig(transport="shm"),
    "nixl": TransferConfig(transport="nixl", transfer_timeout_s=60.0),
    "p2p": TransferConfig(transport="p2p", transfer_timeout_s=60.0, p2p_room_wait_s=30.0),
    "shm, pull": TransferConfig(transport="shm", send_type="GET"),
    "loopback, checksums": replace(LOOPBACK, kv_checksums=True),
}


@asynccontextmanager
async def full(transfer: TransferConfig = LOOPBACK, **engine: int) -> AsyncIterator[PairedClient]:
    """A pair of workers; the decode worker's pool is full until ``make_room``."""
    async with cluster(transfer=transfer) as shared:
        prefill = await shared.join(WorkerRole.PREFILL, **engine)
        decode = await shared.join(WorkerRole.DECODE)
        await shared.acquainted(prefill, decode)
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.addresses)
        await decode.engine.call(lambda core: core.pool.allocate(core.pool.num_blocks))
        yield PairedClient(shared, prefill, decode, await shared.client(prefill), await shared.client(decode))


async def make_room(decode: Node) -> None:
    await decode.engine.call(lambda core: core.pool.release(range(core.pool.num_blocks)))


def is_free(node: Node) -> bool:
    return node.core.pool.num_free == node.core.pool.num_blocks


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_prefill_workers_have_their_blocks_back_while_the_decode_worker_is_full(transport: str) -> None:
    async with full(TRANSPORTS[transport]) as pair:
        prompts = [prompt(200 + 7 * number, number) for number in range(NUM_PROMPTS)]
        sent = [pair.send(tokens) for tokens in prompts]
        await pair.shared.until(lambda: pair.prefill.worker.stats().prefill.num_prefills == NUM_PROMPTS)
        await pair.shared.until(lambda: is_free(pair.prefill))
        await pair.to_decode.until(lambda: all(request_id in pair.to_decode.tokens for request_id in sent))
        assert pair.decode.core.pool.num_free == 0
        status = await pair.decode.status()
        assert status["kv_holding"]["num_held"] == NUM_PROMPTS
        assert status["kv_holding"]["num_blocks_in_use"] == sum(-(-len(tokens) // 16) for tokens in prompts)
        await make_room(pair.decode)
        for request_id, tokens in zip(sent, prompts, strict=True):
            assert await pair.answer(request_id) == expected(tokens, 8)
        assert pair.num_remote == NUM_PROMPTS
        assert pair.decode.core.scheduler.num_prefilled_tokens == 0
        if "pull" in transport:
            assert pair.prefill.core.holding.num_held == NUM_PROMPTS


async def test_without_a_holding_area_prefill_workers_keep_their_blocks() -> None:
    async with full(replace(LOOPBACK, kv_buffer_size=0)) as pair:
        tokens = prompt(200)
        request_id = pair.send(tokens)
        assert await pair.first(request_id) == expected(tokens, 1)
        assert not is_free(pair.prefill)
        assert (await pair.decode.status())["kv_holding"] is None
        await make_room(pair.decode)
        assert await pair.answer(request_id) == expected(tokens, 8)


async def test_the_queue_is_served_while_the_decode_worker_is_full() -> None:
    """Decode-first, between blocks of unlike size: the first token comes at once, all others when there is room."""
    async with full(block_size=32) as pair:
        tokens, client = prompt(300), pair.to_decode
        client.send("r", tokens)
        await client.until(lambda: client.tokens.get("r"))
        assert client.tokens["r"] == expected(tokens, 1)
        assert pair.decode.core.pool.num_free == 0
        await make_room(pair.decode)
        assert await client.answer("r") == expected(tokens, 8)


async def test_what_the_area_has_no_room_for_waits_as_without_it() -> None:
    block_bytes = 2 * 4 * 16
    async with full(replace(LOOPBACK, kv_buffer_size=20 * block_bytes)) as pair:
        prompts = [prompt(200, number) for number in range(3)]  # 13 blocks each
        sent = [pair.send(tokens) for tokens in prompts]
        for request_id, tokens in zip(sent, prompts, strict=True):
            assert await pair.first(request_id) == expected(tokens, 1)
        await pair.shared.until(lambda: pair.prefill.worker.stats().prefill.num_prefills == 1)
        assert pair.decode.core.holding.blocks.num_free == 7
        assert len(pair.decode.ledger.expected) == 2
        await make_room(pair.decode)
        for request_id, tokens in zip(sent, prompts, strict=True):
            assert await pair.answer(request_id) == expected(tokens, 8)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_when_the_area_is_full_too_computed_kv_waits_beside_the_prefill_workers_pool(transport: str) -> None:
    async with full(TRANSPORTS[transport]) as pair:
        area, kept = pair.decode.core.holding.blocks, pair.prefill.core.holding
        taken = await pair.decode.engine.call(lambda core: area.allocate(area.num_blocks))
        prompts = [prompt(200 + 7 * number, number) for number in range(NUM_PROMPTS)]
        sent = [pair.send(tokens) for tokens in prompts]
        for request_id, tokens in zip(sent, prompts, strict=True):
            assert await pair.first(request_id) == expected(tokens, 1)
        await pair.shared.until(lambda: is_free(pair.prefill))
        assert kept.num_held == NUM_PROMPTS
        assert pair.prefill.worker.stats().prefill.num_prefills == 0, "none is granted"
        await pair.decode.engine.call(lambda core: area.release(taken))
        await make_room(pair.decode)
        for request_id, tokens in zip(sent, prompts, strict=True):
            assert await pair.answer(request_id) == expected(tokens, 8)
        assert pair.num_remote == NUM_PROMPTS
        assert pair.decode.core.scheduler.num_prefilled_tokens == 0


async def test_kv_that_waits_beside_the_pool_is_freed_with_its_request() -> None:
    async with full() as pair:
        area, kept = pair.decode.core.holding.blocks, pair.prefill.core.holding
        taken = await pair.decode.engine.call(lambda core: area.allocate(area.num_blocks))
        request_id = pair.send(prompt(300))
        await pair.shared.until(lambda: kept.num_held == 1 and is_free(pair.prefill))
        pair.abort(request_id)
        await pair.shared.until(lambda: kept.blocks.num_free == kept.blocks.num_blocks)
        await pair.decode.engine.call(lambda core: area.release(taken))
        await make_room(pair.decode)


async def test_a_cancelled_request_leaves_the_area() -> None:
    async with full() as pair:
        request_id = pair.send(prompt(300))
        await pair.to_decode.until(lambda: request_id in pair.to_decode.tokens)
        pair.abort(request_id)
        area = pair.decode.core.holding.blocks
        await pair.shared.until(lambda: area.num_free == area.num_blocks)
        await make_room(pair.decode)


async def test_blocks_that_a_lost_prefill_worker_may_still_write_are_quarantined() -> None:
    async with full() as pair:
        client, area = pair.to_decode, pair.decode.core.holding.blocks
        pair.prefill.slow_down(0.05)
        client.send("r", prompt(2000))
        await pair.shared.until(lambda: pair.decode.ledger.num_grants == 1)
        await pair.prefill.kill(pair.shared)
        assert area.num_quarantined == 125
        client.connection.send(AbortRequest("r"))
        await pair.shared.until(lambda: not pair.decode.core.scheduler.requests)
        assert area.num_quarantined == 125, "the request has ended, and its peer may live"
        await pair.shared.bury(pair.prefill)
        await pair.shared.until(lambda: area.num_free == area.num_blocks)
        assert pair.decode.ledger.counters.num_fenced == 1
        await make_room(pair.decode)


async def test_a_request_whose_prefill_worker_is_lost_is_computed_when_there_is_room() -> None:
    async with full() as pair:
        client, tokens = pair.to_decode, prompt(2000)
        pair.prefill.slow_down(0.05)
        client.send("r", tokens)
        await pair.shared.until(lambda: pair.decode.ledger.num_grants == 1)
        await pair.prefill.kill(pair.shared)
        await pair.shared.bury(pair.prefill)
        await make_room(pair.decode)
        assert await client.answer("r") == expected(tokens, 8)


async def test_a_worker_that_drains_serves_what_it_holds() -> None:
    async with full() as pair:
        tokens = prompt(300)
        request_id = pair.send(tokens)
        await pair.to_decode.until(lambda: request_id in pair.to_decode.tokens)
        pair.decode.worker.request_drain()
        await make_room(pair.decode)
        assert await pair.answer(request_id) == expected(tokens, 8)
        assert await pair.shared.gone(pair.decode) is None
