"""Pull by blocks (``send_type`` GET): the prefill worker keeps its blocks until the decode worker has read them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from tests.patience import PATIENCE_S
from tests.worker.cluster import LOOPBACK, cluster, expected, prompt
from tests.worker.test_layouts import BASE, CALM, pair_of
from tests.worker.test_prefill_first import PairedClient

from kvrelay.config import TransferConfig
from kvrelay.handoff.base import EndReason
from kvrelay.transfer.base import Post
from kvrelay.transfer.values import TransferOp
from kvrelay.worker.prefill.pulling import MAX_COMPUTING

GET = replace(LOOPBACK, send_type="GET")


def ops_of(status: dict) -> set[str]:
    return {row["op"] for row in status["transfer"]["peers"] if row["num_bytes"]}


@pytest.mark.parametrize("transport", ["loopback", "shm"])
async def test_the_decode_worker_reads_and_the_prefill_worker_writes_nothing(transport: str):
    async with cluster(transfer=replace(GET, transport=transport)) as shared:
        prefill, decode, client = await shared.pair()
        for number, length in enumerate((65, 300, 1000, 3000)):
            client.send(f"r{number}", prompt(length, number))
            assert await client.answer(f"r{number}") == expected(prompt(length, number), 8)
        assert decode.worker.stats().decode.num_remote_done == 4
        assert decode.worker.stats().decode.num_received_bytes >= (65 + 300 + 1000 + 3000) * 4
        assert (ops_of(await prefill.status()), ops_of(await decode.status())) == (set(), {"read"})


@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 16), (48, 16)])
async def test_hits_and_two_block_sizes(sizes: tuple[int, int], checksums: bool):
    """The prefill worker reads the hits, computes the rest, and the decode worker reads that."""
    transfer = replace(CALM, send_type="GET", kv_checksums=checksums)
    async with cluster(transfer=transfer) as shared:
        prefill, decode, client = await pair_of(shared, *sizes)
        client.send("base", BASE)
        assert await client.answer("base") == expected(BASE, 8)
        for number, length in enumerate((300, 701, 333)):
            tokens = BASE + prompt(length, number + 1)
            client.send(f"r{number}", tokens)
            assert await client.answer(f"r{number}") == expected(tokens, 8)
        assert decode.worker.stats().decode.num_remote_done == 3
        assert decode.worker.stats().decode.num_kv_checksum_mismatches == 0
        assert ops_of(await prefill.status()) == {"read"}


async def test_prefill_first():
    async with cluster(transfer=replace(CALM, send_type="GET")) as shared:
        prefill, decode, client = await pair_of(shared, 16, 16)
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.addresses)
        pair = PairedClient(shared, prefill, decode, await shared.client(prefill), client)
        for number in range(3):
            tokens = prompt(300 + number, number)
            assert await pair.answer(pair.send(tokens)) == expected(tokens, 8)
        assert pair.num_remote == 3


async def test_a_failed_read_is_computed_here_and_frees_both_sides():
    async with cluster(transfer=GET) as shared:
        _, decode, client = await shared.pair()
        shared.fabric.faults.fail_next = 1
        client.send("failed", prompt(300))
        assert await client.answer("failed") == expected(prompt(300), 8)
        assert decode.ledger.counters.ends == {EndReason.READ_FAILED: 1}
        client.send("next", prompt(300, 5))
        assert await client.answer("next") == expected(prompt(300, 5), 8)
        assert decode.worker.stats().decode.num_remote_done == 1


async def test_a_flipped_bit_is_found():
    async with cluster(transfer=replace(GET, kv_checksums=True)) as shared:
        _, decode, client = await shared.pair()
        shared.fabric.faults.corrupt_next = 1
        client.send("r", prompt(320))
        assert await client.answer("r") == expected(prompt(320), 8)
        assert decode.worker.stats().decode.num_kv_checksum_mismatches == 1


async def test_blocks_stay_in_use_at_the_prefill_worker_until_they_are_read():
    """Also when the request is cancelled meanwhile: the bytes may still be moving."""
    async with cluster(transfer=GET) as shared:
        prefill, decode, client = await shared.pair()
        may_read, begun = threading.Event(), threading.Event()

        def held(post: Post) -> None:
            if post.op is TransferOp.READ:
                begun.set()
                assert may_read.wait(PATIENCE_S)

        decode.transport.before.append(held)
        client.send("r", prompt(300))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        assert prefill.worker.stats().transfer.num_open_handoffs == 1  # it polls: the read may depend on it
        client.abort("r")
        await shared.until(lambda: decode.worker.inspect().num_requests == 0)
        held = (prefill.core.pool, prefill.core.holding.blocks)
        assert [pool.num_blocks - pool.num_free for pool in held] == [0, 19]
        assert decode.core.pool.num_free < decode.core.pool.num_blocks
        may_read.set()


async def test_the_next_prefill_is_computed_while_the_kv_of_earlier_ones_waits_to_be_read():
    async with cluster(transfer=GET) as shared:
        prefill, decode, client = await shared.pair()
        may_read = threading.Event()
        decode.transport.before.append(lambda post: post.op is not TransferOp.READ or may_read.wait(PATIENCE_S))
        names = [f"r{number}" for number in range(MAX_COMPUTING + 1)]
        for number, name in enumerate(names):
            client.send(name, prompt(300, number))
        await shared.until(lambda: prefill.worker.stats().engine.tokens.num_prefilled == 300 * len(names))
        may_read.set()
        for number, name in enumerate(names):
            assert await client.answer(name) == expected(prompt(300, number), 8)


async def test_a_prefill_worker_that_dies_before_the_read():
    async with cluster(transfer=GET) as shared:
        prefill, decode, client = await shared.pair()
        discovery, go_on = decode.control.discovery, asyncio.Event()
        get = discovery.get

        async def late(key: str):
            if prefill.id in key:
                await go_on.wait()
            return await get(key)

        discovery.get = late
        client.send("r", prompt(300))
        await shared.until(lambda: decode.ledger.counters.num_granted == 1 and prefill.outgoing.num_active == 1)
        await shared.until(lambda: any(h.is_touched for h in decode.ledger.handoffs.values()))
        await prefill.kill(shared)
        go_on.set()
        await shared.bury(prefill)
        assert await client.answer("r") == expected(prompt(300), 8)


def test_only_with_p2p_does_get_mean_a_write():
    assert not TransferConfig(transport="p2p", send_type="GET").is_pull
    assert all(TransferConfig(transport=name, send_type="GET").is_pull for name in ("nixl", "shm", "auto"))
    assert not TransferConfig(transport="shm", send_type="PUT").is_pull
