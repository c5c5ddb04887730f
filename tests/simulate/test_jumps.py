"""Steps that are jumped over: the same as each step by itself, event for event, on random clusters and loads."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvrelay.config import DisaggConfig, EngineConfig, TiersConfig
from kvrelay.core.events import KvEventBatch, LoadMetrics
from kvrelay.core.handoff import OrderPolicy
from kvrelay.core.step_cost import StepCost
from kvrelay.router import Router
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec, parse_event
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.result import SimulationResult
from kvrelay.simulate.simulation import Simulation

SMALL_STEP = StepCost(step_s=0.004, prefill_s=0.005, prefill_token_s=2e-5, pair_s=1e-9, decode_s=1e-5, context_s=1e-7)


def random_case(seed: int) -> tuple[ClusterSpec, list[Arrival], Costs]:
    """Small pools (preemptions), holding areas, shared prefixes, priorities, sessions, changes of workers; and costs
    of 0 and without scatter, so that many things happen at the same time."""
    rng = random.Random(seed)
    spec = ClusterSpec(
        prefill=rng.randrange(3),
        decode=rng.randrange(1, 3),
        both=rng.randrange(2),
        engine=EngineConfig(
            num_blocks=rng.choice([80, 160, 2048]),
            max_num_seqs=rng.choice([4, 32]),
            max_num_batched_tokens=rng.choice([64, 512]),
        ),
        disagg=DisaggConfig(disagg_policy=rng.choice(["cost", "always", "threshold"]), max_local_prefill_length=100),
        order=rng.choice(list(OrderPolicy)),
        events=tuple(map(parse_event, rng.choice([(), ("0.4s:kill:d0",), ("0.3s:role:d0:both", "0.9s:drain:d0")]))),
        lease_ttl_s=2.0,
        kv_buffer_size=rng.choice([0, 64 * 2**20]),
    )
    arrivals: list[Arrival] = []
    for at in range(rng.choice([20, 60])):
        after = rng.randrange(at) if at and rng.random() < 0.2 else None
        arrivals.append(
            Arrival(
                time_s=rng.choice([0.0, 0.05, 0.1, rng.random()]),
                prompt_tokens=rng.randrange(1, 400),
                answer_tokens=rng.choice([1, 2, 17, rng.randrange(1, 200)]),
                hash_ids=(rng.randrange(3), 10 + rng.randrange(3)) if rng.random() < 0.5 else None,
                hash_tokens=64,
                priority=rng.choice([0, 0, 0, -1, 5]),
                after=after,
            )
        )
    is_even = rng.random() < 0.4
    costs = Costs(
        step=msgspec.structs.replace(SMALL_STEP, tokens_per_step=1.0 + seed % 3),
        spread=0.0 if is_even else 0.2,
        prefill_spread=rng.choice([0.0, 0.0 if is_even else 0.4]),
        hop_s=0.0 if is_even else 0.0003,
        between_steps_s=rng.choice([0.0, 0.0002]),
        token_bytes=1000,
        start_s=0.5,
        host_bytes_per_s=1e7,
    )
    tiers = rng.choice([TiersConfig(), TiersConfig(host_kv_cache="1MiB"), TiersConfig("200KiB", 60.0, "DIR,2MiB")])
    return msgspec.structs.replace(spec, tiers=tiers), arrivals, costs


def run(case: tuple[ClusterSpec, list[Arrival], Costs], monkeypatch: pytest.MonkeyPatch, may_jump: bool) -> list[Any]:
    """Everything that can be seen of a simulation: what the routers are told and when, results, workers at the end."""
    seen: list[Any] = []
    simulation = Simulation(*case, seed=1, may_jump=may_jump)
    apply_events, apply_metrics = Router.apply_events, Router.apply_metrics

    def note_events(router: Router, batch: KvEventBatch) -> None:
        seen.append((simulation.loop.clock.now(), batch))
        apply_events(router, batch)

    def note_load(router: Router, load: LoadMetrics) -> None:
        seen.append((simulation.loop.clock.now(), load))
        apply_metrics(router, load)

    with monkeypatch.context() as patch:
        patch.setattr(Router, "apply_events", note_events)
        patch.setattr(Router, "apply_metrics", note_load)
        result: SimulationResult = simulation.run()
    seen += [(one.tokens_s.tolist(), one.worker_id, one.error, one.num_migrations) for one in result.requests]
    seen += [result.workers, result.places, result.end_s]
    for worker in simulation.workers.values():
        worker.core.check_integrity()
        seen.append(
            (worker.core.metrics(), worker.core.cached_hashes(), worker.core.scheduler.token_budget.num_context)
        )
    return [*seen, simulation.loop.num_events]


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Callbacks with and without jumps."""
    case = random_case(seed)
    (*jumped, few), (*stepped, many) = (run(case, monkeypatch, may_jump) for may_jump in (True, False))
    for one, other in zip(jumped, stepped, strict=True):
        assert one == other
    return few, many


@pytest.mark.parametrize("seed", range(6))
def test_a_jump_is_the_steps_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, monkeypatch)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(6, 66))
def test_a_jump_is_the_steps_one_by_one_on_more_clusters(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, monkeypatch)


def test_the_cases_have_preemptions_hand_offs_migrations_and_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the property would say little."""
    results = [Simulation(*random_case(seed), seed=1).run() for seed in range(10)]
    assert sum(worker.num_preemptions for result in results for worker in result.workers) > 0
    assert sum(result.places.get("remote", 0) for result in results) > 0
    assert sum(one.num_migrations for result in results for one in result.requests) > 0
    assert any(few < many / 2 for few, many in (check(seed, monkeypatch) for seed in range(6)))


def test_answers_alone_cost_a_callback_for_many_steps() -> None:
    arrivals = [Arrival(time_s=0.0, prompt_tokens=20, answer_tokens=500) for _ in range(4)]
    simulation = Simulation(ClusterSpec(both=1), arrivals, Costs(spread=0.1))
    result = simulation.run()
    assert result.workers[0].num_steps >= 500
    assert simulation.loop.num_events < 100
