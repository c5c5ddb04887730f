"""Anyone who can write to discovery can write anything; a worker hears what comes after, and its own entries stay."""

from __future__ import annotations

import asyncio
from itertools import count

import msgspec
import pytest
from tests.patience import PATIENCE_S
from tests.worker.cluster import WAIT_S, Node, cluster, expected, prompt

from kvrelay.config import WorkerRole
from kvrelay.control.base import Lease
from kvrelay.control.nats.jetstream import JetStream
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.sampling import SamplingParams
from kvrelay.worker.cluster import membership

ROOT = "kvrelay/default/"
MALFORMED = [b"", b"{", b'{"worker_id": 1}', b'"\xff"', b"[" * 100_000]


@pytest.mark.parametrize("value", MALFORMED, ids=range(len(MALFORMED)))
async def test_malformed_entries_are_passed_over(value: bytes) -> None:
    async with cluster() as shared:
        decode = await shared.join(WorkerRole.DECODE)
        discovery = decode.control.discovery
        lease = await discovery.grant(60.0)
        for key in ("workers/stranger", "kv_metadata/stranger/0", "config/disagg.max_local_prefill_length"):
            await discovery.put(ROOT + key, value, lease)
        await discovery.put(f"{ROOT}config/disagg.max_local_prefill_length", b"10")
        await shared.until(lambda: decode.worker.inspect().disagg.max_local_prefill_length == 10)
        prefill = await shared.join(WorkerRole.PREFILL)
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 1)
        client = await shared.client(decode)
        client.send("r", prompt(20))
        await client.answer("r")
        prefill.worker.request_drain()
        await shared.gone(prefill)
        await shared.until(lambda: prefill.id not in decode.worker.inspect().peers.leased)


async def _restored(node: Node, key: str, value: bytes) -> None:
    """The same entry, in the same or another term."""
    async with asyncio.timeout(WAIT_S):
        while _without_term(await node.control.discovery.get(key)) != _without_term(value):
            await asyncio.sleep(0.01)


def _without_term(value: bytes | None) -> object:
    try:
        return {**msgspec.json.decode(value or b"{}"), "term": None}
    except msgspec.DecodeError:
        return None


@pytest.mark.parametrize("key", ["workers/{id}", "kv_metadata/{id}/0"])
async def test_a_worker_puts_its_own_entries_back(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted, overwritten with garbage, or put without a lease by somebody else."""
    monkeypatch.setattr(membership, "RESTORE_DELAY_S", 0.02)
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        key = ROOT + key.format(id=prefill.id)
        discovery = decode.control.discovery
        value = await discovery.get(key)
        assert value is not None
        lease = await discovery.grant(60.0)
        changes = (
            lambda: discovery.delete(key),
            lambda: discovery.put(key, b"{", lease),
            lambda: discovery.put(key, value),
        )
        for change in changes:
            await change()
            await _restored(decode, key, value)
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 1)
        await shared.until(lambda: prefill.id in decode.worker.inspect().peers.leased)
        # What is known of it may still be what was known before the changes.
        async with asyncio.timeout(PATIENCE_S):
            for number in count():
                client.send(f"r{number}", prompt(600, number))
                assert await client.answer(f"r{number}") == expected(prompt(600, number), 8)
                if prefill.worker.stats().prefill.num_prefills:
                    break


async def test_an_entry_that_is_put_back_undoes_no_change_of_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RESTORE_DELAY_S", 0.02)
    reached, held, is_back = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with cluster() as shared:
        prefill, decode, _ = await shared.pair()
        key = f"{ROOT}workers/{prefill.id}"
        discovery = prefill.control.discovery
        put = discovery.put

        async def slow(name: str, value: bytes, lease: Lease | None = None) -> None:
            is_first = name == key and not reached.is_set()
            if is_first:
                reached.set()
                await held.wait()
            await put(name, value, lease)
            if is_first:
                is_back.set()

        monkeypatch.setattr(discovery, "put", slow)
        await decode.control.discovery.delete(key)
        await asyncio.wait_for(reached.wait(), WAIT_S)
        changing = asyncio.create_task(prefill.worker.set_role(WorkerRole.BOTH))
        await asyncio.wait([changing], timeout=0.2)  # it must not overtake
        held.set()
        await asyncio.wait_for(is_back.wait(), WAIT_S)
        await changing
        assert b'"role":"both"' in (await decode.control.discovery.get(key) or b"")


async def test_an_entry_that_leaves_for_good_is_not_put_back() -> None:
    async with cluster() as shared:
        prefill, decode, _ = await shared.pair()
        prefill.worker.request_drain()
        await shared.gone(prefill)
        assert prefill.id not in str(await decode.control.discovery.list(ROOT))


async def test_an_entry_of_the_queue_that_is_out_of_range_ends_no_prefill_worker() -> None:
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        partition = prefill.worker.inspect().kv_compatibility
        evil = RemotePrefillRequest(
            HandoffId(decode.id, 1),
            decode.id,
            "r",
            (-1, 2**40),
            7,
            SamplingParams(),
            (-1,),
            -16,
            decode_address="nowhere",
            model="m",
            kv_compatibility=partition,
        )
        jetstream = JetStream(decode.control.connection)
        await jetstream.publish(f"kvrelay.default.prefill.queue.{partition}", msgspec.msgpack.encode(evil))
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 1)
        assert prefill.control.prefill_queue.num_malformed == 1
