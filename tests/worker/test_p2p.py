"""Workers over the peer-to-peer transport: every send type, little room, no room, and bytes that come too late."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from tests.worker.cluster import WAIT_S, Node, cluster, expected, prompt
from tests.worker.test_metrics import PAGE, samples

from kvrelay.config import TransferConfig
from kvrelay.core.handoff import HandoffId
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.handoff.messages import HandoffGrant
from kvrelay.transfer.p2p import shared as p2p_shared
from kvrelay.transfer.values import TransferOp

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
        await shared.until(lambda: decode.transport.windows.num_open == 0)
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
            prefill.worker.transfer.fail_all("for a test")
            assert await client.answer("r") == expected(prompt(900), 8)
            await shared.until(lambda: decode.transport.windows.num_open == 0)
            blocks = range(decode.core.pool.num_blocks)
            before = decode.core.executor.checksum_blocks(blocks)
            go_on.set()
            await shared.until(lambda: counters(decode).num_refused >= 1)
            assert decode.core.executor.checksum_blocks(blocks) == before


async def test_a_claimant_may_read_hits_and_write_the_rest_before_it_hears_of_its_grant() -> None:
    async with cluster(transfer=P2P) as shared:
        prefill, decode, client = await shared.pair()
        client.send("local", prompt(60))
        await client.answer("local")
        windows, open_window, send = decode.transport.windows, decode.transport.windows.open, decode.server.send
        opened: list[RemoteKey] = []
        seen: list[tuple[HandoffGrant, list[RemoteKey], list[bool]]] = []

        def opening(window: MemoryWindow) -> None:
            opened.append(window.key)
            open_window(window)

        def may(op: TransferOp, key: RemoteKey, block: int) -> bool:
            size = decode.engine.facts.kv_layout.block_bytes
            where = np.array([block * size]), np.array([size])
            return windows.refusal(op, prefill.id, key, *where) is None

        def sending(peer: object, message: object) -> bool:
            if isinstance(message, HandoffGrant):
                key = RemoteKey(str(message.handoff_id), message.generation)
                access = [
                    (may(TransferOp.READ, key, block), may(TransferOp.WRITE, key, block)) for block in message.block_ids
                ]
                seen.append((message, [*opened], access))
            return send(peer, message)

        windows.open, decode.server.send = opening, sending
        tokens = prompt(60) + prompt(200, 5)
        client.send("remote", tokens)
        assert await client.answer("remote") == expected(tokens, 8)
        ((grant, opened_before, access),) = seen
        num_hits = grant.num_cached_tokens // 16
        assert opened_before == [RemoteKey(str(grant.handoff_id), grant.generation)]
        assert num_hits == 3
        assert access == [(True, False)] * num_hits + [(False, True)] * (len(grant.block_ids) - num_hits)


async def test_a_peer_loses_its_permission_before_the_engine_gets_the_blocks_back() -> None:
    """The engine may give them to another request at once, and a late copy would still be allowed."""
    async with cluster(transfer=P2P) as shared:
        _, decode, client = await shared.pair()
        windows, engine, core = decode.transport.windows, decode.engine, decode.core
        close, post, end_loan = windows.close, engine.post, core.end_loan
        order, lock = itertools.count(), threading.Lock()
        closed: dict[tuple[str, int], int] = {}
        ended: dict[tuple[str, int], int] = {}
        running = threading.local()

        def number() -> int:
            with lock:
                return next(order)

        def closing(handoff: str, loan: int) -> None:
            close(handoff, loan)
            closed[handoff, loan] = number()

        def posting(callback: Callable[[object], object]) -> None:
            posted = number()

            def run(engine: object) -> object:
                running.posted = posted
                return callback(engine)

            post(run)

        def ending(handoff_id: HandoffId, loan: int) -> None:
            ended.setdefault((str(handoff_id), loan), running.posted)
            end_loan(handoff_id, loan)

        windows.close, engine.post, core.end_loan = closing, posting, ending
        for request in range(4):
            client.send(f"r{request}", prompt(900, request))
        client.abort("r3")
        for request in range(3):
            await client.answer(f"r{request}")
        await shared.until(lambda: not decode.worker.inspect().loans)
        assert ended.keys() == closed.keys()
        assert len(ended) >= 3
        for loan, posted in ended.items():
            assert closed[loan] < posted


@contextmanager
def _held(node: Node):
    """The first copy into the worker's blocks waits between its receive and its look at the window."""
    windows = node.transport.windows
    touching = windows.touching
    is_held, go_on = threading.Event(), threading.Event()

    def held(*arguments):
        if not is_held.is_set():
            is_held.set()
            assert go_on.wait(WAIT_S)
        return touching(*arguments)

    windows.touching = held
    try:
        yield is_held, go_on
    finally:
        go_on.set()
        windows.touching = touching
