"""Agents' sessions in an engine with host memory: what the pool rightly gave up is the first to give way there too."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from tests.tiers.conftest import PrivateMemory, host_bytes
from tests.tiers.engines import DEAR, TieredEngine
from tests.tiers.sources import BLOCK_SIZE, NUM_BLOCKS, TiersUnderTest, blocks_of, request_of

from kvrelay.core.tier_stats import StoreStats
from kvrelay.tiers.block import BlockName
from kvrelay.tiers.host import HostStore
from kvrelay.tiers.store import BlockChanges

TOOLS = {"read": 1.0, "build": 16.0}


def num_computed(retention: Literal["value", "recency"]) -> int:
    """Prompt tokens of 144 turns of twelve sessions, which grow from 10 blocks to 22. The pool has room for 96 blocks,
    host memory for 192. A quarter of the sessions calls a tool of 16 s, the others one of 1 s."""
    engine = TieredEngine(
        lambda shape: [HostStore(PrivateMemory(host_bytes(192, shape)), shape)], num_blocks=96, retention=retention
    )
    histories = [[(7 * session + at) % 400 + 3 for at in range(40)] for session in range(12)]
    due_s = [0.08 * session for session in range(12)]
    for number in range(144):
        session = min(range(12), key=due_s.__getitem__)
        engine.clock.advance(max(due_s[session] - engine.clock.now(), 0.0))
        histories[session].append(number + 3)
        name = engine.add(histories[session], max_tokens=4)
        histories[session] += engine.run()[name]
        tool = "read" if session % 4 else "build"
        engine.core.session_paused(name, tool)
        due_s[session] = engine.clock.now() + TOOLS[tool]
        assert engine.tiers.settle(60.0)
    engine.close()
    return engine.core.stats().tokens.num_prefilled


def test_host_memory_keeps_the_sessions_that_return_soon() -> None:
    """By seconds alone it keeps old blocks of slow sessions, and 0.81 of recency's tokens are computed."""
    assert num_computed("value") < 0.65 * num_computed("recency")


def test_what_a_session_repeats_is_counted_by_the_place_where_it_was() -> None:
    """A pool of 16 blocks of 4 tokens, from which 12 blocks of another prompt push out the session's last ones."""
    engine = TieredEngine(
        lambda shape: [HostStore(PrivateMemory(host_bytes(64, shape)), shape)], num_blocks=16, retention="value"
    )
    history = list(range(3, 43))
    history += engine.ask(history, max_tokens=1)[0]
    engine.ask(list(range(103, 151)), max_tokens=1)
    assert engine.tiers.settle(60.0)
    engine.ask([*history, 50], max_tokens=1)
    sessions = engine.core.stats().sessions
    engine.close()
    assert sessions is not None
    # Of 10 blocks 4 have found room beside 12.
    assert sessions.tokens_by_place == {"pool": 16, "host": 24, "computed": 0}
    assert sessions.counts.num_missed == 1


def part_found(
    retention: Literal["value", "recency"],
    num_sessions: int,
    num_slots: int,
    num_floods: int,
    *,
    prefetches: bool = False,
) -> float:
    """Of the prompts of a key whose sessions, of 16 blocks each, take turns: the part that is found while another key
    floods. Its prompts, of 11 blocks, return one after the other, ``num_floods`` of them for ever, two between two
    turns; or, if that is 0, at once, and never again. The pool has room for one and a half sessions. ``prefetches``:
    after each of them the other key also asks for a prefetch of an earlier one, which does not follow."""
    engine = TieredEngine(
        lambda shape: [HostStore(PrivateMemory(host_bytes(num_slots, shape)), shape)],
        num_blocks=24,
        retention=retention,
    )

    def num_found(prompt: list[int], tenant: str, *, is_prefetch: bool = False) -> int:
        before = engine.core.stats().tokens.num_prefilled
        engine.add(prompt, max_tokens=4, tenant=tenant, is_prefetch=is_prefetch)
        engine.run()
        assert engine.tiers.settle(60.0)
        return len(prompt) - (engine.core.stats().tokens.num_prefilled - before)

    def flood_of(seed: int) -> list[int]:
        return [(131 * seed + 7 * at) % 480 + 3 for at in range(40)]

    found, number = 0, 0
    for turn in range(5 * num_sessions):
        engine.clock.advance(1.0)
        session = [(7 * (turn % num_sessions) + at) % 400 + 3 for at in range(60)]
        found += num_found([*session, turn + 3], "honest") * (turn >= 3 * num_sessions)
        for _ in range(2 if num_floods else 1):
            seed = number % num_floods if num_floods else number // 2
            num_found(flood_of(seed) + [number + 3] * (number % 2), "flood")
            if prefetches:
                num_found(flood_of(max(seed - 2, 0)), "flood", is_prefetch=True)
            number += 1
    engine.close()
    return found / (2 * num_sessions * 61)


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize(("num_sessions", "num_slots", "num_floods"), [(12, 320, 0), (16, 480, 0), (16, 480, 12)])
def test_a_key_whose_sessions_surely_return_takes_no_room_of_other_keys(
    num_sessions: int, num_slots: int, num_floods: int, prefetches: bool
) -> None:
    """Were its chances compared with the other key's, 0.03 would be found in the first case, and 0.06 in the second; by
    recency 0.64 and 0.98. A key's own wrong guesses count, too."""
    case = num_sessions, num_slots, num_floods
    by_recency = part_found("recency", *case, prefetches=prefetches)
    assert part_found("value", *case, prefetches=prefetches) > 0.9 * by_recency


class Recording:
    """A store that is told what blocks are worth."""

    medium = "host"

    def __init__(self) -> None:
        self.stats, self.changes = StoreStats(), BlockChanges()
        self.worths: list[float] = []

    def holds(self, sequence_hash: int) -> bool:
        return False

    def worth_again(self, sequence_hash: int, worth_s: float) -> bool:
        return False

    def load(self, name: BlockName, into: memoryview) -> bool:
        return False

    def store(self, name: BlockName, payload: memoryview, worth_s: float) -> None:
        self.worths.append(worth_s)

    def clear(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("chance", [1.0, 0.25])
def test_a_store_is_told_the_chance_of_a_return_times_the_seconds_it_saves(tmp_path: Path, chance: float) -> None:
    store = Recording()
    under_test = TiersUnderTest("host", tmp_path, store)
    under_test.tiers.evicted(blocks_of(request_of(), chance))
    assert under_test.tiers.settle(60.0)
    seconds = BLOCK_SIZE * DEAR.prefill_token_s
    assert store.worths == pytest.approx([chance * seconds] * NUM_BLOCKS)
    under_test.close()
