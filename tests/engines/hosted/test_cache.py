"""What a server presumably holds: never more than it may, prefixes whole, and events that say exactly what is held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.engines.hosted.cache import PlacedPrefixes

SIZE = 2
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=12), max_size=30)


def _apply(held: dict[int, int | None], event: KvEvent) -> None:
    """What a router that hears the event believes: each block with the one before it."""
    match event:
        case BlockStored():
            parent = event.parent_hash
            assert parent is None or parent in held
            for block in event.block_hashes:
                assert block not in held
                held[block] = parent
                parent = block
        case BlockRemoved():
            for block in event.block_hashes:
                del held[block]
                assert block not in held.values(), "a block leaves before those that follow it"
        case AllBlocksCleared():
            held.clear()


@given(PROMPTS, st.integers(1, 8))
def test_events_tell_what_is_held(prompts: list[list[int]], capacity: int) -> None:
    placed, held = PlacedPrefixes(SIZE, capacity), {}
    for prompt in prompts:
        hashes = compute_sequence_hashes(prompt, SIZE)
        for event in placed.place(hashes):
            _apply(held, event)
        assert set(placed.hashes()) == set(held)
        assert len(placed) <= capacity
        assert placed.num_leading(hashes) == min(len(hashes), capacity)
    for event in placed.clear():
        _apply(held, event)
    assert not held
    assert not placed.clear()


def test_the_oldest_prompt_leaves_first() -> None:
    placed = PlacedPrefixes(1, 4)
    old, new, more = ([1, 2], [3, 4], [5])
    for prompt in (old, new, old, more):
        hashes = compute_sequence_hashes(prompt, 1)
        placed.place(hashes)
    held = [placed.num_leading(compute_sequence_hashes(prompt, 1)) for prompt in (old, new, more)]
    assert held == [2, 1, 1], "the last block of the prompt that nobody has used since"
