"""Workers over the peer-to-peer transport: every send type, little room, no room, and bytes that come too late."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.worker.cluster import WAIT_S, Node, cluster, expected, prompt
from tests.worker.test_metrics import PAGE, samples

from kvrelay.config import TransferConfig
from kvrelay.transfer.p2p import shared as p2p_shared

P2P = TransferConfig(transport="p2p", transfer_timeout_s=60.0, p2p_room_wait_s=30.0)
BLOCK_BYTES = 4096
"""Room for blocks of the mock engine: the allocator's smallest piece."""


@pytest.fixture(autouse=True)
def _all_over_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock engine's blocks are tiny: all of them would travel with the control messages."""
    monkeypatch.setattr(p2p_shared, "EAGER_BYTES", 0)


def counters(node: Node):
    return node.transport.p2p_counters()


@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC", "GET"])
async def test_workers_hand_over_and_leave_nothing_behind(send_type: str) -> None:
    async with cluster(transfer=replace(P2P, send_type=send_type)) as shared:
        prefill, decode, client = await shared.pair()
        for number in range(3):
            client.send(f"r{number}", prompt(900, number))
            assert await client.answer(f"r{number}") == expected(prompt(900, number), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 3)
        assert counters(decode).num_connections == 1
        assert counters(decode).num_spilled == counters(decode).num_lost == counters(decode).num_refused == 0
        await shared.until(lambda: decode.transport.grants.num_open == 0)
        for name in samples(decode.worker):
            if name.startswith("p2p_"):
                assert name in PAGE.read_text()


@pytest.mark.parametrize("send_type", ["PUT_ASYNC", "GET"])
async def test_what_does_not_fit_into_the_buffer_goes_through_the_pool(send_type: str) -> None:
    transfer = replace(P2P, send_type=send_type, kv_buffer_size=1, p2p_pool_bytes=2 * BLOCK_BYTES)
    async with cluster(transfer=transfer) as shared:
        prefill, decode, client = await shared.pair()
        for number in range(8):
            client.send(f"r{number}", prompt(900, number))
        for number in range(8):
            assert await client.answer(f"r{number}") == expected(prompt(900, number), 8)
        assert counters(decode).num_spilled > 0
        assert counters(decode).num_lost == 0
        assert prefill.worker.stats().prefill.num_prefills > 0


async def test_kv_that_finds_no_room_at_all_is_computed_again_by_the_decode_worker() -> None:
    transfer = replace(P2P, kv_buffer_size=1, p2p_pool_bytes=0)
    async with cluster(transfer=transfer) as shared:
        prefill, decode, client = await shared.pair()
        for number in range(3):
            client.send(f"r{number}", prompt(900, number))
            assert await client.answer(f"r{number}") == expected(prompt(900, number), 8)
        assert counters(decode).num_lost >= 3
        assert decode.worker.stats().decode.num_recomputed == 3
        await shared.until(lambda: prefill.worker.stats().prefill.num_failed == 3)
        assert prefill.worker.stats().prefill.num_prefills == 0
        assert sum((await decode.status())["recomputed"].values()) == 3
        assert (await prefill.status())["prefills_ended"] == {"transfer_failed": 3}
        assert counters(decode).num_failed == 0, "the communicator is good: only the KV was lost"


async def test_bytes_that_come_after_their_grant_has_ended_touch_no_block() -> None:
    """P gives a write up when D has received it, but not copied it yet, and D frees the blocks."""
    async with cluster(transfer=P2P) as shared:
        prefill, decode, client = await shared.pair()
        with _held(decode) as (is_held, go_on):
            client.send("r", prompt(900))
            assert await asyncio.to_thread(is_held.wait, WAIT_S)
            # P releases, and the request is computed here.
            prefill.worker._transfer.fail_all("for a test")
            assert await client.answer("r") == expected(prompt(900), 8)
            await shared.until(lambda: decode.transport.grants.num_open == 0)
            before = decode.core.executor._bytes.tobytes()
            go_on.set()
            await shared.until(lambda: counters(decode).num_refused >= 1)
            assert decode.core.executor._bytes.tobytes() == before


@contextmanager
def _held(node: Node):
    """The first copy into the worker's blocks waits between its receive and its look at the grant."""
    grants = node.transport.grants
    touching = grants.touching
    is_held, go_on = threading.Event(), threading.Event()

    def held(*arguments):
        if not is_held.is_set():
            is_held.set()
            assert go_on.wait(WAIT_S)
        return touching(*arguments)

    grants.touching = held
    try:
        yield is_held, go_on
    finally:
        go_on.set()
        grants.touching = touching
