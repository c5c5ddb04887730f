"""KV that changes on its way: found by checksums, computed again, counted; and never a wrong token."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from tests.contracts.waiting import eventually
from tests.worker.cluster import LOOPBACK, Client, Cluster, Node, cluster, expected, prompt

from kvrelay.config import TransferConfig, WorkerRole
from kvrelay.handoff.decode_state import DecodeState
from kvrelay.handoff.messages import HandoffDone, HandoffGrant
from kvrelay.handoff.prefill_state import PrefillState
from kvrelay.rpc.wire import decode_message, encode_message
from kvrelay.transfer.base import Post
from kvrelay.transfer.values import TransferOp
from kvrelay.worker.prefill import pulling as prefill_side

CHECKED = replace(LOOPBACK, kv_checksums=True)
BASE = prompt(64)
"""Short enough to be prefilled locally; then a hit that a prefill worker has to read."""

either_end = pytest.mark.parametrize(
    ("of_prefill", "of_decode"), [(True, True), (True, False), (False, True)], ids=["both", "prefill", "decode"]
)


async def mixed_pair(shared: Cluster, of_prefill: bool, of_decode: bool) -> tuple[Node, Node, Client]:
    """A pair whose workers need not have the same setting."""
    shared.transfer = replace(LOOPBACK, kv_checksums=of_prefill)
    prefill = await shared.join(WorkerRole.PREFILL)
    shared.transfer = replace(LOOPBACK, kv_checksums=of_decode)
    decode = await shared.join(WorkerRole.DECODE)
    await shared.acquainted(prefill, decode)
    return prefill, decode, await shared.client(decode)


async def answers_are_right(client: Client, **prompts: tuple[int, ...]) -> None:
    for name, tokens in prompts.items():
        client.send(name, tokens)
    for name, tokens in prompts.items():
        assert await client.answer(name) == expected(tokens, 8)


def mismatches(prefill: Node, decode: Node) -> tuple[int, int]:
    """How many each has found."""
    stats = prefill.worker.stats().prefill, decode.worker.stats().decode
    return stats[0].num_kv_checksum_mismatches, stats[1].num_kv_checksum_mismatches


async def test_without_checksums_a_flipped_bit_is_a_wrong_answer():
    """So the fault of the other tests is one."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        shared.fabric.faults.corrupt_next = 1
        client.send("r", prompt(320))
        assert await client.answer("r") != expected(prompt(320), 8)
        assert mismatches(prefill, decode) == (0, 0)
        assert decode.worker.stats().decode.num_verified_blocks == 0


@either_end
async def test_undisturbed_hand_offs_are_verified_in_both_directions(of_prefill, of_decode):
    async with cluster() as shared:
        prefill, decode, client = await mixed_pair(shared, of_prefill, of_decode)
        await answers_are_right(client, base=BASE)
        await answers_are_right(client, r=BASE + prompt(700, 5))
        assert mismatches(prefill, decode) == (0, 0)
        assert decode.worker.stats().decode.num_remote_done == 1
        assert decode.worker.stats().decode.num_verified_blocks == 44
        assert prefill.worker.stats().prefill.num_verified_blocks == 4


@either_end
async def test_a_block_damaged_by_a_write_is_computed_again(of_prefill, of_decode, caplog):
    async with cluster() as shared:
        prefill, decode, client = await mixed_pair(shared, of_prefill, of_decode)
        shared.fabric.faults.corrupt_next = 1
        await answers_are_right(client, r=prompt(320))
        # It is counted, then logged, maybe only after the answer.
        await eventually(lambda: "is refused" in caplog.text)
        stats = decode.worker.stats().decode
        assert mismatches(prefill, decode) == (0, 1)
        assert (stats.num_remote_done, stats.num_verified_blocks, stats.num_stale) == (0, 0, 0)
        (warning,) = (record.getMessage() for record in caplog.records if "is refused" in record.getMessage())
        assert prefill.id in warning
        assert "1 of 20 blocks changed on the way, block" in warning
        assert decode.worker.inspect().num_grants == 0
        await answers_are_right(client, again=prompt(320), after=prompt(320, 3))
        assert decode.worker.stats().decode.num_remote_done == 1


@pytest.mark.parametrize("number", range(4))
async def test_whichever_write_is_damaged(number):
    """Chunks of 256 tokens; the last write carries HandoffDone."""
    async with cluster(transfer=CHECKED) as shared:
        prefill, decode, client = await shared.pair()
        num_writes = 0

        def damage_one(post: Post) -> None:
            nonlocal num_writes
            shared.fabric.faults.corrupt_next = int(num_writes == number)
            num_writes += post.op is TransferOp.WRITE

        prefill.transport.before.append(damage_one)
        await answers_are_right(client, r=prompt(1000))
        assert num_writes == 4
        assert mismatches(prefill, decode) == (0, 1)


@either_end
async def test_a_block_damaged_by_a_read_is_computed_by_the_prefill_worker(of_prefill, of_decode, caplog):
    async with cluster() as shared:
        prefill, decode, client = await mixed_pair(shared, of_prefill, of_decode)
        await answers_are_right(client, base=BASE)
        shared.fabric.faults.corrupt_next = 1
        await answers_are_right(client, r=BASE + prompt(200, 5))
        assert mismatches(prefill, decode) == (1, 0)
        assert prefill.worker.stats().prefill.num_verified_blocks == 0
        assert decode.worker.stats().decode.num_remote_done == 1
        (warning,) = (record.getMessage() for record in caplog.records if "computed instead" in record.getMessage())
        assert decode.id in warning
        assert "1 of 4 blocks changed on the way, block" in warning
        await answers_are_right(client, again=BASE + prompt(240, 6))
        assert prefill.worker.stats().prefill.num_kv_checksum_mismatches == 1


async def test_much_damage_among_many_requests():
    async with cluster(transfer=CHECKED) as shared:
        prefill, decode, client = await shared.pair()
        shared.fabric.faults.corrupt_next = 20
        await answers_are_right(client, **{f"r{n}": prompt(40 + 31 * (n % 13), n % 3) for n in range(60)})
        assert shared.fabric.faults.corrupt_next == 0
        assert sum(mismatches(prefill, decode)) > 0
        await answers_are_right(client, after=prompt(600, 77))
        assert decode.worker.stats().decode.num_verified_blocks > 0


def tamper(node: Node, checksums: Callable[[HandoffDone], tuple[int, ...] | None]) -> None:
    """HandoffDone reaches ``node`` with other checksums than were sent."""
    notified = node.worker.decode.handoffs.notified

    def tampered(payload: bytes) -> None:
        message = decode_message(payload)
        notified(encode_message(msgspec.structs.replace(message, checksums=checksums(message))))

    node.worker.transfer.on_notification(tampered)


@pytest.mark.parametrize(
    "checksums",
    [lambda done: None, lambda done: done.checksums[:-1], lambda done: (*done.checksums, 5), lambda done: ()],
    ids=["none", "one too few", "one too many", "empty"],
)
async def test_what_is_required_and_does_not_come_is_a_mismatch(checksums):
    async with cluster(transfer=CHECKED) as shared:
        prefill, decode, client = await shared.pair()
        tamper(decode, checksums)
        await answers_are_right(client, r=prompt(320))
        assert mismatches(prefill, decode) == (0, 1)
        assert decode.worker.stats().decode.num_remote_done == 0


async def test_who_sends_none_is_accepted_where_none_are_required():
    async with cluster() as shared:
        prefill, decode, client = await mixed_pair(shared, True, False)
        tamper(decode, lambda done: None)
        await answers_are_right(client, r=prompt(320))
        assert mismatches(prefill, decode) == (0, 0)
        assert decode.worker.stats().decode.num_remote_done == 1


async def test_hit_blocks_that_come_without_checksums_are_not_trusted_where_they_are_required():
    async with cluster() as shared:
        prefill, decode, client = await mixed_pair(shared, True, False)
        send = decode.server.send

        def without_checksums(peer, message):
            if isinstance(message, HandoffGrant):
                message = msgspec.structs.replace(message, checksums=None)
            return send(peer, message)

        decode.server.send = without_checksums
        await answers_are_right(client, base=BASE)
        await answers_are_right(client, r=BASE + prompt(200, 5))
        assert mismatches(prefill, decode) == (1, 0)
        assert decode.worker.stats().decode.num_remote_done == 1


async def test_abort_while_what_arrived_is_verified():
    """The blocks stay lent until they have been read; what is found in them is of no interest."""
    async with cluster(transfer=CHECKED) as shared:
        prefill, decode, client = await shared.pair()
        waiting, go_on = decode.hold_checksums()
        client.send("r", prompt(320), max_tokens=3000)
        await asyncio.to_thread(waiting.wait)
        (handoff,) = decode.ledger.handoffs.values()
        client.abort("r")
        await shared.until(lambda: handoff.state is DecodeState.CLOSED)
        assert decode.core.pool.num_quarantined == 20, "they are being read"
        decode.core.executor.pool.fill(0)
        go_on.set()
        await shared.until(lambda: decode.worker.stats().decode.num_stale == 1)
        assert mismatches(prefill, decode) == (0, 0)
        await answers_are_right(client, after=prompt(320, 3))


async def test_abort_before_what_was_computed_is_written():
    # Else what waits for a late grant leaves the pool.
    async with cluster(transfer=replace(CHECKED, kv_buffer_size=0)) as shared:
        prefill, decode, client = await shared.pair()
        waiting, go_on = prefill.hold_checksums()
        client.send("r", prompt(320), max_tokens=3000)
        await asyncio.to_thread(waiting.wait)
        client.abort("r")
        await shared.until(lambda: prefill.core.has_unfinished() and not decode.core.num_requests)
        (outgoing,) = prefill.outgoing.handoffs.values()
        await shared.until(lambda: outgoing.state is PrefillState.STOPPING)
        assert prefill.core.metrics().num_blocks_in_use > 0, "they are being read"
        go_on.set()
        await shared.until(lambda: prefill.worker.inspect().queue.num_held == 0)
        assert prefill.worker.stats().prefill.num_sent_bytes == 0
        await shared.until(lambda: decode.ledger.num_grants == 0)


async def test_a_claim_that_was_given_up_while_hits_were_checksummed(monkeypatch):
    monkeypatch.setattr(prefill_side, "CLAIM_TIMEOUT_S", 0.2)
    async with cluster(transfer=CHECKED) as shared:
        prefill, decode, client = await shared.pair()
        await answers_are_right(client, base=BASE)
        _, go_on = decode.hold_checksums()
        await answers_are_right(client, r=BASE + prompt(320, 5))
        await shared.until(lambda: prefill.worker.inspect().queue.num_held == 0)
        go_on.set()
        await shared.until(lambda: not decode.ledger.handoffs)
        assert (decode.ledger.num_grants, decode.worker.inspect().num_grants) == (0, 0)


@pytest.mark.parametrize("device_of", ["prefill", "decode"])
async def test_kv_that_cannot_be_read_is_not_trusted(device_of):
    async with cluster(transfer=CHECKED) as shared:
        prefill, decode, client = await shared.pair()

        def fail(block_ids):
            raise RuntimeError("device lost")

        {"prefill": prefill, "decode": decode}[device_of].core.executor.checksum_blocks = fail
        await answers_are_right(client, r=prompt(320))
        assert decode.worker.stats().decode.num_remote_done == 0


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="NIXL is not installed")
async def test_over_nixl():
    nixl = TransferConfig(transport="nixl", ucx_net_devices="lo", kv_checksums=True)
    async with cluster(transfer=nixl) as shared:
        prefill, decode, client = await shared.pair()
        await answers_are_right(client, base=BASE)
        prompts = {f"r{n}": BASE * (n % 2) + prompt(100 + 97 * n, n + 1) for n in range(12)}
        await answers_are_right(client, **prompts)
        assert mismatches(prefill, decode) == (0, 0)
        assert decode.worker.stats().decode.num_remote_done == 12
        assert prefill.worker.stats().prefill.num_verified_blocks > 0
        damage_last_block(decode)
        await answers_are_right(client, damaged=prompt(3000, 50))
        assert mismatches(prefill, decode) == (0, 1)
        assert decode.worker.stats().decode.num_remote_done == 12


def damage_last_block(decode: Node) -> None:
    """Once a write has arrived, as if its last block had changed under way."""
    handoffs, pool = decode.worker.decode.handoffs, decode.core.executor.pool
    notified = handoffs.notified

    def damaged(payload: bytes) -> None:
        message = decode_message(payload)
        pool[decode.ledger.handoffs[message.handoff_id].block_ids[-1], 1, 0] ^= 1
        notified(payload)

    decode.worker.transfer.on_notification(damaged)
