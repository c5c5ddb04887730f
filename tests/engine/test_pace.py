"""How many tokens prefills get beside answers, what a step costs, and prefills that are placed when they are
admitted."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from kvrelay.config import DisaggConfig
from kvrelay.core.clock import Clock, ManualClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RequestStatus
from kvrelay.core.step_cost import (
    LATE_FACTOR,
    MARGIN,
    MIN_CHUNK_TOKENS,
    MIN_STEP_FACTOR,
    STEP_SHARE,
    TIGHT_SHARE,
    StepCost,
    StepPace,
    StepWork,
)
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.scheduled_batch import TokenBudget
from kvrelay.placement.base import Objectives, PrefillLoad, PrefillPlace
from kvrelay.placement.cost import MIN_WINDOW, CostPlacement, PlacementState
from kvrelay.placement.cost_model import StepCostModel
from kvrelay.placement.threshold import DisaggPolicy

COST = StepCost(0.002, 0.003, 1e-5, 0.0, 2.5e-5, 0.0)


def request(name: str, length: int, objectives: Objectives | None = None, max_tokens: int = 8) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    placement = None if objectives is None else PlacementState(objectives=objectives)
    return Request(name, [number % 500 for number in range(length)], sampling, placement=placement)


def paced(cost: StepCost = COST, clock: Clock | None = None) -> TokenBudget:
    token_budget = TokenBudget(clock or ManualClock())
    token_budget.costs = StepCostModel(StepCost(*(max(value, 1e-15) for value in msgspec.structs.astuple(cost))))
    return token_budget


def test_without_objectives_the_token_budget_alone_counts() -> None:
    token_budget = paced()
    token_budget.look_at([request("a", 10)])
    assert token_budget.prefill_budget([request("b", 5000)], 2048) == 2048


def test_a_step_beside_answers_takes_a_share_of_their_objective() -> None:
    token_budget, objectives = paced(), Objectives(0.5, 0.02)
    decodes = [request("a", 10, objectives), request("b", 10, Objectives(0.5, 0.05))]
    token_budget.look_at(decodes)
    budget = token_budget.prefill_budget([request("c", 5000, objectives)], 2048)
    work = StepWork(budget, 0, 2, 20)
    share = min(STEP_SHARE, math.exp(-MARGIN * token_budget.costs.spread))
    assert COST.step_seconds(work) == pytest.approx(share * 0.02, rel=0.01)


@pytest.mark.parametrize(
    ("decode_s", "step_s"),
    [
        (0.004, STEP_SHARE * 0.02),
        (0.009, MIN_STEP_FACTOR * 0.009),
        (0.0119, TIGHT_SHARE * 0.02),
        (0.0121, MIN_STEP_FACTOR * 0.0121),
    ],
    ids=["room", "twice", "most", "hardly"],
)
def test_prompts_get_on_as_long_as_that_costs_no_answer_its_objective(decode_s: float, step_s: float) -> None:
    cost = StepCost(decode_s, decode_s, 1e-6, 0.0, 0.0, 0.0)
    budget = StepPace.keeping(cost, 0.0, 0.02).prefill_budget(50_000, num_decodes=1)
    assert cost.step_seconds(StepWork(budget, 0, 1, 0)) == pytest.approx(step_s, rel=1e-3)


def test_answers_that_were_late_make_room_for_prompts_that_are_late() -> None:
    clock, objectives = ManualClock(), Objectives(0.5, 0.02)
    token_budget = paced(clock=clock)
    prompt, in_time, late = (
        request(name, length, objectives) for name, length in (("prompt", 50_000), ("a", 10), ("b", 10))
    )
    for each in (prompt, in_time, late):
        each.times.append((RequestStatus.WAITING, clock.now()))
    in_time.first_output_sent = late.first_output_sent = True
    late.is_late = True

    def step_s(*answers: Request) -> float:
        token_budget.look_at(list(answers))
        budget = token_budget.prefill_budget([prompt], 10_000)
        return COST.step_seconds(StepWork(budget, 0, len(answers), 11 * len(answers)))

    alike_s = step_s(in_time)
    assert step_s(late) == pytest.approx(alike_s, rel=0.01), "no prompt is late"
    clock.advance(0.501)
    assert step_s(late) == pytest.approx(LATE_FACTOR * alike_s, rel=0.01)
    assert step_s(in_time) == pytest.approx(alike_s, rel=0.01), "this one can still be good"
    assert step_s(late, in_time) == pytest.approx(alike_s, rel=0.01)
    prompt.first_output_sent = True
    assert step_s(late) == pytest.approx(alike_s, rel=0.01), "an answer that is computed again"


@pytest.mark.parametrize(
    ("has_default_itl", "num_late", "yields"), [(True, 3, True), (True, 2, False), (False, 3, False)]
)
def test_an_objective_that_nobody_set_yields_once_most_answers_were_late(
    has_default_itl: bool, num_late: int, yields: bool
) -> None:
    clock, objectives = ManualClock(), Objectives(0.5, 0.02, has_default_itl)
    token_budget = paced(clock=clock)
    answers = [request(f"answer {number}", 10, objectives) for number in range(5)]
    for number, answer in enumerate(answers):
        answer.first_output_sent, answer.is_late = True, number < num_late
    prompt = request("prompt", 50_000, objectives)
    prompt.times.append((RequestStatus.WAITING, clock.now()))

    def step_s() -> float:
        token_budget.look_at(list(answers))
        return COST.step_seconds(StepWork(token_budget.prefill_budget([prompt], 10_000), 0, 5, 55))

    in_time_s = step_s()
    clock.advance(0.501)
    assert step_s() == pytest.approx((LATE_FACTOR if yields else 1.0) * in_time_s, rel=0.01)


def test_a_first_token_beyond_its_objective_makes_an_answer_late(make_engine: Callable[..., EngineCore]) -> None:
    clock = ManualClock()
    engine = make_engine(clock=clock, block_size=4, num_blocks=32)
    late, soon = request("late", 10, Objectives(0.5, 0.02)), request("soon", 10, Objectives(0.7, 0.02))
    engine.add_request(late)
    engine.add_request(soon)
    clock.advance(0.6)
    engine.step()
    clock.advance(0.6)
    engine.step()
    assert (late.is_late, soon.is_late) == (True, False)


def test_the_more_steps_scatter_the_more_room_is_left() -> None:
    def budget(errors: tuple[float, ...]) -> int:
        token_budget, objectives = paced(), Objectives(0.5, 0.02)
        work = StepWork(500, 0, 0, 0)
        for number in range(100):
            token_budget.costs.add(work, COST.step_seconds(work) * errors[number % 2])
        token_budget.look_at([request("a", 10, objectives)])
        return token_budget.prefill_budget([request("c", 5000, objectives)], 2048)

    steady, scattered = budget((1.0, 1.0)), budget((0.6, 1.5))
    assert scattered < 0.6 * steady
    cost = COST.step_seconds(StepWork(steady, 0, 1, 10))
    assert cost == pytest.approx(STEP_SHARE * 0.02, rel=0.1), (
        "an exact model leaves room for the way to the client only"
    )


def test_an_objective_that_decoding_alone_misses_does_not_stop_prefills() -> None:
    slow = StepCost(0.1, 0.11, 1e-4, 0.0, 0.0, 0.0)
    token_budget = paced(slow)
    token_budget.look_at([request("a", 10, Objectives(0.5, 0.02))])
    assert token_budget.prefill_budget([request("b", 5000, Objectives(0.5, 0.02))], 2048) == pytest.approx(1100, abs=2)
    hopeless = paced(StepCost(0.001, 5.0, 1.0, 0.0, 0.0, 0.0))
    hopeless.look_at([request("a", 10, Objectives(0.5, 0.02))])
    assert hopeless.prefill_budget([request("b", 5000)], 2048) == MIN_CHUNK_TOKENS


@pytest.mark.parametrize(
    "pace",
    [
        StepPace(),
        StepPace.keeping(COST, 0.1, math.nan, ttft_s=0.5),
        StepPace.keeping(COST, 0.1, -1.0, ttft_s=0.5),
        StepPace.keeping(COST, 0.1, math.inf, ttft_s=0.5),
        StepPace.keeping(StepCost(math.nan), 0.1, 0.02, ttft_s=0.5),
        StepPace.keeping(StepCost(prefill_s=-1.0), 0.1, 0.02, ttft_s=0.5),
    ],
    ids=["none", "itl-nan", "itl-negative", "itl-infinite", "cost-nan", "cost-negative"],
)
def test_what_is_no_objective_or_no_cost_limits_nothing(pace: StepPace) -> None:
    assert pace.prefill_budget(2048, num_decodes=3, num_context=300, num_before=100) == 2048


def test_a_spread_that_is_no_number_counts_as_none() -> None:
    exact, unknown = (
        StepPace.keeping(COST, spread, 0.02).prefill_budget(2048, num_decodes=1) for spread in (0.0, math.nan)
    )
    assert exact == unknown < 2048


def test_a_lone_prefill_leaves_room_for_who_arrives() -> None:
    token_budget = paced(StepCost(0.01, 0.01, 1e-3, 0.0, 0.0, 0.0))
    token_budget.look_at([])
    assert token_budget.prefill_budget([request("b", 5000, Objectives(0.4, 0.02))], 2048) == pytest.approx(90, abs=1)


def test_steps_are_samples_of_their_cost(make_engine: Callable[..., EngineCore]) -> None:
    engine = make_engine(block_size=4, max_num_batched_tokens=16, num_blocks=32)
    engine.add_request(request("a", 40))
    for _ in range(3):
        engine.step()
    costs = engine.scheduler.token_budget.costs
    assert costs.num_samples + costs.num_rejected == 3, "a clock that stands still gives no samples"


class Fleet:
    """A placement with prefill workers that can be changed."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.counted: list[PrefillPlace] = []
        policy = DisaggPolicy(DisaggConfig())
        fleet = lambda: PrefillLoad(self.num_workers, 0)  # noqa: E731
        self.placement = CostPlacement(policy, fleet, self.counted.append, ManualClock())

    def request(self, name: str, length: int, max_tokens: int = 8) -> Request:
        made = request(name, length, Objectives(0.5, 0.025), max_tokens)
        assert made.placement is not None
        made.placement.policy = self.placement
        return made


def test_a_burst_is_bound_to_no_way_before_its_time(make_engine: Callable[..., EngineCore]) -> None:
    engine, fleet = make_engine(block_size=16, num_blocks=2000, max_num_batched_tokens=256), Fleet(1)
    burst = [fleet.request(f"r{number}", 2000) for number in range(12)]
    for one in burst:
        engine.add_request(one)
    output = engine.step()
    assert len(output.remote_prefills) <= MIN_WINDOW
    assert len(output.remote_prefills) >= 1
    held = sum(bool(one.block_ids) for one in burst)
    assert held <= MIN_WINDOW + 1, "those that wait hold no blocks"
    assert sum(one.status is RequestStatus.WAITING for one in burst) == 12 - held
    assert len(fleet.counted) == held
    chat = fleet.request("chat", 20)
    engine.add_request(chat)
    engine.step()
    assert len(chat.token_ids) > 20, "a chat does not wait for them"
    engine.check_integrity()


def test_a_pair_that_is_given_up_is_placed_anew_once(make_engine: Callable[..., EngineCore]) -> None:
    engine, fleet = make_engine(block_size=16, num_blocks=4000, max_num_batched_tokens=256), Fleet(1)
    engine.add_request(fleet.request("chat", 20))
    engine.step()
    paired = fleet.request("pair", 2000, max_tokens=3)
    assert paired.placement is not None
    paired.placement.policy, paired.placement.otherwise = None, paired.placement.policy
    paired.mode, paired.handoff_number = PrefillMode.REMOTE, 2**60
    engine.add_request(paired)
    (away,) = engine.step().remote_prefills
    assert away.handoff_id.number == 2**60
    fleet.counted.clear()
    engine.compute_handoff_here(away.handoff_id)
    engine.end_loan(away.handoff_id, 1)
    (queued,) = engine.step().remote_prefills
    assert fleet.counted == [PrefillPlace.REMOTE]
    assert queued.handoff_id.number < 2**60, "any prefill worker may take it"
    engine.compute_handoff_here(queued.handoff_id)
    engine.end_loan(queued.handoff_id, 1)
    while engine.has_unfinished():
        assert not engine.step().remote_prefills, "once"
    assert len(paired.token_ids) == 2003
    engine.check_integrity()


def test_what_waits_or_is_unknown(make_engine: Callable[..., EngineCore]) -> None:
    engine = make_engine(block_size=16, num_blocks=4000, max_num_seqs=1)
    engine.add_request(request("first", 100))
    engine.add_request(request("second", 100))
    assert not engine.has_begun("first")
    engine.step()
    assert engine.has_begun("first")
    assert not engine.has_begun("second")
    assert engine.has_begun("nobody"), "nothing is given back for it"


def test_who_waits_for_a_prefill_worker_is_computed_here_when_none_is_left(
    make_engine: Callable[..., EngineCore],
) -> None:
    engine, fleet = make_engine(block_size=16, num_blocks=4000, max_num_batched_tokens=256), Fleet(1)
    burst = [fleet.request(f"r{number}", 600) for number in range(12)]
    for one in burst:
        engine.add_request(one)
    away = engine.step().remote_prefills
    fleet.num_workers = 0
    engine.keep_prefills_here()
    for prefill in away:
        engine.compute_handoff_here(prefill.handoff_id)
        engine.end_loan(prefill.handoff_id, 1)
    for _ in range(200):
        engine.step()
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_a_step_may_take_an_objective_for_each_token_that_an_answer_gets_from_it() -> None:
    """70 % of 20 ms, less 3.05 ms for the step and two decodes, at 10 us a token. First tokens wait for whole steps."""
    one, several = COST, msgspec.structs.replace(COST, tokens_per_step=2.5)
    beside = [
        StepPace.keeping(cost, 0.0, 0.02, ttft_s=0.4).prefill_budget(10_000, num_decodes=2) for cost in (one, several)
    ]
    assert beside == pytest.approx([(0.014 - 0.00305) / 1e-5, (2.5 * 0.014 - 0.00305) / 1e-5], abs=1.01)
    alone = [StepPace.keeping(cost, 0.0, 0.02, ttft_s=0.4).prefill_budget(10_000) for cost in (one, several)]
    assert alone == pytest.approx([(0.1 - 0.003) / 1e-5] * 2, abs=1.01)
