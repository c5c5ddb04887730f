"""Placement in seconds: the terms of the cost, costs that cannot be trusted, and the warm burst."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from kvrelay.config import RouterConfig, WorkerRole
from kvrelay.core.clock import ManualClock
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import STALE_AFTER_S, BlockStored, LoadMetrics
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.step_cost import StepCost
from kvrelay.core.workers import WorkerInfo
from kvrelay.placement.pair_cost import MAX_TRANSFER_RATIO, OTHER_HOST_WEIGHT, SAME_HOST_WEIGHT, pair_seconds
from kvrelay.placement.seconds import (
    FEW,
    LOST_PREFIX,
    Candidates,
    CostColumns,
    LoadColumns,
    decode_seconds,
    prefill_seconds,
)
from kvrelay.router import Router, RoutingRequest
from kvrelay.router.costs import MAX_RATIO, REFRESH_S, WorkerCosts
from kvrelay.router.policies import build_policy

BLOCK = 16
COST = StepCost(step_s=0.002, prefill_s=0.003, prefill_token_s=1e-5, pair_s=0.0, decode_s=5e-4, context_s=0.0)


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def loads(size: int = 2, **columns: np.ndarray) -> LoadColumns:
    names = LoadColumns.__struct_fields__
    return LoadColumns(**{name: columns.get(name, np.zeros(size)) for name in names})


def costs(*of: StepCost) -> CostColumns:
    names = CostColumns.__struct_fields__
    return CostColumns(*(column(*(getattr(cost, name) for cost in of)) for name in names))


def sample(worker_id: str, seq: int, cost: StepCost | None = COST, *, running: int = 0) -> LoadMetrics:
    return LoadMetrics(worker_id, running, 256, 0, 10_000, 0, 0.0, 0.0, seq=seq, step_cost=cost)


def info(worker_id: str) -> WorkerInfo:
    return WorkerInfo(worker_id, 0, WorkerRole.DECODE, "m", "m", "tcp://h:1", 4096, BLOCK, 10_000, 1 << 20, "k")


def router_of(clock: ManualClock, policy: str = "kv", size: int = 2) -> Router:
    router = Router(RouterConfig(router=policy), BLOCK, clock)  # type: ignore[arg-type]
    for number in range(size):
        router.add_worker(info(f"w{number}"))
    return router


# -- the terms ---------------------------------------------------------------------------------------------------------


def test_the_first_token_is_what_waits_and_what_is_computed() -> None:
    load = loads(prefill_tokens=column(500, 0))
    first, lost = prefill_seconds(column(100, 1600), load, costs(COST, COST))
    assert first.tolist() == pytest.approx([600e-5, 1600e-5])
    assert lost.tolist() == pytest.approx([100e-5 * LOST_PREFIX, 1600e-5 * LOST_PREFIX])


def test_a_decode_costs_what_it_adds_to_the_others() -> None:
    load = loads(num_requests=column(0, 10))
    alone, beside = decode_seconds(1000, 400, load, costs(COST, COST)).tolist()
    assert alone == 0.0
    assert beside == pytest.approx(400 * 10 * 5e-4)
    long = StepCost(decode_s=0.0, context_s=1e-8)
    assert decode_seconds(1000, 400, load, costs(long, long))[1] == pytest.approx(400 * 10 * 1e-8 * 1200)
    drafting = StepCost(decode_s=5e-4, context_s=0.0, tokens_per_step=2.5)
    assert decode_seconds(1000, 400, load, costs(COST, drafting))[1] == pytest.approx(160 * 10 * 5e-4)


def test_a_faster_worker_gets_more_of_the_load() -> None:
    fast = StepCost(0.001, 0.001, 1e-6, 0.0, 1e-5, 0.0)
    policy = build_policy(RouterConfig())
    load = loads(prefill_tokens=column(1000, 8000))
    chosen = policy.scores(Candidates(1600, BLOCK, column(0, 0), load, costs(COST, fast), 10.0)).argmax()
    assert chosen == 1
    weights = build_policy(RouterConfig(router="kv-weights"))
    assert weights.scores(Candidates(1600, BLOCK, column(0, 0), load, costs(COST, fast), 10.0)).argmax() == 0


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_finite_and_grow_with_the_load(seed: int) -> None:
    rng = random.Random(seed)
    policy = build_policy(RouterConfig())
    for _ in range(200):
        of = [StepCost(*(rng.choice((0.0, 1e-9, 1e-4, 1.0, 3600.0)) for _ in range(6))) for _ in range(3)]
        names = ("prefill_tokens", "context_tokens", "num_requests", "recent_share")
        values = {name: column(*(rng.choice((0.0, 1.0, 1e6)) for _ in range(3))) for name in names}
        values["recent_share"] = np.minimum(values["recent_share"], 1.0)
        prompt, output = rng.randrange(1, 100_000), rng.choice((0.0, 1.0, 1e6))
        given = Candidates(prompt, BLOCK, column(0, prompt // 32, prompt // 16), loads(3, **values), costs(*of), output)
        scores = policy.scores(given)
        assert np.isfinite(scores).all()
        assert (scores <= 0.0).all()
        assert scores.tolist() == policy.scores(given).tolist()
        for name in ("prefill_tokens", "num_requests"):
            more = loads(3, **{**values, name: values[name] + 100.0})
            assert (
                policy.scores(Candidates(prompt, BLOCK, given.overlap_blocks, more, given.costs, output)) <= scores
            ).all()
        held = np.full(3, float(prompt // BLOCK))
        assert (policy.scores(Candidates(prompt, BLOCK, held, given.load, given.costs, output)) >= scores).all()


def test_the_cost_of_a_pair_has_the_transfer_between_its_halves() -> None:
    prefill = Candidates(640, BLOCK, column(0, 20), loads(prefill_tokens=column(0, 1000)), costs(COST, COST))
    decode = Candidates(640, BLOCK, column(0, 10), loads(num_requests=column(0, 3)), costs(COST, COST), 100.0)
    same_host, can = np.array([[True, False]] * 2), np.array([[True, True], [True, False]])
    found = pair_seconds(prefill, decode, column(10_000, 40), same_host, can)
    assert found is not None
    assert found.prefill.tolist() == pytest.approx([640e-5 * (1 + LOST_PREFIX), 1320e-5 + 320e-5 * LOST_PREFIX])
    assert found.decode.tolist() == pytest.approx([0.0, 100 * 3 * 5e-4 + 440e-5])
    assert found.transfer[0].tolist() == pytest.approx([640e-5 * SAME_HOST_WEIGHT, 480e-5 * OTHER_HOST_WEIGHT])
    assert found.transfer[1, 1] == math.inf
    measured = np.array([[1e-6, math.nan], [3600.0, 1e-6]])
    by_time = pair_seconds(prefill, decode, column(10_000, 40), same_host, can, measured)
    assert by_time is not None
    assert by_time.transfer[0].tolist() == pytest.approx([640e-6, found.transfer[0, 1]])
    assert by_time.transfer[1, 0] == pytest.approx(found.transfer[1, 0] * MAX_TRANSFER_RATIO), "one absurd time"
    assert by_time.transfer[1, 1] == math.inf
    assert by_time.is_measured is not None
    assert by_time.is_measured.tolist() == [[True, False], [True, True]]
    unknown = Candidates(640, BLOCK, column(0, 20), prefill.load)
    assert pair_seconds(unknown, decode, column(0, 0), same_host, can) is None


@pytest.mark.parametrize("size", [1, 4, FEW, FEW + 1])
def test_the_scores_of_few_and_of_many_workers_are_the_same_numbers(size: int) -> None:
    rng = np.random.default_rng(size)
    policy = build_policy(RouterConfig(overlap_weight=0.9))
    for scale in (0.0, 1.0, 1e300):
        columns = {name: scale * rng.random(size) for name in LoadColumns.__struct_fields__}
        known = CostColumns(*(scale * rng.random(size) for _ in range(6)), 1.0 + 3.0 * rng.random(size))
        candidates = Candidates(2460, BLOCK, np.floor(200 * rng.random(size)), LoadColumns(**columns), known, 8.5)
        with np.errstate(over="ignore"):
            assert np.array_equal(policy.scores(candidates), -policy.seconds(candidates).total)


# -- costs that cannot be trusted --------------------------------------------------------------------------------------


def test_a_worker_without_costs_counts_with_the_median_and_nobody_is_far_from_it() -> None:
    clock = ManualClock()
    known = WorkerCosts(clock, 5.0)
    assert known.columns(["a"]) is None
    known.heard("a", COST)
    known.heard("c", StepCost(0.002, 0.003, 3e-5, 0.0, 5e-4, 0.0))
    known.heard("d", StepCost(0.002, 0.003, 3000.0, 0.0, 5e-4, 0.0))
    known.heard("e", StepCost(0.002, 0.003, 0.0, 0.0, 5e-4, 0.0))
    known.heard("f", StepCost(prefill_token_s=math.nan))
    known.heard("f", StepCost(prefill_token_s=-1.0))
    known.heard("f", None)
    found = known.columns(["a", "b", "c", "d", "e", "f"])
    assert found is not None
    median = 2e-5
    expected = [1e-5, median, 3e-5, median * MAX_RATIO, median / MAX_RATIO, median]
    assert found.prefill_token_s.tolist() == pytest.approx(expected)


def test_new_costs_count_soon_and_old_ones_no_more() -> None:
    clock = ManualClock()
    known = WorkerCosts(clock, 5.0)
    known.heard("a", COST)
    assert known.columns(["a"]) is not None
    known.heard("a", StepCost(prefill_token_s=7e-5))
    clock.advance(REFRESH_S)
    again = known.columns(["a"])
    assert again is not None
    assert again.prefill_token_s.tolist() == [7e-5]
    clock.advance(5.1)
    assert known.columns(["a"]) is None


def test_stale_load_falls_back_to_the_weights_and_is_counted() -> None:
    clock = ManualClock()
    router = router_of(clock)
    router.choose(RoutingRequest("r0", tuple(range(320))))
    assert router.num_fallbacks == 1
    for number in range(2):
        router.apply_metrics(sample(f"w{number}", 1))
    router.choose(RoutingRequest("r1", tuple(range(320))))
    router.explain(RoutingRequest("r1", tuple(range(320))))
    assert router.num_fallbacks == 1
    explained = router.explain(RoutingRequest("r2", tuple(range(320))))
    for found in explained.candidates:
        assert found.first_token_s is not None
        assert found.lost_prefix_s is not None
        assert found.decode_s is not None
        assert found.score == pytest.approx(-(found.first_token_s + found.lost_prefix_s + found.decode_s))
    clock.advance(STALE_AFTER_S + 1.0)
    by_weights = router.explain(RoutingRequest("r3", tuple(range(320))))
    assert all(found.first_token_s is None for found in by_weights.candidates)
    router.choose(RoutingRequest("r3", tuple(range(320))))
    assert router.num_fallbacks == 2


def test_published_requests_of_other_frontends_count() -> None:
    clock = ManualClock()
    router = router_of(clock)
    router.apply_metrics(sample("w0", 1, running=20))
    router.apply_metrics(sample("w1", 1))
    for number in range(5):
        chosen = router.choose(RoutingRequest(f"r{number}", tuple(range(number, number + 64)), max_tokens=400))
        assert chosen.worker_id == "w1"
    clock.advance(STALE_AFTER_S + 1.0)
    survey = router.survey(RoutingRequest("next", tuple(range(64))))
    assert survey.candidates.load.num_requests.tolist() == [0, 5]


# -- the warm burst ----------------------------------------------------------------------------------------------------


def warm_burst(policy: str, cost: StepCost) -> tuple[list[int], float]:
    """16 streams of 400 tokens whose prompts w0 holds: streams per worker, and seconds to the last token."""
    clock = ManualClock()
    router = router_of(clock, policy)
    log = KvEventLog("w0", 0)
    prompts = [tuple(range(1000 * number, 1000 * number + 1024)) for number in range(16)]
    for prompt in prompts:
        hashes = compute_sequence_hashes(prompt, BLOCK)
        router.apply_events(log.append([BlockStored(None, hashes, BLOCK)]))
    for number in range(2):
        router.apply_metrics(sample(f"w{number}", 1, cost))
    streams = [0, 0]
    computed = [0, 0]
    for number, prompt in enumerate(prompts):
        decision = router.choose(RoutingRequest(f"r{number}", prompt, max_tokens=400))
        at = int(decision.worker_id[1])
        streams[at] += 1
        computed[at] += len(prompt) - BLOCK * decision.overlap_blocks
        clock.advance(0.01)
    last_s = max(
        cost.prefill_seconds(tokens) + 400 * (cost.step_s + cost.decode_s * count)
        for tokens, count in zip(computed, streams, strict=True)
    )
    return streams, last_s


def test_a_warm_burst_spreads_where_a_stream_slows_the_others() -> None:
    steep = StepCost(0.001, 0.003, 1e-5, 0.0, 5e-4, 0.0)
    spread, last_s = warm_burst("kv", steep)
    assert max(spread) <= 10
    piled, before_s = warm_burst("kv-weights", steep)
    assert max(piled) >= 12
    assert before_s > last_s
    assert 400 * (steep.step_s + steep.decode_s * 15) >= 1.5 * last_s, "against 15 streams on one worker"


def test_a_warm_burst_stays_together_where_streams_cost_nothing() -> None:
    flat = StepCost(0.02, 0.003, 1e-4, 0.0, 1e-7, 0.0)
    together, _ = warm_burst("kv", flat)
    assert together == [16, 0]
