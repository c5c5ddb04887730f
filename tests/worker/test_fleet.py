"""What a worker believes of the others' leases, on an in-memory control plane with a clock moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.contracts.waiting import eventually

from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.workers import KvMetadata
from kvrelay.worker.fleet import MAX_LEASE_TTL_S, Fleet

KEYS = Keys("test")


def metadata(worker_id: str, ttl_s: float, rank: int = 0) -> bytes:
    value = KvMetadata(worker_id, rank, "nixl", b"", 4096, 1600, 16, "cpu", 0, "x", lease_ttl_s=ttl_s)
    return msgspec.json.encode(value)


class Watched:
    """A fleet that notes what it tells, and the delays that it asks the event loop for."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.plane = broker.plane()
        self.discovery = self.plane.discovery
        self.ended: list[str] = []
        self.fenced: list[str] = []
        self.registered: list[KvMetadata] = []
        self.fleet = Fleet(
            self.discovery,
            KEYS,
            "m",
            self.ended.append,
            self.fenced.append,
            on_no_prefill=lambda: None,
            on_registered=self.registered.append,
        )

    def fence_in_s(self, worker_id: str) -> float:
        return self.fleet._fences[worker_id].when() - asyncio.get_running_loop().time()

    async def put(self, place: str, value: bytes) -> None:
        await self.discovery.put(KEYS.kv_metadata + place, value)

    async def delete(self, place: str) -> None:
        await self.discovery.delete(KEYS.kv_metadata + place)

    async def settled(self) -> None:
        """Whatever was written before has been heard."""
        await self.put("marker/0", metadata("marker", 1.0))
        await eventually(lambda: "marker" in self.fleet._ranks)
        await self.delete("marker/0")
        await eventually(lambda: "marker" in self.ended)
        self.ended.remove("marker")
        self.fenced[:] = [worker_id for worker_id in self.fenced if worker_id != "marker"]


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    found = Watched(MemoryBroker())
    found.fleet.start()
    try:
        await found.settled()
        yield found
    finally:
        await found.fleet.close()
        await found.plane.close()


async def test_a_worker_is_fenced_its_own_time_to_live_later() -> None:
    async with watched() as one:
        await one.put("w/0", metadata("w", 100.0))
        await one.delete("w/0")
        await eventually(lambda: one.ended == ["w"])
        assert 99.0 < one.fence_in_s("w") <= 100.0
        assert one.fenced == []


@pytest.mark.parametrize("value", [b"{", b"[" * 100_000, metadata("other", 5.0), metadata("w", 0.0)])
async def test_an_unknown_time_to_live_is_the_longest_and_nothing_refused_is_believed(value: bytes) -> None:
    async with watched() as one:
        await one.put("w/0", value)
        await one.settled()
        assert one.fleet.has_ended("w")
        assert "w" not in [each.worker_id for each in one.registered]
        await one.delete("w/0")
        await eventually(lambda: one.ended == ["w"])
        assert one.fence_in_s("w") > MAX_LEASE_TTL_S - 10.0


async def test_an_entry_overwritten_with_a_shorter_time_does_not_fence_sooner() -> None:
    async with watched() as one:
        await one.put("w/0", metadata("w", 100.0))
        await one.settled()
        await one.put("w/0", metadata("w", 0.1))
        await one.settled()
        await one.delete("w/0")
        await eventually(lambda: one.ended == ["w"])
        assert one.fence_in_s("w") > 90.0


async def test_a_second_delete_does_not_fence_early() -> None:
    async with watched() as one:
        await one.put("w/0", metadata("w", 100.0))
        await one.put("w/1", metadata("w", 100.0, rank=1))
        await one.settled()
        await one.delete("w/1")
        await one.settled()
        assert one.ended == []
        await one.delete("w/0")
        await eventually(lambda: one.ended == ["w"])
        # An entry that was never believed goes, too: the DELETE is one more for the same worker.
        await one.put("w/2", b"{")
        await one.delete("w/2")
        await one.settled()
        assert one.fence_in_s("w") > 90.0
        assert (one.ended, one.fenced) == (["w"], [])


async def test_a_worker_that_registers_again_is_fenced_at_once_but_not_by_garbage() -> None:
    async with watched() as one:
        await one.put("w/0", metadata("w", 100.0))
        await one.delete("w/0")
        await eventually(lambda: one.ended == ["w"])
        await one.put("w/0", b"garbage")
        await one.settled()
        assert one.fenced == []
        await one.put("w/0", metadata("w", 100.0))
        await eventually(lambda: one.fenced == ["w"])
        assert not one.fleet.has_ended("w")
