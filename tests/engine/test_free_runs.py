from __future__ import annotations

import random

from kvrelay.engine.free_runs import FreeRuns


def test_takes_adjacent_ids_and_merges_them_back() -> None:
    runs = FreeRuns()
    runs.add(0, 10)
    first, second = runs.take(4), runs.take(3)
    assert first == [0, 1, 2, 3]
    assert second == [4, 5, 6]
    runs.add(1, 2)
    assert runs.runs() == {1: 2, 7: 3}
    runs.add(4, 3)
    runs.add(3)
    assert runs.runs() == {1: 9}
    assert len(runs) == 9


def test_prefers_the_place_behind_a_block() -> None:
    runs = FreeRuns()
    runs.add(0, 3)
    runs.add(10, 6)
    assert runs.take(2, after=9) == [10, 11]
    assert runs.take(2, after=5) in ([0, 1], [12, 13])


def test_takes_the_smallest_class_that_fits() -> None:
    runs = FreeRuns()
    runs.add(0, 100)
    runs.add(200, 5)
    assert runs.take(4) == [200, 201, 202, 203]
    assert runs.take(90) == list(range(90))


def test_several_runs_when_none_is_long_enough() -> None:
    runs = FreeRuns()
    for start in (0, 10, 20):
        runs.add(start, 3)
    taken = runs.take(8)
    assert len(set(taken)) == 8
    assert len(runs) == 1


def test_random_use_keeps_exactly_the_free_ids() -> None:
    rng = random.Random(7)
    runs = FreeRuns()
    runs.add(0, 200)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and (rng.random() < 0.5 or len(runs) < 20):
            for block in held.pop(rng.randrange(len(held))):
                runs.add(block)
        else:
            after = held[-1][-1] if held and rng.random() < 0.5 else None
            held.append(runs.take(rng.randrange(1, 20), after))
        out = {block for blocks in held for block in blocks}
        free = {start + i for start, length in runs.runs().items() for i in range(length)}
        assert not out & free
        assert len(out) + len(runs) == 200
    for blocks in held:
        for block in blocks:
            runs.add(block)
    assert runs.runs() == {0: 200}
