"""The choice of a pair: the costs as a pure function, and the decisions over two routers."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config import DisaggConfig, RouterConfig, WorkerRole
from kvrelay.core.clock import ManualClock
from kvrelay.core.event_codec import decode_load, encode_frame
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import BlockStored, LoadCost, LoadMetrics, TransferCost
from kvrelay.core.handoff import OrderPolicy, PrefixHolder
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.step_cost import StepCost
from kvrelay.core.tier_stats import PEER
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import ProtocolError, WorkerUnavailableError
from kvrelay.placement.base import PrefillPlace
from kvrelay.placement.pair_cost import OTHER_HOST_WEIGHT, SAME_HOST_WEIGHT, pair_costs
from kvrelay.placement.seconds import Candidates, LoadColumns
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.placement.trials import FIRST_TRIAL_S
from kvrelay.placement.ways import PAIR_S, Way
from kvrelay.router import PairRouter, Router, RouterStage, RoutingRequest
from kvrelay.router.pair_router import PairDecision

BLOCK = 16
PROMPT = tuple(range(100, 100 + 640))


def candidates(overlaps: list[float], pending: list[float], context: list[float]) -> Candidates:
    zeros = np.zeros(len(overlaps))
    load = LoadColumns(np.array(pending), np.array(context), zeros, zeros, zeros, zeros, zeros)
    return Candidates(640, BLOCK, np.array(overlaps), load)


def test_the_cost_adds_both_halves_and_the_way_between_them() -> None:
    costs = pair_costs(
        candidates([0, 20], [0, 1000], [0, 0]),
        candidates([0, 10, 0], [0, 0, 0], [0, 500, 0]),
        np.array([10_000.0, 10_000.0, 40.0]),
        np.array([[True, True, False]] * 2),
        np.array([[True, True, True], [True, True, False]]),
        0.1,
    )
    assert costs.prefill.tolist() == [640, 700 + 320]
    assert costs.decode.tolist() == [0, 50, 600]
    assert costs.transfer[0].tolist() == [640 * SAME_HOST_WEIGHT, 480 * SAME_HOST_WEIGHT, 640 * OTHER_HOST_WEIGHT]
    assert costs.transfer[1, 2] == np.inf
    assert costs.total[0, 0] == 640 + 640 * SAME_HOST_WEIGHT


def info(worker_id: str, role: WorkerRole, **changes: object) -> WorkerInfo:
    fields = {"num_blocks": 1000, "kv_compatibility": "k", "host": "h", **changes}
    return WorkerInfo(
        worker_id, int(str(fields.pop("epoch", 0))), role, "m", "m", "tcp://h:1", 4096, BLOCK, vocab_size=2000, **fields
    )


def pair_router(router: str = "kv", num_prefill: int = 2, num_decode: int = 2, **disagg: Any) -> PairRouter:
    clock = ManualClock()
    config = RouterConfig(router=router)
    decodes = Router(config, BLOCK, clock)
    prefills = Router(config, BLOCK, clock, RouterStage.PREFILL)
    for number in range(num_decode):
        decodes.add_worker(info(f"d{number}", WorkerRole.DECODE))
    for number in range(num_prefill):
        prefills.add_worker(info(f"p{number}", WorkerRole.PREFILL))
    return PairRouter(decodes, prefills, DisaggPolicy(DisaggConfig(**disagg)))


def metrics(worker_id: str, num_waiting: int) -> LoadMetrics:
    return LoadMetrics(worker_id, 0, 16, 0, 1000, num_waiting, 0.0, 0.0, seq=1)


def request(name: str = "r", tokens: tuple[int, ...] = PROMPT, exclude: tuple[str, ...] = ()) -> RoutingRequest:
    return RoutingRequest(name, tokens, exclude=exclude)


def hold(router: Router, worker_id: str, tokens: tuple[int, ...]) -> None:
    """The worker's events say that it has these tokens in its prefix cache."""
    hashes = compute_sequence_hashes(tokens, BLOCK)
    log = KvEventLog(worker_id, 0)
    router.apply_events(log.append([BlockStored(None, hashes, BLOCK)]))


def test_overlap_decides_on_the_prefill_worker_and_load_on_the_decode_worker() -> None:
    pairs = pair_router()
    hold(pairs.prefills, "p1", PROMPT[:320])
    for number in range(3):
        pairs.decodes.choose(request(f"other{number}", (number,) * 2000, exclude=("d1",)))
    decision = pairs.choose(request(), must_be_local=False)
    assert decision.place is PrefillPlace.REMOTE
    assert decision.prefill is not None
    assert (decision.prefill.worker_id, decision.prefill.overlap_blocks) == ("p1", 20)
    assert decision.decode.worker_id == "d1"


def test_both_halves_of_a_pair_have_the_adapter() -> None:
    """Without such a prefill worker there is no pair."""
    pairs = pair_router()

    def choose(number: int) -> PairDecision:
        asked = msgspec.structs.replace(request(f"r{number}", (number, *PROMPT)), adapter="sql@1")
        return pairs.choose(asked, must_be_local=False)

    pairs.decodes.add_worker(info("d1", WorkerRole.DECODE, adapters=("sql@1",)))
    pairs.prefills.add_worker(info("p0", WorkerRole.PREFILL, adapters=("sql@2",)))
    alone = choose(0)
    assert (alone.place, alone.decode.worker_id) == (PrefillPlace.LOCAL_NO_PREFILL_WORKER, "d1")
    pairs.prefills.add_worker(info("p1", WorkerRole.PREFILL, adapters=("sql@2", "sql@1")))
    for number in range(1, 9):
        decision = choose(number)
        assert decision.prefill is not None
        assert (decision.prefill.worker_id, decision.decode.worker_id) == ("p1", "d1")


@pytest.mark.parametrize("policy", ["kv", "kv-weights", "random"])
def test_no_pair_has_a_prefill_worker_that_its_decode_worker_avoids(policy: str) -> None:
    """It would begin the prompt for a decode worker that declines its KV and computes the prompt itself."""
    pairs = pair_router(policy, disagg_policy="threshold", max_prefill_queue_size=1000)
    for name, avoided in (("d0", ("p0", "p1")), ("d1", ("p0",))):
        pairs.decodes.apply_metrics(msgspec.structs.replace(metrics(name, 0), avoided=avoided))
    found = [pairs.choose(request(f"r{number}"), must_be_local=False) for number in range(40)]
    assert {(pair.prefill.worker_id, pair.decode.worker_id) for pair in found if pair.prefill} == {("p1", "d1")}
    pairs.decodes.apply_metrics(msgspec.structs.replace(metrics("d1", 0), seq=2, avoided=("p0", "p1")))
    assert pairs.choose(request("none"), must_be_local=False).place is PrefillPlace.LOCAL_NO_PREFILL_WORKER


def test_the_pair_with_the_faster_way_is_chosen_once_it_is_measured() -> None:
    pairs = pair_router(disagg_policy="threshold")
    ways = {("p0", "d0"): 4e-6, ("p0", "d1"): 4e-6, ("p1", "d0"): 4e-6, ("p1", "d1"): 1e-7}
    for half, names in ((pairs.prefills, ("p0", "p1")), (pairs.decodes, ("d0", "d1"))):
        for name in names:
            costs = tuple(TransferCost(d, token_s) for (p, d), token_s in ways.items() if p == name)
            half.apply_metrics(msgspec.structs.replace(metrics(name, 0), step_cost=StepCost(), transfer_costs=costs))
    explained = pairs.explain(request())
    assert explained.unit == "s"
    assert all(candidate.is_transfer_measured for candidate in explained.candidates)
    first = explained.candidates[0]
    assert (first.prefill_worker_id, first.decode_worker_id, first.transfer_cost) == ("p1", "d1", pytest.approx(640e-7))
    decision = pairs.choose(request(), must_be_local=False)
    assert decision.prefill is not None
    assert (decision.prefill.worker_id, decision.decode.worker_id) == ("p1", "d1")


def costing(pairs: PairRouter, num_decoding: int = 0) -> None:
    """Both halves publish what their steps cost, and the load of the decode half."""
    for half, name, running in ((pairs.prefills, "p0", 0), (pairs.decodes, "d0", num_decoding)):
        sample = LoadMetrics(name, running, 256, 0, 1000, 0, 0.0, 0.0, seq=1, step_cost=StepCost())
        half.apply_metrics(sample)


def costing_half(pairs: PairRouter) -> None:
    pairs.decodes.apply_metrics(msgspec.structs.replace(metrics("d0", 0), step_cost=StepCost()))


def test_with_costs_of_both_halves_seconds_decide_as_in_decode_first() -> None:
    """The thresholds would send both away, or keep both here."""
    for policy in ("auto", "cost"):
        for limit in (0, 10**6):
            idle, busy = (
                pair_router("kv", 1, 1, disagg_policy=policy, max_local_prefill_length=limit) for _ in range(2)
            )
            costing(idle)
            assert idle.choose(request(), must_be_local=False).place is PrefillPlace.LOCAL_CHEAPER
            assert idle.places == {PrefillPlace.LOCAL_CHEAPER: 1}
            costing(busy, num_decoding=64)
            decision = busy.choose(request(), must_be_local=False)
            assert decision.place is PrefillPlace.REMOTE
            assert (decision.prefill and decision.prefill.worker_id, decision.decode.worker_id) == ("p0", "d0")
            assert busy.explain(request("why")).unit == "s"


def test_a_long_queue_at_the_prefill_worker_brings_prompts_back() -> None:
    pairs = pair_router("kv", 1, 1)
    costing(pairs, num_decoding=64)
    assert pairs.explain(request()).place is PrefillPlace.REMOTE
    for number in range(400):
        pairs.prefills.choose(request(f"r{number}", (number,) * 640))
    assert pairs.explain(request()).place is PrefillPlace.LOCAL_CHEAPER


def test_without_costs_or_by_threshold_the_thresholds_decide() -> None:
    for settings, knows in (({"disagg_policy": "threshold"}, True), ({"disagg_policy": "auto"}, False)):
        for limit, place in ((0, PrefillPlace.REMOTE), (10**6, PrefillPlace.LOCAL_SHORT)):
            pairs = pair_router("kv", 1, 1, max_local_prefill_length=limit, **settings)
            if knows:
                costing(pairs)
            assert pairs.choose(request(), must_be_local=False).place is place
    always = pair_router("kv", 1, 1, disagg_policy="always")
    costing(always)
    assert always.choose(request(), must_be_local=False).place is PrefillPlace.REMOTE
    required = pair_router("kv", 1, 1)
    costing(required, num_decoding=64)
    assert required.choose(request(), must_be_local=True).place is PrefillPlace.LOCAL_REQUIRED


AUTO = OrderPolicy.AUTO
LONG = 1600
"""Tokens. They take 80 ms: to wait for them costs a pair 8 ms more than the queue, which takes 4 ms more."""


def distinct(name: str, length: int = 640) -> RoutingRequest:
    return request(name, (hash_of(name),) * length)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()) % 2**31


def test_auto_pairs_a_lone_prompt_and_queues_what_would_wait() -> None:
    pairs = pair_router("kv", 1, 1)
    costing(pairs, num_decoding=64)
    lone = pairs.choose(distinct("lone", LONG), AUTO, must_be_local=False)
    assert (lone.place, lone.ways and lone.ways.best) == (PrefillPlace.REMOTE, Way.PAIR)
    assert lone.prefill is not None
    waits = pairs.choose(distinct("waits", LONG), AUTO, must_be_local=False)
    assert (waits.place, waits.prefill, waits.decode.worker_id) == (PrefillPlace.QUEUE, None, "d0")
    assert pairs.explain(distinct("asked"), AUTO).place is PrefillPlace.QUEUE
    pairs.prefilled("lone")
    assert pairs.explain(distinct("asked"), AUTO).place is PrefillPlace.QUEUE
    pairs.first_token("waits")
    assert pairs.explain(distinct("asked"), AUTO).place is PrefillPlace.REMOTE
    assert pairs.places == {PrefillPlace.REMOTE: 1, PrefillPlace.QUEUE: 1}


def test_what_a_decode_worker_computes_itself_counts_there_until_its_first_token() -> None:
    pairs = pair_router("kv", 1, 1)

    def num_waiting() -> int:
        return pairs.decodes.explain(distinct("asked")).candidates[0].prefill_tokens

    idle = num_waiting()
    pairs.choose(distinct("local", LONG), AUTO, must_be_local=True)
    assert num_waiting() == idle + LONG
    pairs.first_token("local")
    assert num_waiting() == idle


def test_what_is_queued_counts_at_the_prefill_workers() -> None:
    """It waits at the prefill workers, until its first token or its end."""
    pairs = pair_router("kv", 1, 1, disagg_policy="always")
    costing(pairs)
    pairs.choose(distinct("pair", LONG), AUTO, must_be_local=False)
    before = pairs.explain(distinct("asked"), AUTO).ways
    for number in range(20):
        queued = pairs.choose(distinct(f"r{number}"), AUTO, must_be_local=False)
        assert queued.place is PrefillPlace.QUEUE
    after = pairs.explain(distinct("asked"), AUTO).ways
    assert before is not None
    assert before.queue is not None
    assert after is not None
    assert after.queue is not None
    begun_s = (20 * 5e-5 + 20 * 640 * 1e-9) / 2  # of the step that they decode in
    assert after.queue.first_token_s == pytest.approx(before.queue.first_token_s + 20 * 640 * 5e-5 + begun_s)
    for number in range(20):
        pairs.prefilled(f"r{number}")
        pairs.decodes.finished(f"r{number}", 1)
    again = pairs.explain(distinct("asked"), AUTO).ways
    assert again is not None
    assert again.queue == before.queue


def test_prompts_that_others_send_to_a_prefill_worker_count() -> None:
    pairs = pair_router("kv", 1, 1)
    costing(pairs, num_decoding=64)
    busy = msgspec.structs.replace(metrics("p0", 3), seq=2, num_prefill_tokens=2 * LONG + 2000, step_cost=StepCost())
    pairs.prefills.apply_metrics(busy)
    assert pairs.explain(request(), AUTO).place is PrefillPlace.QUEUE
    pairs.prefills.apply_metrics(msgspec.structs.replace(busy, seq=3, num_prefill_tokens=0))
    assert pairs.explain(request(), AUTO).place is PrefillPlace.REMOTE


def test_auto_leaves_it_to_the_decode_worker_where_seconds_are_not_known() -> None:
    costless, by_turn, none = pair_router("kv", 1, 1), pair_router("round-robin", 1, 1), pair_router("kv", 0, 1)
    costing(by_turn, num_decoding=64)
    costing_half(none)
    for pairs, place in (
        (costless, PrefillPlace.UNDECIDED),
        (by_turn, PrefillPlace.UNDECIDED),
        (none, PrefillPlace.LOCAL_NO_PREFILL_WORKER),
    ):
        decision = pairs.choose(request(), AUTO, must_be_local=False)
        assert (decision.place, decision.prefill, decision.ways) == (place, None, None)
        load = pairs.decodes.survey(request("next")).candidates.load
        assert load.prefill_tokens.tolist() == [640], "it counts at its decode worker"


def test_auto_under_the_other_policies_chooses_between_pair_and_queue() -> None:
    always = pair_router("kv", 1, 1, disagg_policy="always")
    threshold = pair_router("kv", 1, 1, disagg_policy="threshold", max_local_prefill_length=600)
    for pairs in (always, threshold):
        costing(pairs)
        places = [pairs.choose(distinct(f"r{n}", LONG), AUTO, must_be_local=False).place for n in range(2)]
        assert places == [PrefillPlace.REMOTE, PrefillPlace.QUEUE]
    short = threshold.choose(request("short", PROMPT[:500]), AUTO, must_be_local=False)
    assert (short.place, short.prefill) == (PrefillPlace.LOCAL_SHORT, None)
    required = always.choose(request("scored"), AUTO, must_be_local=True)
    assert (required.place, required.prefill) == (PrefillPlace.LOCAL_REQUIRED, None)


def test_the_requests_own_objective_decides() -> None:
    """Four answers run. 40 ms here, with 14 of harm to them, and 46 elsewhere, of which LATE times 4 are late."""
    for ttft_ms, place in ((0.0, PrefillPlace.REMOTE), (42.0, PrefillPlace.LOCAL_CHEAPER)):
        pairs = pair_router("kv", 1, 1, slo_itl_ms=1000.0)
        costing(pairs, num_decoding=4)
        asked = msgspec.structs.replace(request(), slo_ttft_ms=ttft_ms)
        assert pairs.choose(asked, AUTO, must_be_local=False).place is place


def test_a_pair_counts_on_both_halves_until_each_is_over() -> None:
    pairs = pair_router(num_prefill=1, num_decode=1)
    pairs.choose(request(), must_be_local=False)
    assert pairs.prefills.num_pending == 1
    load = pairs.decodes.survey(request()).candidates.load
    assert (load.prefill_tokens.tolist(), load.context_tokens.tolist()) == ([0], [640])
    pairs.prefilled("r")
    assert pairs.prefills.num_pending == 0
    assert pairs.decodes.survey(request()).candidates.load.num_requests.tolist() == [1]
    pairs.decodes.finished("r", 5)
    assert pairs.decodes.survey(request()).candidates.load.num_requests.tolist() == [0]


@pytest.mark.parametrize(
    ("tokens", "held", "settings", "place"),
    [
        (PROMPT[:256], 0, {}, PrefillPlace.LOCAL_SHORT),
        (PROMPT, 400, {}, PrefillPlace.LOCAL_SHORT),
        (PROMPT, 320, {}, PrefillPlace.REMOTE),
        (PROMPT, 0, {"max_prefill_queue_size": 0}, PrefillPlace.LOCAL_QUEUE_FULL),
    ],
)
def test_the_thresholds_are_those_of_decode_first(
    tokens: tuple[int, ...], held: int, settings: dict[str, int], place: PrefillPlace
) -> None:
    pairs = pair_router(**settings)
    if held:
        hold(pairs.decodes, "d1", PROMPT[:held])
    decision = pairs.choose(request(tokens=tokens), must_be_local=False)
    assert decision.place is place
    assert (decision.prefill is None) == (place is not PrefillPlace.REMOTE)
    assert pairs.prefills.num_pending == (place is PrefillPlace.REMOTE)
    if held == 400:
        assert decision.decode.worker_id == "d1"


def test_pending_prefills_count_as_the_queue() -> None:
    pairs = pair_router(num_prefill=1, max_prefill_queue_size=3)
    places = [pairs.choose(request(f"r{n}"), must_be_local=False).place for n in range(4)]
    assert places == [PrefillPlace.REMOTE] * 3 + [PrefillPlace.LOCAL_QUEUE_FULL]
    assert pairs.places == {PrefillPlace.REMOTE: 3, PrefillPlace.LOCAL_QUEUE_FULL: 1}
    pairs.explain(request("asked"))
    assert pairs.places.total() == 4, "only what is placed counts"
    pairs.prefilled("r1")
    assert pairs.choose(request("r5", (7,) * 640), must_be_local=False).place is PrefillPlace.REMOTE
    pairs.prefills.apply_metrics(metrics("p0", num_waiting=9))
    assert pairs.choose(request("r6", (8,) * 640), must_be_local=False).place is PrefillPlace.LOCAL_QUEUE_FULL


@pytest.mark.parametrize("router", ["kv", "round-robin", "random", "least-loaded", "dynamo-v0"])
def test_who_cannot_exchange_kv_is_no_pair(router: str) -> None:
    pairs = pair_router(router, num_prefill=0)
    assert pairs.choose(request(), must_be_local=False).place is PrefillPlace.LOCAL_NO_PREFILL_WORKER
    pairs.prefills.add_worker(info("p", WorkerRole.PREFILL, kv_compatibility="other"))
    assert pairs.choose(request("s", (501,) * 640), must_be_local=False).place is PrefillPlace.LOCAL_NO_PREFILL_WORKER
    pairs.prefills.add_worker(info("q", WorkerRole.PREFILL))
    assert pairs.choose(request("t", (502,) * 640), must_be_local=True).place is PrefillPlace.LOCAL_REQUIRED
    found = {pairs.choose(request(f"u{n}", (n,) * 640), must_be_local=False).place for n in range(6)}
    assert PrefillPlace.REMOTE in found


def test_workers_that_have_failed_are_in_no_pair() -> None:
    pairs = pair_router()
    for number in range(8):
        decision = pairs.choose(request(f"r{number}", exclude=("p0", "d1")), must_be_local=False)
        assert decision.prefill is not None
        assert (decision.prefill.worker_id, decision.decode.worker_id) == ("p1", "d0")
    alone = pairs.choose(request("alone", exclude=("p0", "p1")), must_be_local=False)
    assert (alone.place, alone.prefill) == (PrefillPlace.LOCAL_NO_PREFILL_WORKER, None)
    with pytest.raises(WorkerUnavailableError):
        pairs.choose(request("none", exclude=("d0", "d1")), must_be_local=False)


@pytest.mark.parametrize("router", ["kv", "round-robin"])
def test_an_explanation_places_nothing(router: str) -> None:
    pairs = pair_router(router)
    first = pairs.explain(request())
    assert first == pairs.explain(request())
    assert len(first.candidates) == (4 if router == "kv" else 0)
    assert sorted(c.cost for c in first.candidates) == [c.cost for c in first.candidates]
    assert pairs.prefills.num_pending == 0
    chosen = pairs.choose(request(), must_be_local=False)
    assert chosen.prefill == first.prefill
    assert chosen.decode == first.decode


def test_a_prefill_worker_that_can_read_the_prefix_costs_the_reading() -> None:
    """The one that has it is busy: the other one reads it, and the request says from where."""
    load_costs = (LoadCost(PEER, 1e-6, 0.001),)
    found = []
    for reads in (False, True):
        pairs = pair_router(disagg_policy="threshold")
        for name in ("p0", "p1"):
            pairs.prefills.remove_worker(name)
            pairs.prefills.add_worker(info(name, WorkerRole.PREFILL, reads_prefixes=reads))
        for half, names in ((pairs.prefills, ("p0", "p1")), (pairs.decodes, ("d0", "d1"))):
            for name in names:
                sample = msgspec.structs.replace(metrics(name, 0), step_cost=StepCost(), load_costs=load_costs)
                half.apply_metrics(sample)
        hold(pairs.prefills, "p0", PROMPT)
        pairs.prefills.choose(request("busy", tuple(range(5000, 8000)), exclude=("p1",)))
        explained = pairs.explain(request())
        found.append({pair.prefill_worker_id: pair.prefill_cost for pair in explained.candidates})
        decision = pairs.choose(request(), must_be_local=False)
        assert decision.prefill is not None
        assert decision.prefill.worker_id == "p1"
        assert decision.prefill.holder == (PrefixHolder("p0", 640) if reads else None)
        assert decision.decode.holder is None
    assert found[0]["p0"] == found[1]["p0"]
    assert found[1]["p1"] < found[0]["p1"] / 2


@pytest.mark.parametrize("order", [OrderPolicy.AUTO, OrderPolicy.PREFILL_FIRST])
def test_a_prefill_worker_reads_what_a_decode_worker_holds_if_that_is_sooner(order: OrderPolicy) -> None:
    """600 of 640 tokens: 1.6 ms to read, 30 ms to compute. The decode worker that holds them is not even the pair's."""
    for token_s, kv, holder in ((1e-6, "k", PrefixHolder("d1", 608)), (1e-3, "k", None), (1e-6, "other", None)):
        pairs = pair_router(num_prefill=1, num_decode=1, disagg_policy="always", slo_itl_ms=1000.0)
        pairs.prefills.add_worker(info("p0", WorkerRole.PREFILL, reads_prefixes=True, epoch=1))
        pairs.decodes.add_worker(info("d1", WorkerRole.DECODE, reads_prefixes=True, kv_compatibility=kv))
        costing(pairs)
        costs = (LoadCost(PEER, token_s, 0.001),)
        pairs.prefills.apply_metrics(
            msgspec.structs.replace(metrics("p0", 0), seq=2, step_cost=StepCost(), load_costs=costs)
        )
        hold(pairs.decodes, "d1", PROMPT[:608])
        asked = msgspec.structs.replace(request(), exclude=("d1",))
        decision = pairs.choose(asked, order, must_be_local=False)
        assert decision.prefill is not None
        assert (decision.prefill.holder, decision.decode.worker_id) == (holder, "d0")
        assert decision.ways is None or decision.ways.pair is not None
        if order is AUTO:
            assert decision.ways is not None
            own_s = 0.006 + 32 * 5e-5 if holder else 0.006 + 640 * 5e-5
            load_s = 0.001 + 608e-6 if holder else 0.0
            move_s = 640 * 0.02 * 5e-5
            assert decision.ways.pair is not None
            assert decision.ways.pair.first_token_s == pytest.approx(PAIR_S + own_s + load_s + move_s, rel=0.05)


TIMES = st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1e-3, 600.0, 1e300, math.inf, math.nan, -1.0])
COUNTS = st.sampled_from([0, 1, 1000, 2**31 - 1, 2**53 + 1, 2**63, 2**64 - 1, -1])
COSTS = st.builds(StepCost, TIMES, TIMES, TIMES, TIMES, TIMES, TIMES)
LOAD_COSTS = st.builds(LoadCost, st.sampled_from(["host", PEER]), TIMES, TIMES)
SAMPLES = st.builds(
    LoadMetrics,
    st.sampled_from(["p0", "p1", "d0", "d1"]),
    *[COUNTS] * 5,
    *[st.sampled_from([0.0, 0.5, 1.0])] * 2,
    step_cost=COSTS,
    transfer_costs=st.tuples(st.builds(TransferCost, st.sampled_from(["p0", "d1"]), TIMES)),
    load_costs=st.tuples(LOAD_COSTS),
)


@given(st.lists(SAMPLES, max_size=6))
def test_whatever_workers_publish_a_request_is_placed_and_its_load_ends_with_it(samples: list[LoadMetrics]) -> None:
    pairs = pair_router("kv", disagg_policy="cost")
    for at, sample in enumerate(samples):
        pairs.choose(request(f"{at}"), must_be_local=False)
        with suppress(ProtocolError):
            heard = decode_load(encode_frame(sample))
            pairs.decodes.apply_metrics(heard)
            pairs.prefills.apply_metrics(heard)
    assert pairs.explain(request()).decode.worker_id in ("d0", "d1")
    for at in range(len(samples)):
        pairs.decodes.finished(f"{at}", 1)
        pairs.prefilled(f"{at}")
    assert "requests=0, prefill_tokens=0, context_tokens=0)" in repr(pairs.decodes)
    assert "requests=0, prefill_tokens=0, context_tokens=0)" in repr(pairs.prefills)


# -- trials -----------------------------------------------------------------------------------------------------------

SLOW = StepCost(prefill_s=0.1, prefill_token_s=1e-3)
"""Of a worker whose first prefill took twenty times as long as the next ones would."""


def trying(num_prefill: int, **slow: StepCost) -> tuple[PairRouter, ManualClock]:
    pairs = pair_router("kv", num_prefill, 1, disagg_policy="cost")
    for number in range(num_prefill):
        pairs.prefills.apply_metrics(costly(f"p{number}", **slow))
    pairs.decodes.apply_metrics(costly("d0", 64, **slow))
    clock = pairs.decodes.clock
    assert isinstance(clock, ManualClock)
    return pairs, clock


def costly(worker_id: str, num_running: int = 0, **slow: StepCost) -> LoadMetrics:
    cost = slow.get(worker_id, StepCost())
    return LoadMetrics(worker_id, num_running, 256, 0, 1000, 0, 0.0, 0.0, seq=1, step_cost=cost)


def where(
    pairs: PairRouter, name: str, order: OrderPolicy = OrderPolicy.PREFILL_FIRST, num_tokens: int = LONG
) -> tuple[str, bool]:
    """Which worker computes it, and whether to try it. It has been computed when the next one comes."""
    decision = pairs.choose(distinct(name, num_tokens), order, must_be_local=False)
    worker = decision.decode if decision.prefill is None else decision.prefill
    pairs.first_token(name)
    pairs.prefilled(name)
    pairs.decodes.finished(name, 1)
    return worker.worker_id, decision.ways is not None and decision.ways.is_trial


def test_a_prefill_worker_with_one_slow_prefill_is_tried_again() -> None:
    pairs, clock = trying(1, p0=SLOW)
    assert where(pairs, "at once") == ("d0", False)
    clock.advance(FIRST_TRIAL_S)
    assert where(pairs, "trial") == ("p0", True)
    clock.advance(FIRST_TRIAL_S)
    assert where(pairs, "soon after") == ("d0", False), "each trial in a row doubles the time to the next"
    clock.advance(FIRST_TRIAL_S)
    assert where(pairs, "again") == ("p0", True)
    pairs.prefills.apply_metrics(msgspec.structs.replace(costly("p0"), seq=2))
    clock.advance(FIRST_TRIAL_S)
    assert where(pairs, "measured") == ("p0", False)


def test_one_of_several_prefill_workers_is_tried_again() -> None:
    pairs, clock = trying(2, p0=SLOW)
    for number in range(8):
        clock.advance(FIRST_TRIAL_S / 10)
        assert where(pairs, f"r{number}") == ("p1", False)
    clock.advance(FIRST_TRIAL_S)
    busy = pairs.choose(distinct("waits", 8 * LONG), must_be_local=False)
    assert busy.prefill is not None
    assert busy.prefill.worker_id == "p0", "the other one is not doubtful, and this one is as good as it might be"
    assert busy.ways is not None
    assert busy.ways.is_trial


def test_a_decode_worker_with_one_slow_prefill_is_tried_again() -> None:
    pairs, clock = trying(1, d0=SLOW)
    pairs.decodes.apply_metrics(msgspec.structs.replace(costly("d0", 0, d0=SLOW), seq=2))
    assert where(pairs, "at once", num_tokens=800) == ("p0", False)
    clock.advance(FIRST_TRIAL_S)
    assert where(pairs, "trial", num_tokens=800) == ("d0", True)
    clock.advance(FIRST_TRIAL_S)
    assert where(pairs, "soon after", num_tokens=800) == ("p0", False)


def test_what_would_not_pay_at_best_is_not_tried() -> None:
    """As fast as the fastest worker, and with links as fast as they may be, p0 would still take longer."""
    pairs, clock = trying(1, p0=SLOW)
    pairs.decodes.apply_metrics(msgspec.structs.replace(costly("d0"), seq=2))
    clock.advance(FIRST_TRIAL_S)
    assert where(pairs, "idle") == ("d0", False)


def test_where_a_prompt_waits_and_where_the_decode_worker_tries_nothing_is_tried() -> None:
    pairs, clock = trying(1, p0=SLOW)
    busy = msgspec.structs.replace(costly("p0", p0=SLOW), seq=2, num_prefill_tokens=LONG)
    pairs.prefills.apply_metrics(busy)
    clock.advance(FIRST_TRIAL_S)
    assert where(pairs, "under way") == ("d0", False)
    clock.advance(FIRST_TRIAL_S)
    pairs.prefills.apply_metrics(msgspec.structs.replace(busy, seq=3, num_prefill_tokens=0))
    assert where(pairs, "auto", AUTO) == ("d0", False)
    clock.advance(FIRST_TRIAL_S)
    assert where(pairs, "prefill-first") == ("p0", True)


def test_a_prefill_worker_reads_what_a_worker_that_leaves_holds() -> None:
    pairs = pair_router(num_prefill=1, num_decode=1, disagg_policy="always", slo_itl_ms=1000.0)
    pairs.prefills.add_worker(info("p0", WorkerRole.PREFILL, reads_prefixes=True, epoch=1))
    pairs.decodes.add_worker(info("d1", WorkerRole.DECODE, reads_prefixes=True))
    costing(pairs)
    costs = (LoadCost(PEER, 1e-6, 0.001),)
    pairs.prefills.apply_metrics(
        msgspec.structs.replace(metrics("p0", 0), seq=2, step_cost=StepCost(), load_costs=costs)
    )
    hold(pairs.decodes, "d1", PROMPT[:608])
    pairs.decodes.remove_worker("d1", lends_for_s=10.0)
    decision = pairs.choose(request(), must_be_local=False)
    assert decision.prefill is not None
    assert (decision.prefill.holder, decision.decode.worker_id) == (PrefixHolder("d1", 608), "d0")
