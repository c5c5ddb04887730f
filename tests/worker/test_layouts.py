"""Hand-offs between workers whose blocks differ in size, and workers whose layouts cannot be joined."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.worker.cluster import LOOPBACK, Client, Cluster, Node, cluster, expected, prompt
from tests.worker.test_prefill_first import PairedClient

from kvrelay.config import TransferConfig, WorkerRole
from kvrelay.control import redelivery
from kvrelay.control.base import Keys
from kvrelay.core.layout import KVLayout, paged_kv
from kvrelay.core.workers import KvMetadata

CALM = replace(LOOPBACK, transfer_timeout_s=60.0)
"""For tests that count hand-offs: a busy machine must not lose one by time."""
BASE = prompt(64)
"""Prefilled locally; then a hit that a prefill worker has to read."""


async def pair_of(shared: Cluster, of_prefill: int, of_decode: int) -> tuple[Node, Node, Client]:
    """A pair with these block sizes."""
    prefill = await shared.join(WorkerRole.PREFILL, block_size=of_prefill)
    decode = await shared.join(WorkerRole.DECODE, block_size=of_decode)
    await shared.acquainted(prefill, decode)
    return prefill, decode, await shared.client(decode)


@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (32, 32), (48, 16), (16, 64)])
async def test_blocks_of_two_sizes_are_handed_over(sizes: tuple[int, int], checksums: bool):
    """With hits, partly filled blocks, and chunks that end within the other side's block."""
    async with cluster(transfer=replace(CALM, kv_checksums=checksums)) as shared:
        prefill, decode, client = await pair_of(shared, *sizes)
        client.send("base", BASE)
        assert await client.answer("base") == expected(BASE, 8)
        # More tokens than a step may compute, so several chunks.
        lengths = (300, 701, 333)
        for number, length in enumerate(lengths):
            tokens = BASE + prompt(length, number + 1)
            client.send(f"r{number}", tokens)
            assert await client.answer(f"r{number}") == expected(tokens, 8)
        assert decode.worker.stats().decode.num_remote_done == len(lengths)
        assert prefill.worker.stats().prefill.num_failed == 0
        assert decode.worker.stats().decode.num_kv_checksum_mismatches == 0
        assert prefill.worker.stats().prefill.num_kv_checksum_mismatches == 0
        await shared.check_idle()


@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
async def test_prefill_first_between_two_block_sizes(sizes: tuple[int, int], checksums: bool):
    """The decode worker's hits are known from its grant only, and may end within a block of the prefill worker."""
    async with cluster(transfer=replace(CALM, kv_checksums=checksums)) as shared:
        prefill, decode, client = await pair_of(shared, *sizes)
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.addresses)
        pair = PairedClient(shared, prefill, decode, await shared.client(prefill), client)
        base = prompt(48)
        client.send("base", base, max_tokens=1)
        assert await client.answer("base") == expected(base, 1)
        for number, length in enumerate((300, 701)):
            tokens = base + prompt(length, number + 1)
            assert await pair.answer(pair.send(tokens)) == expected(tokens, 8)
        assert pair.num_remote == 2
        assert decode.worker.stats().decode.num_kv_checksum_mismatches == 0
        await shared.check_idle()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
async def test_the_peer_to_peer_transport_pairs_block_sizes_too(send_type: str):
    """Its grants are checked byte by byte at the receiver."""
    async with cluster(transfer=TransferConfig(transport="p2p", send_type=send_type)) as shared:
        prefill, decode, client = await pair_of(shared, 16, 32)
        for tokens in (BASE, BASE + prompt(333, 1)):
            client.send(f"r{len(tokens)}", tokens)
            assert await client.answer(f"r{len(tokens)}") == expected(tokens, 8)
        assert decode.worker.stats().decode.num_remote_done == 1
        assert prefill.worker.stats().prefill.num_failed == 0
        await shared.check_idle()


async def test_block_sizes_whose_checksums_cannot_be_compared_are_computed_here():
    """Checksums of 8 and of 16 tokens: never a wrong token, and counted."""
    async with cluster(transfer=replace(LOOPBACK, kv_checksums=True)) as shared:
        _, decode, client = await pair_of(shared, 8, 16)
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)
        assert decode.worker.stats().decode.num_kv_checksum_mismatches == 1
        await shared.check_idle()


async def test_a_flipped_bit_between_blocks_of_two_sizes_is_found():
    async with cluster(transfer=replace(LOOPBACK, kv_checksums=True)) as shared:
        _, decode, client = await pair_of(shared, 16, 32)
        shared.fabric.faults.corrupt_next = 1
        client.send("r", prompt(320))
        assert await client.answer("r") == expected(prompt(320), 8)
        assert decode.worker.stats().decode.num_kv_checksum_mismatches == 1
        await shared.check_idle()


UNJOINED = [
    None,
    paged_kv(2, 1, 16, 1, "int32"),
    paged_kv(1, 2, 16, 1, "int32"),
    paged_kv(1, 1, 32, 1, "int32"),
    paged_kv(1, 1, 16, 1, "int32", tp_size=2),
]


@pytest.mark.parametrize("layout", UNJOINED, ids=["none", "layers", "heads", "contradicts its blocks", "impossible"])
async def test_a_layout_that_no_plan_joins_is_computed_by_the_decode_worker(layout: KVLayout | None, caplog):
    """Its entry in discovery says something else than its compatibility hash."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        key = Keys(shared.control.namespace).worker_kv_metadata(decode.id, 0)
        entry = msgspec.json.decode(await decode.control.discovery.get(key), type=KvMetadata)
        forged = msgspec.json.encode(msgspec.structs.replace(entry, layout=layout))
        load = prefill.control.discovery.get

        async def get(asked: str) -> bytes | None:
            return forged if asked == key else await load(asked)

        prefill.control.discovery.get = get
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)
        assert decode.worker.stats().decode.num_remote_done == 0
        await shared.until(lambda: prefill.worker.stats().prefill.num_failed == 1)
        assert "cannot be claimed" in caplog.text
        await shared.check_idle()


async def test_a_worker_whose_memory_is_not_in_discovery_computes_by_itself(caplog, monkeypatch):
    """Its prefill worker cannot reach it, not even to tell it: the hand-off ends by its deadline."""
    monkeypatch.setattr(redelivery, "RETURN_DELAYS_S", (0.01,) * len(redelivery.RETURN_DELAYS_S))
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        load = prefill.control.discovery.get
        # Not deleted, because the worker would put its entry back.
        prefill.control.discovery.get = lambda key: load(key.replace("kv_metadata", "nowhere"))
        client.send("r", prompt(300))
        await shared.until(lambda: prefill.worker.stats().prefill.num_failed == 1)
        shared.clock.skip(shared.disagg.remote_prefill_timeout_s)
        assert await client.answer("r") == expected(prompt(300), 8)
        assert decode.worker.stats().decode.num_remote_done == 0
        assert "has no KV metadata in discovery" in caplog.text
        await shared.check_idle()


async def test_a_grant_in_other_blocks_than_the_registered_ones_is_computed_here():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        decode.ledger.rules = msgspec.structs.replace(decode.ledger.rules, block_size=8)
        client.send("r", prompt(160))
        assert await client.answer("r") == expected(prompt(160), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_failed == 1)
        assert decode.worker.stats().decode.num_remote_done == 0
        await shared.check_idle()
