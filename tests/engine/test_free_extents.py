from __future__ import annotations

import random

from kvrelay.engine.free_extents import FreeExtents


def test_takes_adjacent_ids_and_merges_them_back() -> None:
    extents = FreeExtents()
    extents.add(0, 10)
    first, second = extents.take(4), extents.take(3)
    assert first == [0, 1, 2, 3]
    assert second == [4, 5, 6]
    extents.add(1, 2)
    assert extents.extents() == {1: 2, 7: 3}
    extents.add(4, 3)
    extents.add(3)
    assert extents.extents() == {1: 9}
    assert len(extents) == 9


def test_prefers_the_place_behind_a_block() -> None:
    extents = FreeExtents()
    extents.add(0, 3)
    extents.add(10, 6)
    assert extents.take(2, after=9) == [10, 11]
    assert extents.take(2, after=5) in ([0, 1], [12, 13])


def test_takes_the_smallest_class_that_fits() -> None:
    extents = FreeExtents()
    extents.add(0, 100)
    extents.add(200, 5)
    assert extents.take(4) == [200, 201, 202, 203]
    assert extents.take(90) == list(range(90))


def test_several_extents_when_none_is_long_enough() -> None:
    extents = FreeExtents()
    for start in (0, 10, 20):
        extents.add(start, 3)
    taken = extents.take(8)
    assert len(set(taken)) == 8
    assert len(extents) == 1


def test_random_use_keeps_exactly_the_free_ids() -> None:
    rng = random.Random(7)
    extents = FreeExtents()
    extents.add(0, 200)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and (rng.random() < 0.5 or len(extents) < 20):
            freed = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.5:
                extents.add_all(freed[::-1])
            else:
                for block in freed:
                    extents.add(block)
        else:
            after = held[-1][-1] if held and rng.random() < 0.5 else None
            held.append(extents.take(rng.randrange(1, 20), after))
        out = {block for blocks in held for block in blocks}
        free = {start + i for start, length in extents.extents().items() for i in range(length)}
        assert not out & free
        assert len(out) + len(extents) == 200
    for blocks in held:
        for block in blocks:
            extents.add(block)
    assert extents.extents() == {0: 200}
