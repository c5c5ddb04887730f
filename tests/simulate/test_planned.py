"""The planner in the simulator; widening and narrowing there."""

from __future__ import annotations

from kvrelay.config import DisaggConfig, WorkerRole
from kvrelay.core.step_cost import StepCost
from kvrelay.planner import Narrow, Objectives, Start, Widen
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
