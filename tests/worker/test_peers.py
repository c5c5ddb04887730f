"""What a worker believes of the others' leases, on an in-memory control plane with a clock moved by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.contracts.waiting import eventually

from kvrelay.config import WorkerRole
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.layout import Compatibility, KVRegion
from kvrelay.core.workers import KvMetadata, WorkerInfo
from kvrelay.worker.cluster.peers import PeerTable

KEYS = Keys("test")
TERMS = Compatibility("m", "w", (KVRegion("kv", 1, 1, 1, "int32"),), 1337, 9)


def metadata(worker_id: str, ttl_s: float, rank: int = 0) -> bytes:
    value = KvMetadata(worker_id, rank, "nixl", b"", 4096, 1600, 16, "cpu", 0, "x", lease_ttl_s=ttl_s)
    return msgspec.json.encode(value)


class Watched:
    """A table that notes what it tells."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.plane = broker.plane()
        self.discovery = self.plane.discovery
        self.ended: list[str] = []
        self.registered: list[KvMetadata] = []
        self.table = PeerTable(
            self.discovery,
            KEYS,
            "m",
            TERMS,
            self.ended.append,
            on_no_prefill=lambda: self.ended.append("no prefill"),
            on_registered=self.registered.append,
        )

    async def put(self, place: str, value: bytes) -> None:
        await self.discovery.put(KEYS.kv_metadata + place, value, await self.discovery.grant(60.0))

    async def delete(self, place: str) -> None:
        await self.discovery.delete(KEYS.kv_metadata + place)

    async def settled(self) -> None:
        """Whatever was written before has been heard."""
        await self.put("marker/0", metadata("marker", 1.0))
        await eventually(lambda: "marker" in self.table.view().leased)
        await self.delete("marker/0")
        await eventually(lambda: "marker" in self.ended)
        self.ended.remove("marker")


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    found = Watched(MemoryBroker())
    found.table.start()
    try:
        await found.settled()
        yield found
    finally:
        await found.table.close()
        await found.plane.close()


async def test_a_worker_is_registered_until_its_lease_ends() -> None:
    async with watched() as one:
        await one.put("w/0", metadata("w", 100.0))
        await eventually(lambda: [each.lease_ttl_s for each in one.registered if each.worker_id == "w"] == [100.0])
        assert "w" in one.table.view().leased
        await one.delete("w/0")
        await eventually(lambda: one.ended == ["w"])
        assert "w" not in one.table.view().leased


@pytest.mark.parametrize("value", [b"{", b"[" * 100_000, metadata("other", 5.0), metadata("w", 0.0)])
async def test_nothing_refused_is_believed(value: bytes) -> None:
    async with watched() as one:
        await one.put("w/0", value)
        await one.settled()
        assert "w" not in one.table.view().leased
        assert "w" not in [each.worker_id for each in one.registered]
        await one.delete("w/0")
        await eventually(lambda: one.ended == ["w"])


async def test_a_lease_lives_by_any_of_its_entries() -> None:
    async with watched() as one:
        await one.put("w/0", metadata("w", 100.0))
        await one.put("w/1", metadata("w", 100.0, rank=1))
        await one.settled()
        await one.delete("w/1")
        await one.settled()
        assert one.ended == []
        await one.delete("w/0")
        await eventually(lambda: one.ended == ["w"])


async def test_garbage_does_not_register_a_worker_again() -> None:
    async with watched() as one:
        await one.put("w/0", metadata("w", 100.0))
        await one.delete("w/0")
        await eventually(lambda: one.ended == ["w"])
        await one.put("w/0", b"garbage")
        await one.settled()
        assert "w" not in one.table.view().leased


async def test_prefill_workers_of_another_kind_of_kv_do_not_count() -> None:
    """They pull from another partition of the queue: what is sent away for them would wait for its deadline."""
    async with watched() as found:
        for name, kind, role in (
            ("p", TERMS.digest(), "prefill"),
            ("q", "y", "prefill"),
            ("d", TERMS.digest(), "decode"),
        ):
            info = WorkerInfo(name, 0, WorkerRole(role), "m", "m", "a", 1, 1, 1, 1, kind, "h", 1, "mock", "nixl")
            lease = await found.discovery.grant(60.0)
            await found.discovery.put(KEYS.worker(name), msgspec.json.encode(info), lease)
        await found.settled()
        await eventually(lambda: found.table.num_prefill_workers == 1)
        await found.discovery.delete(KEYS.worker("p"))
        await eventually(lambda: found.ended == ["no prefill"])
        assert found.table.num_prefill_workers == 0


async def test_the_adapters_of_the_prefill_side_are_those_that_each_of_its_workers_has() -> None:
    async with watched() as found:

        async def register(name: str, role: str, *adapters: str) -> None:
            info = WorkerInfo(name, 0, WorkerRole(role), "m", "m", "a", 1, 1, 1, 1, TERMS.digest(), adapters=adapters)
            await found.discovery.put(KEYS.worker(name), msgspec.json.encode(info), await found.discovery.grant(60.0))

        assert found.table.prefill_adapters == frozenset()
        await register("p", "prefill", "sql@1", "chat@1")
        await eventually(lambda: found.table.prefill_adapters >= {"sql@1", "chat@1"})
        await register("d", "decode", "chat@2")
        await register("q", "prefill", "chat@1", "chat@2")
        await eventually(lambda: found.table.num_prefill_workers == 2)
        assert found.table.prefill_adapters - {""} == {"chat@1"}
        await register("q", "prefill", "sql@1")
        await eventually(lambda: found.table.prefill_adapters - {""} == {"sql@1"})


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"protocol": 8}, "protocol is 8 there, 9 here"),
        ({"adapter": "sql"}, "adapter is 'sql' there, '' here"),
        (
            {"regions": (msgspec.structs.replace(TERMS.regions[0], tail_tokens=2),)},
            "tail_tokens of region kv is 2 there, 0 here",
        ),
        ({"model": "another", "protocol": 8}, None),
        ({}, None),
    ],
)
async def test_the_log_says_why_a_worker_is_no_pair(
    other: dict[str, object], difference: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however often the worker registers."""
    theirs = msgspec.structs.replace(TERMS, **other)
    entry = msgspec.json.decode(metadata("w", 100.0), type=KvMetadata)
    async with watched() as one:
        for term in (1, 2):
            await one.put("w/0", msgspec.json.encode(msgspec.structs.replace(entry, terms=theirs, term=term)))
            await eventually(
                lambda term=term: any((each.worker_id, each.term) == ("w", term) for each in one.registered)
            )
    logged = [record.getMessage() for record in caplog.records if "no KV is exchanged" in record.getMessage()]
    assert logged == ([] if difference is None else [f"no KV is exchanged with w: {difference}"])
