"""Remote or local by cost: the cheaper way, the window, objectives, and costs that cannot be."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvrelay.config import DisaggConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.step_cost import CostSource, StepCost
from kvrelay.errors import ConfigError
from kvrelay.placement.base import Objectives, PrefillLoad, PrefillPlace, Situation
from kvrelay.placement.cost import HARM, LATE, MIN_WINDOW, CostPlacement, decide, local_cost, objectives_of, stay_here
from kvrelay.placement.cost_model import MAX_SPREAD, RemoteCost
from kvrelay.placement.threshold import DisaggPolicy

COST = StepCost(0.002, 0.003, 1e-5, 0.0, 2.5e-5, 0.0)
REMOTE = RemoteCost(0.010, 1e-5, 1e-7, 0.001, 1e-5)
ONE = PrefillLoad(1, 0)
IDLE = Situation(
    num_tokens=8000,
    waited_s=0.0,
    num_here=0,
    num_remote_tokens=0,
    num_remote_prefills=0,
    chunk=1500,
    num_decodes=8,
    num_context=1000,
    is_here_open=True,
    cost=COST,
    objectives=Objectives(0.5, 0.025),
)


def place(situation: Situation, prefill_load: PrefillLoad = ONE) -> PrefillPlace | None:
    return decide(situation, REMOTE, prefill_load, 1000.0).place


def test_a_short_prompt_stays_and_a_long_one_beside_answers_goes() -> None:
    assert place(replace(IDLE, num_tokens=30)) is PrefillPlace.LOCAL_CHEAPER
    assert place(IDLE) is PrefillPlace.REMOTE


def test_a_backlog_away_deflects_a_prefill_to_here() -> None:
    busy = replace(IDLE, num_remote_tokens=80_000, num_remote_prefills=10)
    assert place(busy) is PrefillPlace.LOCAL_CHEAPER
    assert place(busy, PrefillLoad(16, 0)) is PrefillPlace.REMOTE, "sixteen workers share it"
    assert place(IDLE, PrefillLoad(1, 100)) is PrefillPlace.LOCAL_CHEAPER, "what others have queued counts, too"


def test_a_request_waits_for_the_cheaper_way_if_that_is_closed() -> None:
    busy = replace(IDLE, num_remote_tokens=80_000, num_remote_prefills=10, is_here_open=False)
    assert place(busy) is None
    behind = replace(IDLE, num_here=200_000, num_remote_tokens=32_000, num_remote_prefills=MIN_WINDOW)
    assert place(behind) is None, "remote is cheaper, and its window is full"
    assert place(replace(behind, num_remote_prefills=MIN_WINDOW - 1)) is PrefillPlace.REMOTE
    assert place(replace(behind, num_remote_tokens=10_000)) is PrefillPlace.REMOTE, "short prefills: the wait is short"
    assert place(replace(behind, num_remote_tokens=25_500)) is PrefillPlace.REMOTE, "the way itself takes 10 ms"
    assert place(replace(behind, num_remote_tokens=26_500)) is None
    two, behind = PrefillLoad(2, 0), replace(behind, num_remote_tokens=64_000)
    assert place(replace(behind, num_remote_prefills=2 * MIN_WINDOW - 1), two) is PrefillPlace.REMOTE
    assert place(replace(behind, num_remote_prefills=2 * MIN_WINDOW), two) is None


def test_a_long_line_uses_both_ways() -> None:
    """Where the cheaper way is closed, the line's end decides whether to wait for it."""
    slow = RemoteCost(0.3, 1e-5, 1e-7, 0.001, 1e-5)

    def placed(situation: Situation) -> PrefillPlace | None:
        return decide(situation, slow, ONE, 1000.0).place

    here = replace(IDLE, num_decodes=0, is_here_open=False)
    assert placed(here) is None, "alone, it waits for the cheaper way"
    assert placed(replace(here, num_line=4000)) is None
    assert placed(replace(here, num_line=800_000)) is PrefillPlace.REMOTE
    assert placed(replace(here, num_line=800_000, is_here_open=True)) is PrefillPlace.LOCAL_CHEAPER
    full = replace(here, num_line=800_000, num_remote_prefills=60, num_remote_tokens=480_000)
    assert placed(full) is None
    away = replace(IDLE, num_remote_tokens=32_000, num_remote_prefills=MIN_WINDOW, num_decodes=40)
    assert place(away) is None
    assert place(replace(away, num_line=4_000_000)) is PrefillPlace.LOCAL_CHEAPER
    assert place(replace(away, num_line=4_000_000, is_here_open=False)) is None
    assert place(replace(away, num_line=4_000_000, num_remote_prefills=0)) is PrefillPlace.REMOTE, "it is open"
    two, away = PrefillLoad(2, 0), replace(away, num_remote_tokens=64_000, num_remote_prefills=2 * MIN_WINDOW)
    assert place(replace(away, num_line=5_000), two) is None, "two workers share the line"
    assert place(replace(away, num_line=10_000), two) is PrefillPlace.LOCAL_CHEAPER


def test_without_prefill_workers_everything_is_computed_here() -> None:
    none = PrefillLoad(0, 0)
    assert place(IDLE, none) is PrefillPlace.LOCAL_NO_PREFILL_WORKER
    assert place(replace(IDLE, is_here_open=False), none) is None


def test_running_answers_weigh_in_the_decision() -> None:
    few, many = (
        decide(replace(IDLE, num_decodes=n), REMOTE, ONE, 1000.0).local_cost for n in (1, 64)
    )  # fmt: skip
    assert many > few
    seconds, idle = local_cost(replace(IDLE, num_decodes=0))
    assert idle == pytest.approx(seconds + HARM * COST.added_seconds(8000, chunk=1500)), "another may come meanwhile"
    late = replace(IDLE, chunk=8000, objectives=Objectives(0.5, 0.010))
    assert decide(late, REMOTE, ONE, 1000.0).local_cost > decide(IDLE, REMOTE, ONE, 1000.0).local_cost


def test_a_chunk_that_may_miss_the_objective_between_tokens_weighs_like_a_late_first_token() -> None:
    def cost_of(spread: float, situation: Situation = IDLE) -> float:
        return decide(replace(situation, spread=spread), REMOTE, ONE, 1000.0).local_cost

    assert cost_of(0.0) < cost_of(0.2) < cost_of(0.5)
    # Decoding alone is late: what a short prefill adds counts, not what is late without it.
    slow = replace(IDLE, num_tokens=30, cost=replace(COST, step_s=0.05, prefill_s=0.05))
    assert cost_of(0.3, slow) < 1.0


def test_a_first_token_that_may_be_late_counts_before_its_estimate_is() -> None:
    near = replace(IDLE, waited_s=0.35)
    on_time, doubtful = (decide(near, REMOTE, ONE, 1000.0, spread).remote_cost for spread in (0.0, 0.5))
    assert on_time == pytest.approx(REMOTE.seconds(8000, 0))
    assert doubtful > on_time


@pytest.mark.parametrize("seed", range(5))
def test_estimates_are_finite_and_grow_with_what_is_ahead(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        cost = StepCost(*(rng.choice((0.0, 1e-9, 1e-5, 0.1, 3600.0)) for _ in range(6)))
        situation = replace(
            IDLE,
            num_tokens=rng.randrange(1, 10**6),
            num_decodes=rng.randrange(0, 300),
            num_context=rng.randrange(0, 10**6),
            chunk=rng.randrange(1, 5000),
            cost=cost,
            objectives=Objectives(rng.choice((1e-9, 0.5, 1e9)), rng.choice((1e-9, 0.025, 1e9))),
            waited_s=rng.choice((0.0, 1.0, 1e6)),
            spread=rng.choice((0.0, 0.01, 0.3, 1.0)),
        )
        spread = rng.choice((0.0, 0.01, 0.3, 1.0))
        remote = RemoteCost(*(rng.choice((0.0, 1e-6, 1.0, 3600.0)) for _ in range(5)))
        last = (0.0, 0.0)
        for ahead in (0, 1000, 10**6, 10**9):
            found = decide(replace(situation, num_here=ahead, num_remote_tokens=ahead), remote, ONE, 1000.0, spread)
            again = decide(replace(situation, num_here=ahead, num_remote_tokens=ahead), remote, ONE, 1000.0, spread)
            assert found == again
            numbers = (found.local_s, found.remote_s, found.local_cost, found.remote_cost)
            assert all(math.isfinite(number) and number >= 0.0 for number in numbers)
            assert found.local_s >= last[0]
            assert found.remote_s >= last[1]
            last = (found.local_s, found.remote_s)


def placement(queue_size: int = 0) -> tuple[CostPlacement, list[PrefillPlace]]:
    counted: list[PrefillPlace] = []
    made = CostPlacement(
        DisaggPolicy(DisaggConfig()), lambda: PrefillLoad(1, queue_size), counted.append, ManualClock()
    )
    return made, counted


def test_costs_that_cannot_be_fall_back_to_the_thresholds_and_are_counted() -> None:
    nonsense = StepCost(prefill_token_s=math.nan)
    made, _ = placement()
    assert made.decide(replace(IDLE, cost=nonsense)).place is PrefillPlace.REMOTE
    assert made.decide(replace(IDLE, cost=nonsense, num_tokens=100)).place is PrefillPlace.LOCAL_SHORT
    full, _ = placement(queue_size=99)
    assert full.decide(replace(IDLE, cost=nonsense)).place is PrefillPlace.LOCAL_QUEUE_FULL
    assert full.decide(replace(IDLE, cost=nonsense, is_here_open=False)).place is None
    assert (made.num_fallbacks, full.num_fallbacks) == (2, 2)


def test_without_a_prefill_worker_there_is_no_choice_and_the_prefill_stays_once_there_is_room() -> None:
    prefill_load = PrefillLoad(0, 0)
    made = CostPlacement(DisaggPolicy(DisaggConfig()), lambda: prefill_load, lambda _: None, ManualClock())
    assert not made.has_choice
    for is_open in (True, False):
        assert stay_here(is_open) == made.decide(replace(IDLE, is_here_open=is_open))
    prefill_load = PrefillLoad(1, 0)
    assert made.has_choice


def test_it_learns_the_way_and_counts_what_was_done() -> None:
    made, counted = placement()
    before = made.model.cost
    made.prefill_took("a", 0.08)
    made.came_back("a", 8000, 0, 0.1)
    made.came_back("b", 8000, 8000, -1.0)
    assert made.model.num_samples == 1
    assert made.model.num_rejected == 1
    assert made.model.cost != before
    decision = made.decide(IDLE)
    assert counted == []
    made.placed(decision)
    assert counted == [decision.place]
    assert str(decision).startswith(str(decision.place))


def test_the_report_of_one_prefill_says_nothing_of_another() -> None:
    """The first one's KV was damaged, so it never came back."""
    (made, _), (plain, _) = placement(), placement()
    made.prefill_took("a", 0.08)
    for one in (made, plain):
        one.came_back("b", 8000, 0, 0.1)
    assert made.model.cost == plain.model.cost


def test_the_tokens_before_a_prompt_are_computed_by_all_workers_at_best() -> None:
    """Rates add up: one decode worker, and three prefill workers."""
    made = CostPlacement(DisaggPolicy(DisaggConfig()), lambda: PrefillLoad(3, 0), lambda _: None, ManualClock())
    rate = 1 / COST.prefill_token_s + 3 / made.model.cost.wait_token_s
    before_s = made.soonest_s(8000, 10_000, COST) - made.soonest_s(8000, 0, COST)
    assert before_s == pytest.approx(10_000 / rate)


def test_objectives_of_a_request_replace_the_configured_ones_if_they_are_times() -> None:
    config = DisaggConfig(slo_ttft_ms=400.0, slo_itl_ms=20.0)
    assert objectives_of(config) == Objectives(0.4, 0.02)
    assert objectives_of(config, 100.0, 5.0) == Objectives(0.1, 0.005)
    for nonsense in (0.0, -5.0, math.nan, math.inf):
        assert objectives_of(config, nonsense, nonsense) == Objectives(0.4, 0.02)
        assert objectives_of(DisaggConfig(), nonsense, nonsense) == Objectives(0.5, 0.025, has_default_itl=True)
    assert objectives_of(DisaggConfig(), 0.0, 25.0) == Objectives(0.5, 0.025), "set, though to the same"


@pytest.mark.parametrize("policy", ["auto", "cost", "threshold", "always"])
def test_no_threshold_changes_the_policy(policy: Any) -> None:
    is_by_cost = policy in ("auto", "cost")
    assert DisaggPolicy(DisaggConfig(disagg_policy=policy, max_local_prefill_length=0)).is_by_cost == is_by_cost
    changed = DisaggPolicy(DisaggConfig(disagg_policy=policy))
    for name in ("max_local_prefill_length", "max_prefill_queue_size"):
        changed.set(name, 100)
    assert changed.is_by_cost == is_by_cost
    assert not DisaggPolicy(DisaggConfig(disagg_policy=policy), step_costs=CostSource.NONE).is_by_cost
    estimated = DisaggPolicy(DisaggConfig(disagg_policy=policy), step_costs=CostSource.ESTIMATED)
    assert estimated.is_by_cost == (policy == "cost"), "an estimate decides only if it is asked to"


def test_the_policy_changes_at_run_time() -> None:
    changed = DisaggPolicy(DisaggConfig(slo_ttft_ms=100.0))
    assert changed.is_by_cost
    assert changed.given_in_vain == ()
    changed.set("max_local_prefill_length", 100)
    assert changed.given_in_vain == ("max_local_prefill_length",)
    changed.set("disagg_policy", "threshold")
    assert not changed.is_by_cost
    assert changed.given_in_vain == ("slo_ttft_ms",)
    changed.set("disagg_policy", "always")
    assert changed.given_in_vain == ("max_local_prefill_length", "slo_ttft_ms")
    for wrong in ("thresholds", 1, ""):
        with pytest.raises(ConfigError, match="disagg_policy"):
            changed.set("disagg_policy", wrong)
    changed.unset("disagg_policy")
    assert changed.is_by_cost


def test_always_sends_everything_away_while_there_is_a_prefill_worker() -> None:
    policy = DisaggPolicy(DisaggConfig(disagg_policy="always"))
    assert not policy.is_by_cost
    for workers, expected in ((1, PrefillPlace.REMOTE), (0, PrefillPlace.LOCAL_NO_PREFILL_WORKER)):
        prefill_load = PrefillLoad(workers, 1000)
        assert policy.decide(prompt_length=1, num_cached_tokens=0, prefill_load=prefill_load) is expected


SECONDS = st.floats(0.0, 500.0) | st.sampled_from([5e-324, 1e-300, 1e-9])
COUNT = st.integers(0, 10**6) | st.just(10**9)
OBJECTIVE_MS = st.floats(allow_nan=True, allow_infinity=True)


@given(
    ttft_ms=OBJECTIVE_MS,
    itl_ms=OBJECTIVE_MS,
    waited_s=SECONDS,
    counts=st.tuples(COUNT, COUNT, COUNT, COUNT, COUNT, COUNT),
    cost=st.builds(StepCost, *[SECONDS] * 6),
    remote=st.builds(RemoteCost, *[SECONDS] * 5),
    prefill_load=st.builds(PrefillLoad, st.integers(1, 20), st.integers(0, 100)),
    spread=st.floats(0.0, MAX_SPREAD),
)
def test_no_objective_and_no_cost_breaks_a_decision(
    ttft_ms: float,
    itl_ms: float,
    waited_s: float,
    counts: tuple[int, ...],
    cost: StepCost,
    remote: RemoteCost,
    prefill_load: PrefillLoad,
    spread: float,
) -> None:
    """A request's objectives come from a client: an exception here would end the engine."""
    tokens, here, away, chunk, decodes, context = counts
    situation = replace(
        IDLE,
        num_tokens=tokens + 1,
        waited_s=waited_s,
        num_here=here,
        num_remote_tokens=away,
        chunk=chunk,
        num_decodes=decodes,
        num_context=context,
        cost=cost,
        objectives=objectives_of(DisaggConfig(), ttft_ms, itl_ms),
        spread=spread,
    )
    decision = decide(situation, remote, prefill_load, 1000.0, spread)
    assert decision.place is not None, "both ways are open"
    estimates = (decision.local_s, decision.remote_s, decision.local_cost, decision.remote_cost)
    assert all(math.isfinite(each) and each >= 0.0 for each in estimates)


def test_stored_kv_makes_the_local_way_cheaper_by_what_its_load_does_not_take() -> None:
    """All ways are compared in the same seconds; the remote one computes what is stored here."""
    alone = replace(IDLE, num_decodes=0)
    stored = replace(alone, num_tokens=80, num_stored=7920, load_s=0.004)
    slow = replace(stored, load_s=0.5)
    decisions = [decide(situation, REMOTE, ONE, 1000.0) for situation in (alone, stored, slow)]
    computed, loaded, loaded_slowly = decisions
    assert computed.remote_s == loaded.remote_s == loaded_slowly.remote_s
    assert loaded.local_s == pytest.approx(0.004 + COST.prefill_seconds(80, num_before=7920))
    assert loaded.local_s < computed.local_s
    assert loaded.place is PrefillPlace.LOCAL_CHEAPER
    assert loaded_slowly.place is PrefillPlace.REMOTE


def test_tokens_of_the_pool_are_context_of_those_that_are_computed() -> None:
    dear = replace(COST, pair_s=1e-8)
    cached = replace(IDLE, num_tokens=80, num_cached=4000, num_stored=3920, load_s=0.004, num_decodes=0, cost=dear)
    assert decide(cached, REMOTE, ONE, 1000.0).local_s == pytest.approx(0.004 + 0.003 + 80 * (1e-5 + 1e-8 * 7960))


def test_a_decision_tells_of_a_load() -> None:
    stored = replace(IDLE, num_tokens=80, num_stored=7920, load_s=0.004)
    assert str(decide(stored, REMOTE, ONE, 1000.0)).endswith("s;load=0.0040s")
    assert "load" not in str(decide(IDLE, REMOTE, ONE, 1000.0))
    assert str(stay_here(True, 0.004)) == "local_no_prefill_worker;load=0.0040s"


def test_pairs_of_a_frontend_wait_before_what_this_worker_sends_away() -> None:
    """It is told of 0.5 s; 0.2 s later 0.3 s are left."""
    clock = ManualClock()
    policy = DisaggPolicy(DisaggConfig())
    placement = CostPlacement(policy, lambda: PrefillLoad(1, 0), lambda place: None, clock)
    before = placement.decide(IDLE)
    placement.told(0.5)
    clock.advance(0.2)
    assert placement.decide(IDLE).remote_s == pytest.approx(before.remote_s + 0.3)
    for wrong in (math.nan, math.inf, -1.0):
        placement.told(wrong)
    clock.advance(0.3)
    assert placement.decide(IDLE).remote_s == pytest.approx(before.remote_s)


def test_the_line_here_is_part_of_the_wait_that_a_frontend_tells() -> None:
    """100,000 tokens wait here, and all the way they are the 1 s that a frontend tells, which has sent them. So the
    line's end waits 1 s for the other side, and more than 1.4 s for this one; counted twice it would be 2 s."""
    line = replace(IDLE, num_here=140_000, num_line=100_000, num_remote_prefills=MIN_WINDOW)
    assert decide(line, REMOTE, ONE, 1000.0, told_wait_s=1.0).place is None
    untold = replace(line, num_remote_tokens=100_000)
    assert decide(untold, REMOTE, ONE, 1000.0).place is PrefillPlace.LOCAL_CHEAPER, "what was sent before it: 2 s"


def test_a_step_is_late_by_the_time_of_a_token() -> None:
    """With 1,500 prompt tokens it takes 18.2 ms, beside an objective of 10 ms for each token of the eight answers."""
    one, several, two = (
        local_cost(
            replace(IDLE, num_tokens=1500, objectives=Objectives(0.5, 0.01), cost=replace(COST, tokens_per_step=tokens))
        )
        for tokens in (1.0, 1.5, 2.0)
    )
    assert one[0] == several[0] == two[0]
    assert one[1] - two[1] == pytest.approx(LATE * 0.0082 * (0.5 / 0.01) * 8)
    assert several[1] - two[1] == pytest.approx(LATE * 0.0032 * (0.5 / 0.01) * 8)
