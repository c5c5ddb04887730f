from __future__ import annotations

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.core.clock import ManualClock
from kvrelay.engine import pauses as module
from kvrelay.engine.pauses import MAX_KINDS_OF_KEY, PRIOR_MEDIAN_S, PRIOR_SHARE, PauseFit, Pauses, Session


def begin(pauses: Pauses, name: str, tenant: str = "", mark: int = 0) -> None:
    pauses.begin(name, tenant, {mark or hash(name): 1}, Session())


def test_half_of_the_pauses_that_end_are_shorter_than_the_median() -> None:
    fit = PauseFit()
    assert fit.chance(0.0, PRIOR_MEDIAN_S) == pytest.approx(PRIOR_SHARE / 2)
    # After the median a quarter of all has ended. Of the other 3/4 another 1/4 will end at some time.
    assert fit.chance(PRIOR_MEDIAN_S, 1e9) == pytest.approx(0.25 / 0.75, abs=1e-6)
    assert fit.chance(0.0, 2 * PRIOR_MEDIAN_S, shift=math.log(2)) == pytest.approx(PRIOR_SHARE / 2)


@pytest.mark.parametrize(("median_s", "sigma"), [(0.3, 0.6), (12.0, 0.5), (600.0, 1.0)])
def test_a_log_normal_is_learned(median_s: float, sigma: float) -> None:
    fit, rng = PauseFit(), random.Random(1)
    for _ in range(300):
        fit.returned(median_s * math.exp(sigma * rng.gauss(0.0, 1.0)))
    # Over 64 samples the mean has a standard error of sigma / 8, the deviation one of sigma / 11.
    assert fit.mean == pytest.approx(math.log(median_s), abs=3 * sigma / 8)
    assert fit.sigma == pytest.approx(sigma, rel=3 / 11)
    assert fit.share > 0.95
    for _ in range(200):
        fit.gone()
    assert fit.share < 0.1


def test_a_session_is_seen_by_its_prefix_and_learned_from() -> None:
    clock = ManualClock()
    pauses = Pauses(clock)
    session = Session()
    pause = pauses.begin("r1", "key", {11: 2, 13: 4}, session)
    assert pauses.named("r1", "bash") is pause
    clock.advance(3.0)
    assert pauses.end([10, 11, 99, 98], "other key") is None, "keys learn nothing from each other"
    assert pauses.end([10, 99], "key") is None
    assert pauses.end([10, 11, 12, 13, 14], "key") is pause
    assert (pause.num_repeated, session.num_turns) == (4, 1)
    assert math.exp(pauses.fits["key", "bash"].mean) == pytest.approx(5 * (3 / 5) ** (1 / 3)), "the prior counts twice"
    assert pauses.end([10, 11, 12, 13, 14], "key") is None, "it is over"
    assert pauses.named("r1", "bash") is None


def test_sessions_that_are_over_or_gone_pause_no_longer() -> None:
    """They were counted until 8,192 later pauses of their key: a worker that drained waited for them."""
    clock = ManualClock()
    pauses = Pauses(clock)
    for mark in (1, 2, 3):
        begin(pauses, f"r{mark}", "key", mark)
    pauses.over("r1")
    pauses.over("r1")
    assert pauses.num_paused == 2
    assert pauses.end([1], "key") is not None, "it is seen all the same"
    assert pauses.num_paused == 2
    clock.advance(1e6)
    begin(pauses, "r4", "key", 4)
    assert (pauses.counts.num_gone, pauses.num_paused) == (2, 1)
    assert pauses.end([2], "key") is not None
    assert pauses.end([4], "key") is not None
    assert (pauses.counts.num_begun, pauses.counts.num_returned, pauses.num_paused) == (4, 3, 0)


@pytest.mark.parametrize("within_s", [-1.0, 0.0, 1e-9, 1e300, math.inf, math.nan])
def test_what_is_no_time_promises_nothing(within_s: float) -> None:
    """A frame of the fuzz test raised ValueError on the engine's thread."""
    pauses = Pauses(ManualClock())
    begin(pauses, "r1")
    pause = pauses.named("r1", "bash", within_s)
    assert pause is not None
    assert pause.fit is pauses.fits["", "bash"]
    assert math.exp(pause.fit.mean) == pytest.approx(PRIOR_MEDIAN_S)


def test_a_slow_session_expects_more_than_its_tool() -> None:
    clock = ManualClock()
    pauses = Pauses(clock)
    slow = Session()
    for number in range(30):
        pauses.begin(f"fast {number}", "", {1: 1}, Session())
        pauses.named(f"fast {number}", "bash")
        clock.advance(1.0)
        pauses.end([1], "")
        pauses.begin(f"slow {number}", "", {2: 1}, slow)
        pauses.named(f"slow {number}", "bash")
        clock.advance(9.0)
        pauses.end([2], "")
    fit = pauses.fits["", "bash"]
    assert math.exp(fit.mean) == pytest.approx(3.0, rel=0.15), "the mean of 1 s and 9 s"
    assert math.exp(fit.mean + slow.shift) == pytest.approx(9.0, rel=0.3)


def test_a_tool_that_never_returns_is_expected_less() -> None:
    clock = ManualClock()
    pauses = Pauses(clock)
    for number in range(40):
        begin(pauses, f"r{number}", mark=number + 1)
    clock.advance(1e7)
    for number in range(40, 80):
        begin(pauses, f"r{number}", mark=number + 1)
    assert pauses.counts.num_gone == 40
    assert pauses.fits["", ""].share < 0.05
    assert len(pauses) == 80, "they may return all the same"
    assert pauses.end([1], "") is not None


def test_a_key_that_floods_loses_its_own_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAUSES_OF_KEY", 10)
    pauses = Pauses(ManualClock())
    begin(pauses, "quiet", "quiet", mark=1)
    for number in range(1000):
        begin(pauses, f"r{number}", "loud", mark=number + 2)
    assert len(pauses) == 11
    assert pauses.end([2], "loud") is None
    assert pauses.end([1], "quiet") is not None


def test_a_key_that_lies_about_its_tools_misleads_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KINDS", 40)
    clock = ManualClock()
    pauses = Pauses(clock)
    for number in range(200):
        tenant = f"liar {number % 4}"
        begin(pauses, f"r{number}", tenant, mark=number + 1)
        pauses.named(f"r{number}", f"tool {number}")
        pauses.end([number + 1], tenant)
    assert len(pauses.fits) == 40
    assert max(sum(key == f"liar {n}" for key, _ in pauses.fits) for n in range(4)) <= MAX_KINDS_OF_KEY
    # No room is left for another key: nothing is learned of it, from it or from others.
    begin(pauses, "honest", "honest", mark=5000)
    pause = pauses.end([5000], "honest")
    assert pause is not None
    assert (pauses.prior.mean, pauses.prior.share) == (math.log(PRIOR_MEDIAN_S), PRIOR_SHARE)


KEYS = ("honest", "liar", "other")
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("begin", "named", "over", "end", "wait")),
        st.sampled_from(KEYS),
        st.integers(0, 5),
        st.sampled_from((0.0, 0.001, 0.5, 4.0, 1e5, math.inf, -1.0)),
    ),
    max_size=80,
)


def act(pauses: Pauses, clock: ManualClock, action: str, key: str, number: int, value: float) -> None:
    name, mark = f"{key} {number}", 1000 * KEYS.index(key) + number
    if action == "begin":
        pauses.begin(name, key, {mark: 1 + number}, Session())
    elif action == "named":
        pauses.named(name, f"tool {number % 3}", value)
    elif action == "over":
        pauses.over(name)
    elif action == "end":
        pauses.end([mark], key)
    else:
        clock.advance(value if 0.0 <= value < 10.0 else 100.0)


@pytest.fixture
def none_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a pause is found to be overdue depends on how many begin, whoever begins them."""
    monkeypatch.setattr(module, "NUM_GONE_CHECKS", 0)


@pytest.mark.usefixtures("none_is_gone")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTIONS)
def test_what_is_learned_of_a_key_is_the_same_without_the_others(actions: list[tuple[str, str, int, float]]) -> None:
    clock, alone_clock = ManualClock(), ManualClock()
    shared, alone = Pauses(clock), Pauses(alone_clock)
    for action, key, number, value in actions:
        act(shared, clock, action, key, number, value)
        if key == "honest" or action == "wait":
            act(alone, alone_clock, action, key, number, value)
    honest = {kind: repr(fit) for kind, fit in shared.fits.items() if kind[0] == "honest"}
    assert honest == {kind: repr(fit) for kind, fit in alone.fits.items()}


def test_a_clock_that_goes_back_ends_pauses_at_once() -> None:
    clock = ManualClock()
    pauses = Pauses(clock)
    begin(pauses, "r1", mark=1)
    clock.advance(-100.0)
    assert pauses.end([1], "") is not None
    assert math.isfinite(pauses.fits["", ""].chance(-50.0, 1.0))
