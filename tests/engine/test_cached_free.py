"""Which cached blocks give way. Expected orders follow from the definition of value, worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.core.clock import ManualClock
from kvrelay.engine import cached_free
from kvrelay.engine.cached_free import BLOCKS_AT_ONCE, ByRecency, ByValue, CachedFree
from kvrelay.engine.pauses import Pauses, Session

NO_CHILDREN = [0] * 5000


@pytest.fixture
def compares_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_free, "BLOCKS_AT_ONCE", 0)


class Resting:
    """Groups of blocks under ``ByValue``, whose pauses have kinds that are well known."""

    def __init__(self, *known: tuple[str, float], block_s: Sequence[float] = (1.0,) * 5000) -> None:
        self.clock = ManualClock()
        self.pauses = Pauses(self.clock)
        self.free = ByValue(self.clock, self.pauses.prior, block_s.__getitem__)
        for kind, seconds in known:
            for number in range(100):
                self.pauses.begin(f"{kind} {number}", "", {7: 1}, Session())
                self.pauses.named(f"{kind} {number}", kind)
                self.clock.advance(seconds)
                self.pauses.end([7], "")

    def rest(self, name: str, block_ids: Sequence[int], kind: str = "", tenant: str = "") -> None:
        pause = self.pauses.begin(name, tenant, {1000 + block_ids[0]: 1}, Session())
        self.free.add(list(reversed(block_ids)), pause)
        if kind:
            self.pauses.named(name, kind)

    def pop(self, count: int) -> list[int]:
        return [self.free.pop(1, NO_CHILDREN, {})[0] for _ in range(count)]


@pytest.mark.parametrize("free", [ByRecency(), Resting().free], ids=["recency", "value"])
def test_without_knowledge_the_oldest_gives_way_its_end_first(free: CachedFree) -> None:
    free.add([3, 2, 1], None)
    free.add([6, 5, 4], None)
    free.remove(2)
    assert len(free) == 5
    assert (2 in free, 3 in free) == (False, True)
    assert sorted(free.newest()) == [1, 3, 4, 5, 6]
    assert [free.pop(1, NO_CHILDREN, {})[0] for _ in range(5)] == [3, 1, 6, 5, 4]
    with pytest.raises(KeyError):
        free.remove(2)


def test_a_session_whose_tool_takes_long_gives_way_before_older_ones() -> None:
    resting = Resting(("read", 0.3), ("build", 60.0))
    resting.rest("r", [0, 1], "read")
    resting.clock.advance(0.1)
    resting.rest("b", [2, 3], "build")
    assert resting.pop(4) == [3, 2, 1, 0]


def test_of_equal_tools_the_one_that_is_due_first_stays() -> None:
    resting = Resting(("build", 60.0))
    for number in range(3):
        resting.rest(f"b{number}", [number], "build")
        resting.clock.advance(20.0)
    # 60, 40 and 20 s of about 60 s have passed: the newest is due last.
    assert resting.pop(3) == [2, 1, 0]


def test_a_session_that_is_overdue_gives_way_before_one_that_is_due() -> None:
    resting = Resting(("build", 60.0))
    resting.rest("late", [0], "build")
    resting.clock.advance(3000.0)
    resting.rest("due", [1], "build")
    resting.clock.advance(55.0)
    assert resting.pop(2) == [0, 1]


@pytest.mark.usefixtures("compares_each_time")
def test_what_a_waiting_turn_repeats_stays_and_what_it_left_behind_goes() -> None:
    resting = Resting(("read", 1.0))
    resting.rest("old", [0, 1, 2])
    resting.rest("new", [3], "read")
    pause = resting.pauses.end([1000], "")
    assert pause is not None
    resting.free.remove(0)
    assert resting.free.pop(1, NO_CHILDREN, {})[0] == 3, "the turn of the older one is here"
    resting.rest("newer", [4], "read")
    resting.pauses.resumed(pause, is_served=True)
    assert resting.pop(3) == [2, 1, 4], "the answer was not repeated"


def test_a_block_gives_way_after_those_that_rest_on_it() -> None:
    resting = Resting()
    resting.rest("shared", [0, 1])
    resting.rest("child", [2])
    children = [0] * 10
    children[1] = 1
    assert resting.free.pop(1, children, {})[0] == 0, "nothing rests on it"
    assert resting.free.pop(1, children, {})[0] == 2
    children[1] = 0
    resting.free.bared(1)
    assert resting.pop(1) == [1]
    resting.rest("again", [5])
    children[5] = 1
    assert resting.free.pop(1, children, {})[0] == 5, "there is nothing else"
    assert not len(resting.free)


@pytest.mark.parametrize(("block_s", "first"), [([1.0, 1.0], 1), ([0.1, 1.0], 0)], ids=["equal", "cheaper"])
def test_blocks_that_cost_less_to_have_again_go_first(block_s: list[float], first: int) -> None:
    resting = Resting(("read", 1.0), ("shell", 1.5), block_s=block_s)
    resting.rest("a", [0], "read")
    resting.rest("b", [1], "shell")
    # Within the shortest horizon, 1 s: half of all reads, and of shells those below -1.35 deviations, 9 %.
    assert resting.pop(1) == [first]


def test_the_chance_of_a_later_return_is_within_four_horizons() -> None:
    """Pauses of 4 s: ``MIN_SIGMA`` is the deviation of equal ones, and the horizon the shortest, 1 s."""
    resting = Resting(("read", 4.0))
    resting.rest("r", [0, 1], "read")
    fit = resting.pauses.fits["", "read"]
    resting.pop(1)
    # Half of those which end do so within 4 s, the median.
    assert resting.free.chance_later == pytest.approx(fit.share / 2, rel=0.05)
    resting.clock.advance(4000.0)
    assert resting.free.chance_later == pytest.approx(fit.share / 2, rel=0.05), "as it was chosen"


def test_blocks_of_several_sequences_are_wanted_and_so_are_all_by_recency() -> None:
    resting = Resting()
    resting.rest("shared", [0])
    resting.rest("child", [1])
    children = [1, *NO_CHILDREN]
    assert resting.free.pop(1, children, {})[0] == 1
    assert resting.free.chance_later < 1.0
    assert resting.free.pop(1, children, {})[0] == 0
    assert resting.free.chance_later == 1.0
    by_recency = ByRecency()
    by_recency.add([0], None)
    by_recency.pop(1, NO_CHILDREN, {})
    assert by_recency.chance_later == 1.0


def test_what_was_learned_of_a_key_outlives_its_blocks() -> None:
    """Were its mean new, the first block that gives way would always count as the mean."""
    resting, chances = Resting(("read", 0.3), ("build", 60.0)), []
    for number, kind in enumerate(("read", "build")):
        resting.rest(f"r{number}", [number], kind)
        resting.rest(f"of another key {number}", [10 + number], tenant="other")
        resting.clock.advance(1.0)
        assert resting.pop(1) == [number]
        chances.append(resting.free.chance_later)
        resting.pop(1)
    assert chances[0] == 1.0
    assert chances[1] > 1.5


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_compares_ends_and_finds_the_least_of_all(seed: int) -> None:
    rng = random.Random(seed)
    resting = Resting(("read", 0.3), ("shell", 3.0), ("build", 30.0))
    for number in range(60):
        resting.rest(f"r{number}", [number], rng.choice(["read", "shell", "build"]))
        resting.clock.advance(rng.expovariate(1.0))
    while len(resting.free) > BLOCKS_AT_ONCE:
        values = {block: resting.free.value(block) for block in resting.free.newest()}
        first = resting.pop(1)[0]
        assert values[first] <= min(values.values()) + 1e-12
        resting.pop(BLOCKS_AT_ONCE - 1)


Asked = tuple[str, int, str, float, bool]
"""A key's request: whose, its session, what it says of its pause (tool and promise), and whether the session returns
(else the blocks are new ones)."""
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(("honest", "liar")),
        st.integers(0, 4),
        st.sampled_from(("", "a", "b")),
        st.sampled_from((0.0, 0.5, 4.0, 86400.0)),
        st.booleans(),
    ),
    max_size=120,
)


class Keys:
    """Requests of 4 blocks each, of two keys, in a cache of 12 blocks. The honest key says nothing, and its pauses are
    of no known kind."""

    def __init__(self, free: CachedFree, pauses: Pauses, clock: ManualClock) -> None:
        self.free, self.pauses, self.clock = free, pauses, clock
        self.plain = list(range(12))
        self.block_of: dict[tuple[str, int, int], int] = {}
        self.num_asked = 0

    def ask(self, key: str, session: int, tool: str, within_s: float) -> int:
        """How many of its blocks are found. They give way and are released as in a pool."""
        names = [(key, session, at) for at in range(4)]
        found = [self.block_of[name] for name in names if name in self.block_of]
        for block in found:
            self.free.remove(block)
        for name in names:
            if name not in self.block_of:
                if not self.plain:
                    gone = self.free.pop(1, NO_CHILDREN, {})[0]
                    self.plain.append(gone)
                    self.block_of = {other: block for other, block in self.block_of.items() if block != gone}
                self.block_of[name] = self.plain.pop()
        request, mark = f"{key} {self.num_asked}", hash((key, session))
        self.num_asked += 1
        if key == "liar":
            self.pauses.end([mark], key)
            pause = self.pauses.begin(request, key, {mark: 4}, Session())
            self.free.add([self.block_of[name] for name in reversed(names)], pause)
            self.pauses.named(request, tool, within_s)
        else:
            self.free.add([self.block_of[name] for name in reversed(names)], None)
        self.clock.advance(0.5)
        return len(found)


@pytest.mark.usefixtures("compares_each_time")
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS)
def test_a_key_takes_no_more_by_hints_than_by_asking_for_as_many_new_blocks(requests: list[Asked]) -> None:
    """Recency is the other implementation, where the liar asks for new blocks only."""
    clock = ManualClock()
    pauses = Pauses(clock)
    by_value = Keys(ByValue(clock, pauses.prior, lambda _: 1.0), pauses, clock)
    by_recency = Keys(ByRecency(), Pauses(ManualClock()), ManualClock())
    for number, (key, session, tool, within_s, returns) in enumerate(requests):
        new = 100 + number
        found = by_value.ask(key, session if returns or key == "honest" else new, tool, within_s)
        at_least = by_recency.ask(key, session if key == "honest" else new, tool, within_s)
        assert found >= at_least


def test_value_chooses_among_the_blocks_of_the_key_whose_turn_it_is() -> None:
    resting = Resting(("read", 0.3), ("build", 60.0))
    resting.rest("first", [0, 1], "read")
    resting.rest("second", [2, 3], "build")
    resting.free.add([5, 4], resting.pauses.begin("other", "other", {9: 1}, Session()))
    # The first two places are the key's own; it pays with what it expects last. Then it has the second's places.
    assert resting.pop(6) == [3, 2, 1, 0, 5, 4]


def test_what_its_own_key_expects_least_yields_to_older_blocks_of_another() -> None:
    resting = Resting(("read", 0.3))
    resting.free.add([1, 0], resting.pauses.begin("other", "other", {9: 1}, Session()))
    resting.clock.advance(3.0)
    resting.rest("new", [2, 3], "read")
    resting.rest("over", [4, 5])
    resting.pauses.over("over")
    # The other key's two places are the oldest. It is not known when its session returns.
    assert resting.pop(6) == [5, 4, 1, 0, 3, 2]
