"""The load table: placements, published samples, staleness, workers that come and go."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.events import LoadMetrics
from kvrelay.router.load import RECENT_S, InFlightRequest, LoadTable


def sample(worker_id: str, *, active: int = 0, usage: float = 0.0, waiting: int = 0, seq: int = 0) -> LoadMetrics:
    return LoadMetrics(
        worker_id=worker_id,
        num_admitted=0,
        num_slots=8,
        num_blocks_in_use=active,
        num_blocks=100,
        num_waiting=waiting,
        cache_usage=usage,
        prefix_hit_rate=0.0,
        seq=seq,
    )


def table(*ids: str, clock: ManualClock | None = None) -> LoadTable:
    built = LoadTable(16, clock or ManualClock(100.0), stale_after_s=5.0)
    for name in ids:
        built.add_worker(name)
    return built


def own_tokens(load: LoadTable, worker_id: str) -> int:
    return sum(placed.context_tokens for placed in load.placed(worker_id))


def test_a_request_weighs_until_it_finishes() -> None:
    load = table("a", "b")
    load.place("r1", "b", prefill_tokens=60, context_tokens=100)
    assert (load.columns().prefill_tokens.tolist(), load.columns().context_tokens.tolist()) == ([0, 60], [0, 100])
    load.prefilled("r1")
    load.prefilled("r1")
    assert (load.columns().prefill_tokens.tolist(), load.columns().context_tokens.tolist()) == ([0, 0], [0, 100])
    load.finish("r1")
    load.finish("r1")
    assert load.placed("b") == []
    assert (load.columns().context_tokens.tolist(), load.columns().num_requests.tolist()) == ([0, 0], [0, 0])
    assert load.num_pending == 0


def test_a_request_that_moves_leaves_its_first_worker() -> None:
    load = table("a", "b")
    load.place("r1", "a", 60, 100)
    load.place("r1", "b", 90, 120)
    assert (load.placed("a"), load.placed("b")) == ([], [InFlightRequest("b", 90, 120)])
    assert (load.columns().prefill_tokens.tolist(), load.columns().num_requests.tolist()) == ([0, 90], [0, 1])


def test_published_samples_and_staleness() -> None:
    clock = ManualClock(100.0)
    load = table("a", "b", clock=clock)
    assert load.apply_metrics(sample("b", active=10, usage=0.5, waiting=3))
    assert load.columns().cache_usage.tolist() == [0.0, 0.5]
    assert load.columns().num_waiting.tolist() == [0, 3]
    assert load.columns().context_tokens.tolist() == [0, 160]
    clock.advance(5.1)
    assert load.columns().cache_usage.tolist() == [0.0, 0.0]
    assert load.columns().context_tokens.tolist() == [0, 0]


def test_own_placements_since_the_sample_are_added_to_it() -> None:
    load = table("a")
    load.place("r1", "a", 10, 100)
    load.apply_metrics(sample("a", active=50))  # 800 tokens, most of them placed by other frontends
    load.place("r2", "a", 10, 200)
    assert load.columns().context_tokens.tolist() == [1000]
    load.finish("r1")
    assert load.columns().context_tokens.tolist() == [900]


def test_a_late_sample_cannot_hide_what_was_just_placed() -> None:
    load = table("a")
    load.place("r1", "a", 10, 5000)
    load.apply_metrics(sample("a", active=0))
    assert load.columns().context_tokens.tolist() == [5000]


def test_only_the_silent_worker_is_not_believed() -> None:
    clock = ManualClock(100.0)
    load = table("a", "b", clock=clock)
    load.place("r1", "a", 10, 100)
    load.apply_metrics(sample("a", active=50, usage=0.5, waiting=3))
    clock.advance(3)
    load.apply_metrics(sample("b", active=10, usage=0.25, waiting=2))
    clock.advance(3)
    assert load.columns().context_tokens.tolist() == [100, 160]
    assert load.columns().cache_usage.tolist() == [0, 0.25]
    assert load.columns().num_waiting.tolist() == [0, 2]
    load.apply_metrics(sample("a", active=20))
    clock.advance(3)
    assert load.columns().context_tokens.tolist() == [320, 0]


def test_the_effective_load_is_the_formula_of_the_module() -> None:
    """Through random placements, ends, samples and silences, against the formula with all its terms kept."""
    rng, clock = random.Random(11), ManualClock(100.0)
    load = table("a", "b", "c", clock=clock)
    published = dict.fromkeys("abc", (-math.inf, 0, 0))
    for number in range(2000):
        name = rng.choice("abc")
        action = rng.randrange(4)
        if action == 0:
            load.place(f"r{number}", name, 1, rng.randrange(500))
        elif action == 1:
            load.finish(f"r{rng.randrange(number + 1)}")
        elif action == 2:
            active = rng.randrange(60)
            load.apply_metrics(sample(name, active=active))
            published[name] = (clock.now(), active * 16, own_tokens(load, name))
        else:
            clock.advance(rng.random() * 2)
        expected = []
        for worker, (heard_at, active_tokens, own_then) in published.items():
            own_now = own_tokens(load, worker)
            fresh = clock.now() - heard_at <= 5.0
            expected.append(max(own_now, active_tokens + own_now - own_then) if fresh else own_now)
        assert load.columns().context_tokens.tolist() == expected


def test_samples_of_unknown_workers_and_old_samples_are_refused() -> None:
    load = table("a")
    assert not load.apply_metrics(sample("stranger"))
    assert load.apply_metrics(sample("a", usage=0.4, seq=7))
    assert not load.apply_metrics(sample("a", usage=0.9, seq=6))
    assert load.columns().cache_usage.tolist() == [0.4]


def test_load_survives_a_worker_that_leaves_and_returns() -> None:
    load = table("a", "b", "c")
    load.place("r1", "b", 10, 100)
    load.place("r2", "b", 20, 200)
    load.place("r3", "b", 5, 50)
    load.remove_worker("b")
    assert load.worker_ids == ["a", "c"]
    load.finish("r1")
    load.prefilled("r3")
    assert load.placed("b") == [InFlightRequest("b", 20, 200), InFlightRequest("b", 0, 50)]
    load.add_worker("b")
    columns = load.columns()
    assert [columns.prefill_tokens[2], columns.context_tokens[2], columns.num_requests[2]] == [20, 250, 2]
    load.finish("r2")
    load.finish("r3")
    assert load.columns().context_tokens.tolist() == [0, 0, 0]


def test_nothing_is_kept_of_a_worker_that_left_with_nothing() -> None:
    load = table("a", "b")
    load.place("r1", "b", 10, 100)
    load.remove_worker("b")
    load.remove_worker("b")
    load.finish("r1")
    load.add_worker("b")
    assert load.columns().num_requests.tolist() == [0, 0]
    assert repr(load) == "LoadTable(workers=2, requests=0, prefill_tokens=0, context_tokens=0)"


def test_recent_shares_are_of_what_was_placed_and_fade() -> None:
    clock = ManualClock(1e5)
    load = LoadTable(16, clock)
    for name in ("a", "b", "c"):
        load.add_worker(name)
    assert load.columns().recent_share.tolist() == [0, 0, 0]
    load.place("r1", "a", 100, 400)
    load.place("r2", "b", 0, 100)
    load.finish("r1")
    assert load.columns().recent_share.tolist() == [1.0, 0.25, 0.0]
    clock.advance(RECENT_S * math.log(4))  # what is older counts a quarter
    load.place("r3", "b", 0, 175)
    assert load.columns().recent_share.tolist() == pytest.approx([0.5, 1.0, 0.0])
    load.remove_worker("b")
    assert load.columns().recent_share.tolist() == [1.0, 0.0]


def test_recent_shares_stay_finite_for_ever() -> None:
    clock = ManualClock()
    load = LoadTable(16, clock)
    load.add_worker("a")
    load.add_worker("b")
    for number in range(400):
        clock.advance(RECENT_S * 3 if number % 40 else RECENT_S * 1e6)
        load.place(f"r{number}", "ab"[number % 2], 0, 100)
        newest = number % 2
        shares = load.columns().recent_share.tolist()
        assert shares[newest] == 1.0
        assert 0 <= shares[1 - newest] <= 0.05 + 1e-9


def test_prefills_of_others_are_what_a_sample_has_beyond_ours() -> None:
    """Also beyond those of ours that have ended since the sample before: it may have been taken earlier."""
    clock = ManualClock(100.0)
    load = table("a", clock=clock)
    load.place("r1", "a", prefill_tokens=60, context_tokens=100)

    def others(published: int) -> float:
        load.apply_metrics(msgspec.structs.replace(sample("a"), num_prefill_tokens=published))
        return float(load.columns().others_prefill_tokens[0])

    assert others(60) == 0
    assert others(100) == 40
    load.prefilled("r1")
    assert others(100) == 40, "taken before"
    assert others(100) == 100, "taken after"
    clock.advance(6.0)
    assert float(load.columns().others_prefill_tokens[0]) == 0, "stale"
