"""The simulator: virtual time only, the real policies, workers that come and go, and no trace of the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.system.serving import kvrelay_here

from kvrelay.config import DisaggConfig, EngineConfig, RouterConfig, WorkerRole
from kvrelay.core.handoff import OrderPolicy
from kvrelay.core.step_cost import StepCost, StepWork
from kvrelay.errors import ConfigError, InvalidInputError
from kvrelay.placement.base import Objectives
from kvrelay.planner import WorkerView
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import Change, ClusterEvent, ClusterSpec, parse_event
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.machine import FittedStepTime
from kvrelay.simulate.simulation import Simulation, simulate

STEP = StepCost(step_s=0.01, prefill_s=0.01, prefill_token_s=1e-4, pair_s=0.0, decode_s=0.0, context_s=0.0)
EXACT = Costs(
    step=STEP,
    between_steps_s=0.001,
    hop_s=0.002,
    queue_hop_s=0.003,
    transfer_overhead_s=0.004,
    link_bytes_per_s=1e6,
    token_bytes=100,
    frontend_request_s=0.0005,
    frontend_token_s=0.0,
    start_s=1.0,
)
ENGINE = EngineConfig(block_size=16, num_blocks=2048, max_num_seqs=32, max_num_batched_tokens=512)
ALWAYS, COST = DisaggConfig(disagg_policy="always"), DisaggConfig(disagg_policy="cost")


def steady(count: int, every_s: float, prompt: int = 200, answer: int = 10) -> list[Arrival]:
    return [Arrival(time_s=every_s * at, prompt_tokens=prompt, answer_tokens=answer) for at in range(count)]


def check(simulation: Simulation) -> None:
    """Every block of every live worker is accounted for."""
    for worker in simulation.workers.values():
        worker.core.check_integrity()


def test_the_times_of_one_request_are_the_sum_of_its_parts() -> None:
    spec = ClusterSpec(both=1, engine=ENGINE)
    request = simulate(spec, [Arrival(time_s=1.0, prompt_tokens=200, answer_tokens=3)], EXACT).requests[0]
    prefill_s = 0.01 + 200 * 1e-4
    first_s = 1.0 + 0.0005 + 0.002 + prefill_s + 0.002
    assert list(request.tokens_s) == pytest.approx([first_s, first_s + 0.011, first_s + 0.022])


def test_a_remote_prefill_takes_queue_steps_link_and_overhead() -> None:
    spec = ClusterSpec(prefill=1, decode=1, engine=ENGINE, disagg=ALWAYS)
    request = simulate(spec, [Arrival(time_s=0.0, prompt_tokens=160, answer_tokens=2)], EXACT).requests[0]
    queued_s = 0.0005 + 0.002 + 0.003
    kv_s = 160 * 100 / 1e6 + 0.004
    # The engine holds its one chunk until the grant; the claim has come and gone meanwhile.
    assert request.ttft_s == pytest.approx(queued_s + (0.01 + 160 * 1e-4) + kv_s + 0.002)
    assert request.gaps_s()[0] == pytest.approx(0.01 + 0.0, abs=0.002)


def test_steps_with_and_without_a_prefill_scatter_each_by_their_own() -> None:
    """The logarithms' standard deviations; the mean stays. 4,000 draws know a deviation within 3 %."""
    times = FittedStepTime(msgspec.structs.replace(EXACT, spread=0.1, prefill_spread=0.4), "a")
    for work, spread, alone_s in ((StepWork(0, 0, 1, 10), 0.1, 0.01), (StepWork(100, 0, 0, 0), 0.4, 0.02)):
        found = np.array([times(work, 0.0) for _ in range(4000)])
        assert float(np.log(found).std()) == pytest.approx(spread, rel=0.05)
        assert float(found.mean()) == pytest.approx(alone_s, rel=0.03)


def test_transfers_share_the_links_of_their_workers() -> None:
    """Two prompts that are computed at once by two prefill workers go into one decode worker one after the other."""
    spec = ClusterSpec(prefill=2, decode=1, engine=ENGINE, disagg=ALWAYS)
    arrivals = [Arrival(time_s=0.0, prompt_tokens=160, answer_tokens=1) for _ in range(2)]
    first, second = sorted(request.ttft_s for request in simulate(spec, arrivals, EXACT).requests)
    assert second - first == pytest.approx(160 * 100 / 1e6, abs=0.003)


@pytest.mark.parametrize("order", list(OrderPolicy))
@pytest.mark.parametrize("disagg", [ALWAYS, COST, DisaggConfig(disagg_policy="threshold", max_local_prefill_length=64)])
def test_every_request_is_answered_in_every_order(order: OrderPolicy, disagg: DisaggConfig) -> None:
    spec = ClusterSpec(prefill=2, decode=2, engine=ENGINE, disagg=disagg, order=order)
    simulation = Simulation(spec, steady(60, 0.02), Costs(spread=0.2))
    result = simulation.run()
    assert [len(request.tokens_s) for request in result.requests] == [10] * 60
    assert all(request.is_done for request in result.requests)
    if disagg is not COST or order is not OrderPolicy.PREFILL_FIRST:
        assert result.places["remote"] > 0
    assert result.goodput(Objectives(5.0, 1.0)) == 1.0
    check(simulation)


@pytest.mark.parametrize("order", list(OrderPolicy))
def test_a_full_decode_worker_holds_kv_and_first_tokens_come_sooner(order: OrderPolicy) -> None:
    """Four answers take the decode worker's pool; then a burst."""
    engine = EngineConfig(block_size=16, num_blocks=128, max_num_seqs=32, max_num_batched_tokens=512)
    filling = [Arrival(time_s=0.0, prompt_tokens=400, answer_tokens=100) for _ in range(4)]
    burst = [Arrival(time_s=0.7, prompt_tokens=200, answer_tokens=4) for _ in range(16)]
    firsts = {}
    for size in (0, 64 * 2**20):
        spec = ClusterSpec(1, 1, engine=engine, disagg=ALWAYS, order=order, kv_buffer_size=size)
        simulation = Simulation(spec, [*filling, *burst], EXACT)
        result = simulation.run()
        assert all(request.is_done for request in result.requests)
        check(simulation)
        firsts[size] = max(request.ttft_s for request in result.requests[4:])
        assert (simulation.workers["d0"].core.holding.num_held > 0) == bool(size)
    assert firsts[64 * 2**20] < firsts[0] - 0.2


@pytest.mark.parametrize("order", list(OrderPolicy))
def test_workers_die_drain_start_and_change_roles_and_no_answer_is_lost(
    order: OrderPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    events = ("1s:kill:p0", "1.3s:kill:d1", "0.5s:start:prefill", "2s:role:p1:both", "4s:drain:p1", "3s:start:decode")
    spec = ClusterSpec(
        prefill=2, decode=2, engine=ENGINE, disagg=ALWAYS, order=order, events=tuple(map(parse_event, events)),
        lease_ttl_s=2.0,
    )  # fmt: skip
    simulation = Simulation(spec, steady(250, 0.02, answer=30), EXACT)
    result = simulation.run()
    assert [request.error for request in result.requests if not request.is_done] == []
    assert {len(request.tokens_s) for request in result.requests} == {30}
    assert sum(request.num_migrations for request in result.requests) > 0
    alive = {name for name, worker in simulation.workers.items() if worker.is_alive}
    assert alive == {"d0", "p2", "d2"}
    by_id = {worker.worker_id: worker for worker in result.workers}
    assert by_id["p1"].role == "both"
    assert by_id["p1"].num_generated_tokens > 30
    assert by_id["p2"].num_prefill_tokens > 0
    assert by_id["d2"].num_generated_tokens > 0
    assert not caplog.records  # they would stand in the middle of a forecast


def test_without_a_worker_that_takes_requests_they_fail_with_a_reason() -> None:
    spec = ClusterSpec(both=1, engine=ENGINE, events=(parse_event("0.1s:drain:b0"),))
    result = simulate(spec, steady(3, 0.2), EXACT)
    assert [bool(request.error) for request in result.requests] == [False, True, True]


def test_a_session_goes_on_after_its_answer() -> None:
    arrivals = [
        Arrival(time_s=0.0, prompt_tokens=100, answer_tokens=5),
        Arrival(time_s=0.5, prompt_tokens=100, answer_tokens=5, after=0),
    ]
    first, second = simulate(ClusterSpec(both=1, engine=ENGINE), arrivals, EXACT).requests
    assert second.sent_s == pytest.approx(first.tokens_s[-1] + 0.5)


def test_the_router_finds_shared_prefixes_and_the_engine_reuses_them() -> None:
    shared = [Arrival(time_s=at, prompt_tokens=512 + 64, answer_tokens=2, hash_ids=(1, 10 + at)) for at in range(4)]
    result = simulate(ClusterSpec(both=3, engine=ENGINE), shared, EXACT)
    assert [request.num_cached_tokens for request in result.requests] == [0, 512, 512, 512]
    assert len({request.worker_id for request in result.requests}) == 1


def test_a_controller_must_say_to_which_role() -> None:
    actions = [ClusterEvent(0.5, Change.ROLE, "d0")]
    with pytest.raises(ConfigError, match=r"^event at 0\.5 s: role needs a role"):
        simulate(
            ClusterSpec(decode=2), steady(80, 0.05), EXACT, controller=lambda *_: actions, controller_interval_s=0.5
        )


def test_a_controller_sees_the_workers_and_changes_them() -> None:
    seen: list[tuple[float, Sequence[WorkerView]]] = []

    def controller(now_s: float, view: Sequence[WorkerView]) -> list[ClusterEvent]:
        seen.append((now_s, view))
        return [ClusterEvent(now_s, Change.START, role=WorkerRole.DECODE)] if len(seen) == 1 else []

    spec = ClusterSpec(prefill=1, decode=1, engine=ENGINE, disagg=ALWAYS)
    result = simulate(spec, steady(80, 0.05), EXACT, controller=controller, controller_interval_s=0.5)
    assert [worker.worker_id for worker in result.workers] == ["p0", "d0", "d1"]
    assert [now_s for now_s, _ in seen[:3]] == [0.5, 1.0, 1.5]
    views = {view.worker_id: view for view in seen[1][1]}
    assert views["p0"].tokens.num_steps > 0
    assert views["d0"].role is WorkerRole.DECODE
    assert views["d0"].is_ready


def test_an_idle_worker_costs_nothing() -> None:
    alone = Simulation(ClusterSpec(both=1, engine=ENGINE), steady(20, 10.0), EXACT)
    crowd = Simulation(ClusterSpec(both=1, prefill=50, engine=ENGINE, disagg=DisaggConfig(disagg_policy="threshold",
        max_local_prefill_length=4096)), steady(20, 10.0), EXACT)  # fmt: skip
    alone.run()
    crowd.run()
    assert crowd.loop.num_events - alone.loop.num_events <= 101  # two each: to enter the role, and a sample


def test_the_answer_of_an_overloaded_pool_is_a_refusal_everywhere() -> None:
    engine = EngineConfig(block_size=16, num_blocks=64, max_num_seqs=1, max_num_waiting=1)
    result = simulate(ClusterSpec(both=2, engine=engine), steady(8, 0.0), EXACT)
    assert sum(request.is_done for request in result.requests) == 4
    assert sum("no worker" in request.error for request in result.requests) == 4


@pytest.mark.parametrize(
    ("spec", "arrivals", "error", "message"),
    [
        (ClusterSpec(prefill=1), steady(1, 1.0), ConfigError, "no worker takes requests"),
        (ClusterSpec(both=1, events=(parse_event("0s:kill:d7"),)), steady(1, 1.0), ConfigError, "no worker is called"),
        (ClusterSpec(both=1, events=(parse_event("90s:drain:b1"),)), [], ConfigError, "called 'b1'"),
        (ClusterSpec(both=1, prefill=10**8), steady(1, 1.0), ConfigError, "are too many; at most 10,000"),
        (ClusterSpec(both=1), [Arrival(time_s=-1.0, prompt_tokens=1, answer_tokens=1)], InvalidInputError, "0 s or"),
        (ClusterSpec(both=1), [Arrival(time_s=1.0, prompt_tokens=0, answer_tokens=1)], InvalidInputError, "one token"),
        (
            ClusterSpec(both=1),
            [Arrival(time_s=1.0, prompt_tokens=1, answer_tokens=1, after=0)],
            InvalidInputError,
            "after an earlier one",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    spec: ClusterSpec, arrivals: list[Arrival], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        simulate(spec, arrivals, EXACT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["30:kill:d1", "30s:kill", "3s:role:d1", "3s:role:d1:cook", "3s:start:", "s:kill:d1"])
def test_an_event_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="event"):
        parse_event(text)


def test_the_same_seed_gives_the_same_output_byte_for_byte(tmp_path: Path) -> None:
    """In processes whose sets and dictionaries of strings have unlike orders."""
    trace = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": at * 40, "input_length": 700, "output_length": 12, "hash_ids": [at % 3, 100 + at]}
        for at in range(80)
    ]
    trace.write_text("".join(json.dumps(record) + "\n" for record in records))
    costs = tmp_path / "costs.json"
    costs.write_text('{"spread": 0.3, "start_s": 0.5}')

    words = ["simulate", "--trace", str(trace), "--prefill", "2", "--decode", "3", "--costs", str(costs)]
    words += ["--order", "decode-first", "--json"]
    words += ["--event", "1s:kill:p0", "--event", "1s:start:prefill", "--event", "1.5s:kill:d1"]

    def run(hash_seed: str) -> str:
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "kvrelay", *words, "--seed", "7"]
        return subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60, text=True).stdout

    first = run("1")
    assert first == run("2")
    assert first != kvrelay_here(*words, "--seed", "8").stdout
    report = json.loads(first)
    assert (report["num_done"], report["num_failed"], report["cluster"]) == (80, 0, "2P3D")


def test_the_router_policy_is_the_clusters() -> None:
    arrivals = steady(9, 1.0)
    spec = ClusterSpec(both=3, engine=ENGINE, router=RouterConfig(router="round-robin"))
    workers = [request.worker_id for request in simulate(spec, arrivals, EXACT).requests]
    assert workers == ["b0", "b1", "b2"] * 3


def test_steps_of_several_tokens_are_simulated_one_by_one_in_their_time() -> None:
    """Four tokens in a step of 10 ms, and 1 ms until the next one: a token each 2.75 ms. A step with 100 prompt tokens
    takes 20 ms, of which its other three tokens take 7.5 ms later; if no answer runs it takes all of them at once."""
    costs = msgspec.structs.replace(EXACT, step=msgspec.structs.replace(STEP, tokens_per_step=4.0))
    arrivals = [Arrival(time_s=1.0, prompt_tokens=200, answer_tokens=9)]
    request = simulate(ClusterSpec(both=1, engine=ENGINE), arrivals, costs).requests[0]
    assert request.ttft_s == pytest.approx(0.0005 + 0.002 + 0.03 + 0.002)
    assert list(request.gaps_s()) == pytest.approx([0.00275] * 8)
    times = FittedStepTime(costs, "a")
    beside = [times(work, 0.0) for work in (StepWork(100, 0, 1, 10), *[StepWork(0, 0, 1, 10)] * 3)]
    assert beside == pytest.approx([0.0125, 0.0025, 0.0025, 0.0025])
    assert times(StepWork(100, 0, 0, 0), 0.0) == pytest.approx(0.02)


@pytest.mark.parametrize("num_blocks", [10**11, 10**26])
def test_more_blocks_than_memory_are_refused_in_one_line(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks: a simulated KV pool.s bookkeeping of .* was asked for"):
        simulate(
            ClusterSpec(both=1, engine=EngineConfig(num_blocks=num_blocks)),
            [Arrival(time_s=0.0, prompt_tokens=8, answer_tokens=1)],
            Costs(),
        )
