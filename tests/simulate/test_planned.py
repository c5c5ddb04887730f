"""The planner in the simulator; widening and narrowing there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.config import DisaggConfig, WorkerRole
from kvrelay.core.step_cost import StepCost
from kvrelay.planner import Narrow, Numbers, Objectives, Plan, PlannerState, Start, Stop, Widen, plan
from kvrelay.simulate import planned
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec, parse_event
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loads import generated_arrivals
from kvrelay.simulate.planned import PlannedCluster
from kvrelay.simulate.simulation import Simulation, simulate

SLOW = Costs(step=StepCost(0.02, 0.02, 2e-4, 1e-8, 1e-3, 2e-7), spread=0.03, start_s=10.0)
AIM = Objectives(ttft_s=2.0, itl_s=0.08)
ANSWERS = generated_arrivals("poisson:rate=3,num=270,prompt=400,answer=360")


def spec(prefill: int, decode: int, **given: object) -> ClusterSpec:
    disagg = DisaggConfig(slo_ttft_ms=2000, slo_itl_ms=80)
    return ClusterSpec(prefill=prefill, decode=decode, disagg=disagg, **given)  # type: ignore[arg-type]


def test_the_planner_gives_answers_a_second_worker_and_is_repeatable() -> None:
    runs = [PlannedCluster(spec(3, 1), ANSWERS, SLOW, AIM) for _ in range(2)]
    results = [run.run() for run in runs]
    assert [type(action) for _, action in runs[0].actions] == [Widen, Narrow]
    assert runs[0].actions == runs[1].actions
    assert [list(request.tokens_s) for request in results[0].requests] == [
        list(request.tokens_s) for request in results[1].requests
    ]
    static = simulate(spec(3, 1), ANSWERS, SLOW)
    assert results[0].latencies()["itl_s"]["p90"] < 0.7 * static.latencies()["itl_s"]["p90"]
    assert not any(request.error for request in results[0].requests)


def test_the_planner_starts_a_worker_if_there_is_a_slot() -> None:
    run = PlannedCluster(spec(1, 1), ANSWERS, SLOW, AIM, max_workers=3)
    result = run.run()
    assert Start in {type(action) for _, action in run.actions}
    assert len(result.workers) == 3


def test_a_widened_worker_serves_at_once_and_a_narrowed_one_ends_what_it_has_begun() -> None:
    arrivals = [Arrival(time_s=number * 0.5, prompt_tokens=800, answer_tokens=40) for number in range(60)]
    always = DisaggConfig(disagg_policy="always")
    events = ("8s:role:p0:both", "16s:role:p0:prefill", "18s:role:d0:both", "22s:role:d0:decode")
    cluster = ClusterSpec(prefill=2, decode=1, disagg=always, events=tuple(map(parse_event, events)))
    simulation = Simulation(cluster, arrivals, SLOW)
    result = simulation.run()
    assert all(request.is_done for request in result.requests)
    assert result.latencies()["ttft_s"]["p99"] < 1.5  # an answer takes 2 s: nothing waits for a drain
    by_p0 = [request.sent_s for request in result.requests if request.worker_id == "p0"]
    assert by_p0
    assert 8.0 <= min(by_p0) < 9.5
    assert max(by_p0) <= 16.0
    assert {name: worker.role for name, worker in simulation.workers.items()} == {
        "p0": WorkerRole.PREFILL,
        "p1": WorkerRole.PREFILL,
        "d0": WorkerRole.DECODE,
    }
    for worker in simulation.workers.values():
        assert not worker.core.has_unfinished()
        worker.core.check_integrity()


def numbers_of(patch: pytest.MonkeyPatch, run: Callable[[], object]) -> list[Numbers]:
    """What each decision of the run was made from, but for those without demand."""
    found: list[Numbers] = []

    def recording(*given: Any) -> tuple[Plan, PlannerState]:
        actions, state = plan(*given)
        found.extend(action.numbers for action in actions if action.numbers.requests_per_s)
        return actions, state

    patch.setattr(planned, "plan", recording)
    run()
    return found


def test_answers_of_thirty_tokens_are_seen_as_such_while_many_requests_wait_for_their_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always = DisaggConfig(disagg_policy="always", slo_ttft_ms=2000, slo_itl_ms=80)
    cluster = ClusterSpec(prefill=1, decode=1, disagg=always)
    arrivals = [Arrival(time_s=number * 0.25, prompt_tokens=1200, answer_tokens=30) for number in range(240)]
    found = numbers_of(monkeypatch, PlannedCluster(cluster, arrivals, SLOW, AIM).run)
    told = [numbers.answer_tokens for numbers in found[10:-10]]
    assert len(told) > 20
    assert max(told) < 1.1 * 30


def test_after_a_burst_only_what_it_needs_is_left_and_constant_load_changes_nothing() -> None:
    phases = ((0.0, 20.0, 1.0), (20.0, 50.0, 6.0), (50.0, 150.0, 1.0))
    arrivals = [
        Arrival(time_s=begin_s + number / rate, prompt_tokens=1000, answer_tokens=60)
        for begin_s, end_s, rate in phases
        for number in range(round((end_s - begin_s) * rate))
    ]
    run = PlannedCluster(spec(1, 1), arrivals, SLOW, AIM, max_workers=4)
    run.run()
    kinds = [(type(action), at_s) for at_s, action in run.actions]
    assert {kind for kind, at_s in kinds if at_s < 50.0} == {Start}
    assert {kind for kind, at_s in kinds if at_s >= 50.0} == {Stop}
    assert len([kind for kind, _ in kinds if kind is Start]) == len([kind for kind, _ in kinds if kind is Stop])
    assert kinds[-1][1] < 50.0 + 90.0


@pytest.mark.parametrize(("num_users", "kinds"), [(24, [Widen]), (6, [])])
def test_users_who_wait_for_their_answers_are_overload_if_they_are_many(num_users: int, kinds: list[type]) -> None:
    """Each sends the next request when the last answer has ended, and all prefills go to one worker, 0.44 s each: it is
    never asked for more than it gives, and 24 users wait 8 s for a first token. Six wait less than the objective."""
    always = DisaggConfig(disagg_policy="always", slo_ttft_ms=2000, slo_itl_ms=80)
    arrivals = [
        Arrival(
            time_s=0.0 if number >= num_users else number / num_users,
            prompt_tokens=2000,
            answer_tokens=100,
            after=number - num_users if number >= num_users else None,
        )
        for number in range(96)
    ]
    cluster = ClusterSpec(prefill=1, decode=3, disagg=always)
    run = PlannedCluster(cluster, arrivals, SLOW, AIM, interval_s=2.0)
    result = run.run()
    assert [type(action) for _, action in run.actions] == kinds
    if kinds:
        changed_s = run.actions[0][0]
        assert changed_s < 30.0
        late = [request.ttft_s for request in result.requests if request.sent_s < changed_s]
        soon = [request.ttft_s for request in result.requests if request.sent_s > changed_s + 5.0]
        assert sum(soon) / len(soon) < 0.5 * sum(late) / len(late)
