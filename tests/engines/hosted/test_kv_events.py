"""A server's cache events as ours: exact when all arrive, and never more than the server holds when some do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import HAS_IPV6, PATIENCE_S, noticed

from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.engines.hosted import kv_events
from kvrelay.engines.hosted.cache import REMOVED_FIELDS, STORED_FIELDS, EventsError, MirroredCache
from kvrelay.engines.hosted.kv_events import END, KvEventReader

SIZE, THEIR_SIZE = 2, 4


def batch(*events: list[Any] | dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([0.5, list(events), 0])


def stored(names: list[object], parent: object, tokens: list[int], size: int = THEIR_SIZE) -> list[Any]:
    return ["BlockStored", names, parent, tokens, size, None, "GPU"]


def by_name(event: list[Any]) -> dict[str, Any]:
    """As vLLM 0.32 sends it."""
    names = STORED_FIELDS if event[0] == "BlockStored" else REMOVED_FIELDS
    return {"type": event[0], **dict(zip(names, event[1:]))}


class TheirCache:
    """What vLLM does: blocks under hashes of its own, stored when full, removed in any order."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, list[int]]] = {}

    def place(self, tokens: list[int]) -> list[list[Any]]:
        events, parent = [], None
        for start in range(0, len(tokens) - THEIR_SIZE + 1, THEIR_SIZE):
            piece = tokens[start : start + THEIR_SIZE]
            name = repr(tokens[: start + THEIR_SIZE]).encode()
            if name not in self.blocks:
                self.blocks[name] = (parent, piece)
                events.append(stored([name], parent, piece))
            parent = name
        return events

    def evict(self, number: int) -> list[list[Any]]:
        """A block that none follows."""
        parents = {parent for parent, _ in self.blocks.values()}
        leaves = [name for name in self.blocks if name not in parents]
        if not leaves:
            return []
        name = leaves[number % len(leaves)]
        del self.blocks[name]
        return [["BlockRemoved", [name], "GPU"]]

    def ours(self) -> set[int]:
        return {
            block
            for name in self.blocks
            for block in compute_sequence_hashes([int(token) for token in name.strip(b"[]").split(b",")], SIZE)
        }


def believe(held: set[int], event: KvEvent) -> None:
    """What a router that hears the event believes."""
    match event:
        case BlockStored():
            assert event.parent_hash is None or event.parent_hash in held
            assert not held.intersection(event.block_hashes)
            held.update(event.block_hashes)
        case BlockRemoved():
            assert held.issuperset(event.block_hashes)
            held.difference_update(event.block_hashes)
        case AllBlocksCleared():
            held.clear()


@given(st.lists(st.one_of(st.integers(0, 9), st.lists(st.integers(0, 1), max_size=12)), max_size=30))
def test_it_holds_what_the_server_holds(moves: list[int | list[int]]) -> None:
    theirs, mirror, held = TheirCache(), MirroredCache(SIZE), set()
    for move in moves:
        changes = theirs.evict(move) if isinstance(move, int) else theirs.place(move)
        for event in mirror.apply(batch(*(map(by_name, changes) if len(changes) % 2 else changes))):
            believe(held, event)
        assert set(mirror.hashes()) == held == theirs.ours()
    for event in mirror.apply(batch(["AllBlocksCleared"])):
        believe(held, event)
    assert not held
    assert not len(mirror)


def test_a_block_whose_predecessor_was_missed_is_left_out() -> None:
    mirror = MirroredCache(SIZE)
    assert mirror.apply(batch(stored([2], 1, [5, 6, 7, 8]))) == []
    assert mirror.num_unknown == 1
    assert mirror.apply(batch(["BlockRemoved", [2], "GPU"])) == []


@pytest.mark.parametrize(
    "more",
    [
        [7, "GPU"],
        [None, "GPU", "adapter", [["adapter"]]],
        [None, "GPU", None, [["image", "salt"]]],
        [None, "GPU", None, [[["image", 0], "salt"]]],
    ],
    ids=["id", "name", "two", "image"],
)
def test_blocks_of_more_than_tokens_are_left_out(more: list[Any]) -> None:
    mirror = MirroredCache(SIZE)
    assert mirror.apply(batch([*stored([1], None, [5, 6, 7, 8])[:5], *more])) == []
    assert mirror.apply(batch([*stored([2], None, [5, 6, 7, 8])[:5], None, "GPU", None, [None], 0]))


def test_blocks_with_a_salt_have_the_hashes_of_its_requests() -> None:
    mirror = MirroredCache(SIZE)
    tokens = [5, 6, 7, 8, 1, 2, 3, 4, 9, 9, 9, 9]
    first = stored([1, 2], None, tokens[:8])
    assert len(mirror.apply(batch([*first, None, [["alice"], None]], stored([3], 2, tokens[8:])))) == 3
    for salt, num_hits in (("alice", 6), ("bob", 0), (None, 0)):
        assert mirror.num_leading(compute_sequence_hashes(tokens, SIZE, salt=salt)) == num_hits


@pytest.mark.parametrize("salt", [None, "alice"])
def test_each_adapter_has_its_own_blocks(salt: str | None) -> None:
    """A server tells of the same tokens under the model itself and two adapters."""
    tokens, adapters = [5, 6, 7, 8], ("", "sql", "chat")
    events = [
        by_name(stored([number], None, tokens))
        | {"lora_id": number or None, "lora_name": adapter or None}
        | {"extra_keys": [[*filter(None, [adapter, salt])] or None]}
        for number, adapter in enumerate(adapters)
    ]
    for own in adapters:
        mirror = MirroredCache(SIZE, (own,))
        assert len(mirror.apply(batch(*events))) == 1
        for adapter in adapters:
            hashes = compute_sequence_hashes(tokens, SIZE, lora=adapter or None, salt=salt)
            assert mirror.num_leading(hashes) == (len(hashes) if adapter == own else 0)


@pytest.mark.parametrize("more", [{"medium": "STORAGE"}, {"group_idx": 1}])
def test_other_tiers_and_kinds_of_layers_do_not_count(more: dict[str, Any]) -> None:
    mirror = MirroredCache(SIZE)
    assert mirror.apply(batch(by_name(stored([1], None, [5, 6, 7, 8])) | more)) == []


def test_of_several_kinds_of_layers_those_count_that_keep_the_whole_prompt() -> None:
    """vLLM tells of layers with a window first, if the model begins with one."""
    tokens, mirror = [5, 6, 7, 8], MirroredCache(SIZE)
    window, whole = (
        by_name(stored([1], None, tokens)) | {"group_idx": group, "kv_cache_spec_kind": kind}
        for group, kind in enumerate(("sliding_window", "full_attention"))
    )
    held: set[int] = set()
    for event in mirror.apply(batch(window, whole)):
        believe(held, event)
    assert set(mirror.hashes()) == held == set(compute_sequence_hashes(tokens, SIZE))
    assert mirror.apply(batch({"type": "BlockRemoved", "block_hashes": [1], "group_idx": 0})) == []
    assert mirror.apply(batch({"type": "BlockRemoved", "block_hashes": [1], "group_idx": 1}))
    assert not len(mirror)


def test_the_last_blocks_of_a_prompt_whose_first_ones_are_outside_of_the_window_are_left_out() -> None:
    """vLLM names the blocks that it has, and all tokens."""
    mirror = MirroredCache(SIZE)
    assert mirror.apply(batch(stored([3], None, list(range(12))))) == []
    assert mirror.num_unknown == 1


def test_a_block_that_the_server_holds_twice_stays_until_both_are_gone() -> None:
    mirror = MirroredCache(SIZE)
    mirror.apply(batch(stored([1], None, [5, 6, 7, 8]), stored([1], None, [5, 6, 7, 8])))
    assert mirror.apply(batch(["BlockRemoved", [1]])) == []
    assert len(mirror) == 2
    assert len(mirror.apply(batch(["BlockRemoved", [1]]))) == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([0.5]),
        msgspec.msgpack.encode([0.5, [["Unknown", 1]]]),
        batch(stored([1], None, [5, 6, 7])),
        batch(stored([1], None, [5, 6, 7, -8])),
        batch(stored([1], None, [5, 6, 7, 8.0])),  # type: ignore[list-item]
        batch(stored([1], None, [5, 6, 7], size=3)),
        batch(stored([1], None, [], size=0)),
        batch(stored([[1]], None, [5, 6, 7, 8])),
        batch(stored(["1"], None, [5, 6, 7, 8])),
    ],
)
def test_what_is_no_batch_is_an_error(payload: bytes) -> None:
    with pytest.raises(EventsError):
        MirroredCache(SIZE).apply(payload)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_batch_or_an_error(payload: bytes) -> None:
    try:
        MirroredCache(SIZE).apply(payload)
    except EventsError:
        pass


class Publisher:
    """A server that publishes batches, and tells again those that ``kept`` has."""

    def __init__(self, context: zmq.asyncio.Context, *, is_old: bool, host: str) -> None:
        self.is_old = is_old
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.IPV6, int("[" in host))
        self.address = f"tcp://{host}:{self._pub.bind_to_random_port(f'tcp://{host}')}"
        self.replay_address = f"tcp://{host}:{self._router.bind_to_random_port(f'tcp://{host}')}"
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []

    async def publish(self, number: int, payload: bytes, *, keep: bool = True) -> None:
        if keep:
            self.kept[number] = payload
        await self._pub.send_multipart([b"topic", number.to_bytes(8, "big"), payload])

    async def serve_replays(self) -> None:
        while True:
            peer, _, first = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number in sorted(self.kept):
                if number >= self.asked[-1]:
                    await self._answer(peer, number, self.kept[number])
            await self._answer(peer, END, b"")

    async def _answer(self, peer: bytes, number: int, payload: bytes) -> None:
        topic = [] if self.is_old else [b"topic"]
        await self._router.send_multipart([peer, b"", *topic, number.to_bytes(8, "big"), payload])

    def close(self) -> None:
        self._pub.close(linger=0)
        self._router.close(linger=0)


@asynccontextmanager
async def reading(
    *, with_replay: bool, is_old: bool = False, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Publisher, MirroredCache, list[KvEvent]]]:
    context = zmq.asyncio.Context()
    publisher = Publisher(context, is_old=is_old, host=host)
    mirror, told = MirroredCache(SIZE), []
    reader = KvEventReader(publisher.address, publisher.replay_address if with_replay else "", mirror, told.extend)
    tasks = [asyncio.create_task(reader.run()), asyncio.create_task(publisher.serve_replays())]
    try:
        yield publisher, mirror, told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        publisher.close()
        context.destroy(linger=0)


def block(number: int) -> bytes:
    """Batch ``number``: one more block, the first of a prompt."""
    return batch(stored([number], None, [number, 6, 7, 8]))


def holds(mirror: MirroredCache, *numbers: int) -> bool:
    return set(mirror.hashes()) == {
        found for number in numbers for found in compute_sequence_hashes([number, 6, 7, 8], SIZE)
    }


async def subscribed(publisher: Publisher, mirror: MirroredCache) -> None:
    """Publish the first batch until it has arrived: a subscriber misses what was sent before it had connected."""
    async with asyncio.timeout(PATIENCE_S):
        while not len(mirror):
            await publisher.publish(0, block(0))
            await asyncio.sleep(0.02)


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")
async def test_a_server_may_have_an_ipv6_address() -> None:
    async with reading(with_replay=True, host="[::1]") as (publisher, mirror, _):
        publisher.kept = {0: block(0)}
        await noticed(lambda: holds(mirror, 0))
        while not holds(mirror, 0, 1):
            await publisher.publish(1, block(1))
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("is_old", [False, True])
async def test_what_was_missed_is_told_again(*, is_old: bool) -> None:
    async with reading(with_replay=True, is_old=is_old) as (publisher, mirror, _):
        publisher.kept = {0: block(0), 1: block(1)}
        await noticed(lambda: holds(mirror, 0, 1))
        publisher.kept[2] = block(2)
        number = 2
        async with asyncio.timeout(PATIENCE_S):
            while holds(mirror, 0, 1):
                # Until the subscription stands. A number that comes twice would mean that the server has restarted.
                number += 1
                publisher.kept[number] = block(number)
                await publisher.publish(number, block(number))
                await asyncio.sleep(0.02)
        await noticed(lambda: holds(mirror, *range(number + 1)))
        assert 2 in publisher.asked


async def test_what_the_server_no_longer_has_is_forgotten() -> None:
    async with reading(with_replay=True) as (publisher, mirror, told):
        publisher.kept = {0: block(0)}
        await noticed(lambda: holds(mirror, 0))
        publisher.kept = {5: block(5)}
        while not holds(mirror, 5):
            await publisher.publish(5, block(5))
            await asyncio.sleep(0.02)
        assert any(isinstance(event, AllBlocksCleared) for event in told)


async def test_without_replays_a_gap_forgets_everything() -> None:
    async with reading(with_replay=False) as (publisher, mirror, _):
        await subscribed(publisher, mirror)
        await publisher.publish(7, block(7))
        await noticed(lambda: holds(mirror, 7))
        await publisher.publish(8, block(8))
        await noticed(lambda: holds(mirror, 7, 8))


async def test_a_server_that_starts_again_has_an_empty_cache() -> None:
    async with reading(with_replay=False) as (publisher, mirror, _):
        await subscribed(publisher, mirror)
        await publisher.publish(9, block(9))
        await noticed(lambda: holds(mirror, 9))
        await publisher.publish(1, block(1))
        await noticed(lambda: holds(mirror, 1))


async def test_rubbish_is_forgotten_and_the_next_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "RETRY_INTERVAL_S", 0.0)
    async with reading(with_replay=False) as (publisher, mirror, _):
        await subscribed(publisher, mirror)
        await publisher.publish(1, b"\xc1")
        await noticed(lambda: not len(mirror))
        await subscribed(publisher, mirror)


def test_one_mirror_names_the_blocks_of_several_adapters_apart() -> None:
    """The child of a block has its adapter; blocks of an adapter that is not served are left out."""
    tokens, served = [5, 6, 7, 8], ("", "sql@1", "chat@2")
    mirror = MirroredCache(SIZE, served)
    for number, adapter in enumerate((*served, "sql@2")):
        more = {"lora_id": number or None, "lora_name": adapter or None}
        keys = {"extra_keys": [[adapter] if adapter else None]}
        first = by_name(stored([2 * number], None, tokens)) | more | keys
        mirror.apply(batch(first, by_name(stored([2 * number + 1], 2 * number, tokens)) | more | keys))
    twice = tokens * 2
    found = {each: compute_sequence_hashes(twice, SIZE, lora=each or None) for each in (*served, "sql@2")}
    assert [mirror.num_leading(hashes) for hashes in found.values()] == [4, 4, 4, 0]
    assert len({number for hashes in found.values() for number in hashes}) == 16
    mirror.apply(batch({"type": "BlockRemoved", "block_hashes": [3]}))
    assert [mirror.num_leading(hashes) for hashes in found.values()] == [4, 2, 4, 0]
    # Loaded at run time.
    mirror.adapters.add("sql@2")
    late = {"lora_id": 4, "lora_name": "sql@2", "extra_keys": [["sql@2"]]}
    mirror.apply(batch(by_name(stored([9], None, tokens)) | late))
    assert [mirror.num_leading(hashes) for hashes in found.values()] == [4, 2, 4, 2]
