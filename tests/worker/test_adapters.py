"""Adapters that come and go at run time, as a worker follows the control plane: loaded before they are published,
withdrawn before they are forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.contracts.waiting import eventually
from tests.worker.cluster import cluster, expected, prompt

from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.adapters import AdapterEntry
from kvrelay.core.tasks import end_tasks
from kvrelay.errors import ControlUnavailableError, InvalidInputError
from kvrelay.placement.base import PrefillPlace
from kvrelay.worker.cluster import adapters as adapters_module
from kvrelay.worker.cluster.adapters import WorkerAdapters

KEYS = Keys("test")


def entry(name: str, digest: str = "0", model: str = "m") -> AdapterEntry:
    return AdapterEntry(name, model, f"/adapters/{name}", digest.zfill(16))


class Following:
    """A worker's adapters with an engine that notes what it is told; ``story`` has what happened, in order."""

    def __init__(self, broker: MemoryBroker, *first: str) -> None:
        self.plane = broker.plane()
        self.discovery = self.plane.discovery
        self.story: list[tuple[str, ...]] = []
        self.loading: list[str] = []
        self.refusals: dict[str, str] = {}
        self.publish_error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.membership: Any = SimpleNamespace(adapters=first, refused_adapters={})
        self.adapters = WorkerAdapters(self, self.membership, "m", self._publish)

    async def load_adapter(self, entry: AdapterEntry) -> None:
        self.loading.append(entry.name)
        if self.hold is not None:
            await self.hold.wait()
        if (reason := self.refusals.get(entry.name)) is not None:
            raise InvalidInputError(reason)
        self.story.append(("load", entry.id))

    def retire_adapter(self, adapter: str) -> None:
        self.story.append(("retire", adapter))

    async def _publish(self) -> None:
        if self.publish_error is not None:
            raise self.publish_error
        self.story.append(("publish", *self.membership.adapters))

    async def put(self, *wanted: AdapterEntry) -> None:
        for each in wanted:
            await self.discovery.put(KEYS.adapter(each.name), msgspec.json.encode(each))

    async def delete(self, name: str) -> None:
        await self.discovery.delete(KEYS.adapter(name))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(work) for work in (self.adapters.watch(self.discovery, KEYS), self.adapters.keep())
        ]
        try:
            yield
        finally:
            await end_tasks(tasks)
            await self.plane.close()


async def test_an_adapter_is_loaded_then_published_and_withdrawn_then_forgotten() -> None:
    """Also one that is there when the worker joins; one of another model never is."""
    own, chat, sql = entry("own"), entry("org/chat"), entry("sql")
    one = Following(MemoryBroker(), own.id)
    await one.put(chat, entry("other", model="n"), own)
    async with one.running():
        await eventually(lambda: len(one.story) == 2)
        await one.put(sql)
        await eventually(lambda: len(one.story) == 4)
        await one.delete("org/chat")
        await eventually(lambda: len(one.story) == 6)
        await one.put(chat)
        await eventually(lambda: len(one.story) == 8)
    assert one.story == [
        ("load", chat.id),
        ("publish", own.id, chat.id),
        ("load", sql.id),
        ("publish", own.id, chat.id, sql.id),
        ("publish", own.id, sql.id),
        ("retire", chat.id),
        ("load", chat.id),
        ("publish", own.id, sql.id, chat.id),
    ]


async def test_other_contents_of_a_name_replace_it() -> None:
    one = Following(MemoryBroker())
    old, new = entry("sql", "1"), entry("sql", "2")
    await one.put(old)
    async with one.running():
        await eventually(lambda: len(one.story) == 2)
        await one.put(new)
        await eventually(lambda: len(one.story) == 6)
    assert one.story[2:] == [("publish",), ("retire", old.id), ("load", new.id), ("publish", new.id)]


async def test_a_refusal_is_published_with_its_reason_and_goes_with_its_entry() -> None:
    one = Following(MemoryBroker())
    sql, chat = entry("sql"), entry("chat")
    one.refusals["sql"] = "no such file"
    await one.put(sql, chat)
    async with one.running():
        await eventually(lambda: one.membership.adapters == (chat.id,))
        await eventually(lambda: one.membership.refused_adapters == {sql.id: "no such file"})
        await one.delete("sql")
        await eventually(lambda: one.membership.refused_adapters == {})
    assert ("retire", sql.id) not in one.story


async def test_an_adapter_that_is_unloaded_while_it_is_loaded_is_forgotten() -> None:
    one = Following(MemoryBroker())
    sql, chat = entry("sql"), entry("chat")
    one.hold = asyncio.Event()
    await one.put(sql)
    async with one.running():
        await eventually(lambda: one.loading == ["sql"])
        await one.delete("sql")
        await one.put(chat)
        one.hold.set()
        await eventually(lambda: one.membership.adapters == (chat.id,) and ("retire", sql.id) in one.story)


async def test_what_is_loaded_and_unloaded_a_thousand_times_is_gone_in_the_end() -> None:
    """However many changes come while one is being carried out."""
    one = Following(MemoryBroker())
    chat = entry("chat")
    async with one.running():
        for number in range(1000):
            sql = entry("sql", f"{number:x}")
            await one.put(sql)
            if number % 3:
                await asyncio.sleep(0)
            if number % 100 == 0:
                await eventually(lambda sql=sql: one.membership.adapters == (sql.id,))
            await one.delete("sql")
        await one.put(chat)
        await eventually(lambda: one.membership.adapters == (chat.id,))
    loaded, retired = ([each for what, *each in one.story if what == kind] for kind in ("load", "retire"))
    assert len(loaded) >= 11
    assert loaded == [*retired, [chat.id]]


async def test_nothing_is_forgotten_that_frontends_still_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """While discovery is away the adapter stays; then it is withdrawn first."""
    monkeypatch.setattr(adapters_module, "RETRY_INTERVAL_S", 0.01)
    one = Following(MemoryBroker())
    sql = entry("sql")
    await one.put(sql)
    async with one.running():
        await eventually(lambda: one.story == [("load", sql.id), ("publish", sql.id)])
        one.publish_error = ControlUnavailableError("away")
        await one.delete("sql")
        await eventually(lambda: one.membership.adapters == ())
        await asyncio.sleep(0.05)
        assert len(one.story) == 2
        one.publish_error = None
        await eventually(lambda: one.story[2:] == [("publish",), ("retire", sql.id)])


@pytest.mark.parametrize("value", [b"", b"{", msgspec.json.encode(entry("other")), b'{"name":"sql"}'])
async def test_malformed_entries_are_passed_over(value: bytes) -> None:
    one = Following(MemoryBroker())
    await one.discovery.put(KEYS.adapter("sql"), value)
    async with one.running():
        await one.put(chat := entry("chat"))
        await eventually(lambda: one.membership.adapters == (chat.id,))
    assert one.story == [("load", chat.id), ("publish", chat.id)]


async def test_a_prompt_for_an_adapter_that_the_prefill_side_lacks_is_computed_here() -> None:
    """Any prefill worker may pull it."""
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        client.send("lacking", prompt(300), adapter="sql@1")
        assert await client.answer("lacking") == expected(prompt(300), 8)
        client.send("own", prompt(300, 1))
        assert await client.answer("own") == expected(prompt(300, 1), 8)
        assert decode.worker.stats().decode.places == {PrefillPlace.LOCAL_REQUIRED: 1, PrefillPlace.REMOTE: 1}
        await shared.check_idle()
