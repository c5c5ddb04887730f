"""What a worker could load instead of computing, from its tiers or another worker: it moves the choice, and is told."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.test_seconds import BLOCK, COST, column, costs, info, loads, sample

from kvrelay.config import RouterConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.event_codec import ReplayReply, decode_events, encode_frame
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, LoadCost
from kvrelay.core.handoff import PrefixHolder
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.placement.seconds import LOST_PREFIX, Loads, prefill_seconds
from kvrelay.router import Router, RoutingDecision, RoutingRequest
from kvrelay.router.beyond import Lenders, TierTable

HOT = tuple(range(1600))
HASHES = compute_sequence_hashes(HOT, BLOCK)
DEAR = msgspec.structs.replace(COST, prefill_token_s=1e-3)
FAST = (LoadCost("host", 1e-5), LoadCost("disk", 1e-4), LoadCost("peer", 2e-5, 0.005))


class Fleet:
    """A router with workers that publish what the test says."""

    def __init__(self, size: int = 4, policy: str = "kv", **fields: object) -> None:
        self.clock = ManualClock()
        self.router = Router(RouterConfig(router=policy), BLOCK, self.clock)  # type: ignore[arg-type]
        self.logs = {}
        for number in range(size):
            settings = {"reads_prefixes": True} | fields
            self.router.add_worker(msgspec.structs.replace(info(f"w{number}"), **settings))
            self.logs[f"w{number}"] = KvEventLog(f"w{number}", 0)
        self.seq = 0

    def sample(self, load_costs: tuple[LoadCost, ...] = FAST) -> None:
        self.seq += 1
        for name in self.logs:
            self.router.apply_metrics(msgspec.structs.replace(sample(name, self.seq, DEAR), load_costs=load_costs))

    def has(self, name: str, num_blocks: int, medium: str | None = None, first: int = 0) -> None:
        hashes = HASHES[first:num_blocks]
        parent = HASHES[first - 1] if first and medium is None else None
        event = BlockStored(parent, hashes, BLOCK, medium=medium)
        self.router.apply_events(decode_events(encode_frame(self.logs[name].append([event]))))

    def decide(self, number: int = 0, *, place: bool = False, exclude: tuple[str, ...] = ()):
        request = RoutingRequest(f"r{number}", (*HOT, 7, 8, 9), max_tokens=8, exclude=exclude)
        return self.router.choose(request) if place else self.router.pick(self.router.survey(request))


def test_a_hot_prefix_spreads_instead_of_piling_up() -> None:
    """The worker that has it is busy: with reading others serve six requests; without, all wait for it."""
    spread, piled = Fleet(), Fleet(reads_prefixes=False)
    counts = []
    for fleet in (spread, piled):
        fleet.sample()
        fleet.has("w0", 100)
        # Prompts wait at the holder.
        for number in range(3):
            long = RoutingRequest(f"busy{number}", tuple(range(5000, 5600)), exclude=("w1", "w2", "w3"))
            fleet.router.choose(long)
        counts.append([fleet.decide(number, place=True) for number in range(6)])
    assert "w0" not in {decision.worker_id for decision in counts[0]}
    assert {decision.worker_id for decision in counts[1]} == {"w0"}
    read = [decision for decision in counts[0] if decision.holder is not None]
    assert read
    assert {decision.holder for decision in read} == {PrefixHolder("w0", 1600)}
    assert all(decision.load_blocks == 100 for decision in read)
    assert all(decision.holder is None for decision in counts[1])


@pytest.mark.parametrize(
    ("why", "fields", "load_costs"),
    [
        ("slower than computing", {}, (LoadCost("peer", 1.0),)),
        ("no one has measured or assumed it", {}, ()),
        ("they do not read", {"reads_prefixes": False}, FAST),
    ],
)
def test_no_holder_is_named_if_reading_is_not_worth_it(
    why: str, fields: dict[str, object], load_costs: tuple[LoadCost, ...]
) -> None:
    fleet = Fleet(**fields)
    fleet.sample(load_costs)
    fleet.has("w0", 100)
    decision = fleet.decide(exclude=("w0",))
    assert (decision.holder, decision.load_blocks) == (None, 0), why


def test_workers_of_other_kv_do_not_read_from_each_other() -> None:
    fleet = Fleet(2)
    fleet.router.add_worker(msgspec.structs.replace(info("w1"), reads_prefixes=True, kv_compatibility="other", epoch=1))
    fleet.sample()
    fleet.has("w0", 100)
    assert fleet.decide(exclude=("w0",)).holder is None


def test_the_best_holder_is_named_and_gone_with_it() -> None:
    fleet = Fleet()
    fleet.sample()
    fleet.has("w0", 40)
    fleet.has("w1", 90)
    assert fleet.decide(exclude=("w0", "w1")).holder == PrefixHolder("w1", 1440)
    fleet.router.remove_worker("w1")
    assert fleet.decide(exclude=("w0",)).holder == PrefixHolder("w0", 640)
    fleet.router.remove_worker("w0")
    assert fleet.decide().holder is None


def test_what_was_only_placed_is_not_read_yet() -> None:
    fleet = Fleet()
    fleet.sample()
    first = fleet.decide(place=True).worker_id
    assert fleet.decide(1, exclude=(first,)).holder is None, "it computes it just now"


def test_by_weights_the_worker_decides() -> None:
    fleet = Fleet(policy="kv-weights")
    fleet.sample()
    fleet.has("w0", 100)
    decision = fleet.decide(exclude=("w0",))
    assert decision.holder == PrefixHolder("w0", 1600)
    assert decision.load_blocks == 0, "so its tokens count as computed"


# -- tiers ------------------------------------------------------------------------------------------------------------


def test_a_worker_whose_tier_has_the_prefix_is_preferred() -> None:
    fleet = Fleet(reads_prefixes=False)
    fleet.sample()
    fleet.has("w2", 30)
    fleet.has("w2", 100, "host", first=30)
    fleet.has("w1", 60)
    decision = fleet.decide()
    assert (decision.worker_id, decision.overlap_blocks, decision.load_blocks) == ("w2", 30, 70)
    explained = fleet.router.explain(RoutingRequest("e", (*HOT, 1)))
    (score,) = [score for score in explained.candidates if score.worker_id == "w2"]
    assert score.load_s == pytest.approx(70 * BLOCK * 1e-5)


def test_events_without_a_medium_are_the_device_s_and_those_of_tiers_are_not() -> None:
    fleet = Fleet(2, reads_prefixes=False)
    fleet.sample()
    fleet.has("w0", 100, "host")
    assert fleet.decide().overlap_blocks == 0
    fleet.router.apply_events(fleet.logs["w0"].append([BlockRemoved(HASHES, "disk")]))
    assert fleet.decide().load_blocks == 100, "gone from another medium"
    fleet.router.apply_events(fleet.logs["w0"].append([BlockRemoved(HASHES[50:], "host")]))
    assert fleet.decide().load_blocks == 50
    fleet.router.apply_events(fleet.logs["w0"].append([AllBlocksCleared()]))
    assert fleet.decide().load_blocks == 0


def test_a_frontend_that_comes_late_learns_of_tiers_by_the_dump() -> None:
    log = KvEventLog("w0", 0, capacity=1)
    log.append([BlockStored(None, HASHES[:10], BLOCK)])
    log.append([BlockStored(None, HASHES[10:], BLOCK, medium="disk")])
    log.append([BlockRemoved((HASHES[-1],), "disk")])
    fleet = Fleet(1)
    fleet.sample()
    batches = tuple(log.dump())
    reply = ReplayReply("w0", 0, log.next_seq, batches, is_dump=True, dump_seq=log.next_seq)
    fleet.router.apply_replay("w0", encode_frame(reply))
    decision = fleet.decide()
    assert (decision.overlap_blocks, decision.load_blocks) == (10, 89)


def test_the_fastest_medium_counts_and_gaps_end_it() -> None:
    table, by_medium = TierTable(), {cost.medium: cost for cost in FAST}
    table.store("w", "disk", (1, 2, 3, 5))
    table.store("w", "host", (2,))
    table.store("w", "tape", (4,))
    assert table.following("w", (1, 2, 3, 4, 5), 0, by_medium) == {"disk": 2, "host": 1}
    table.remove("w", "host", (2,))
    assert table.following("w", (1, 2, 3, 4, 5), 1, by_medium) == {"disk": 2}
    table.remove_worker("w")
    assert not table.following("w", (1, 2), 0, by_medium)


def test_what_is_loaded_takes_place_too() -> None:
    load = loads(recent_share=column(0, 0))
    given = Loads(column(0, 1000), column(0, 0.01))
    first, lost = prefill_seconds(column(1600, 1600), load, costs(DEAR, DEAR), given)
    assert first.tolist() == pytest.approx([1.6, 0.6])
    assert lost.tolist() == pytest.approx([1.6 * LOST_PREFIX, 0.61 * LOST_PREFIX])


def test_each_row_has_another_one_to_read_from() -> None:
    lenders = Lenders(np.array([0.0, 0.0, -1.0, 1.0, 0.0]))
    rows, depths = lenders.holders(np.array([5.0, 9.0, 50.0, 40.0, 0.0]))
    assert rows == [1, 0, -1, -1, 1]
    assert depths.tolist() == [9, 5, 0, 0, 9]


# -- siblings ---------------------------------------------------------------------------------------------------------


def siblings(num_own: int, num_answer: int, peer: LoadCost | None) -> list[RoutingDecision]:
    """Where eight prompts go that come at once, of which w0 holds the first 1,600 tokens; each has ``num_own`` more."""
    fleet = Fleet(reads_prefixes=peer is not None)
    for number in range(200):
        request = RoutingRequest(f"before{number}", (1, 2, 3), max_tokens=num_answer)
        fleet.router.choose(request)
        fleet.router.finished(request.request_id, num_answer)
    fleet.sample((peer,) if peer else ())
    fleet.has("w0", 100)
    prompts = [(*HOT, *range(10_000 * at, 10_000 * at + num_own)) for at in range(1, 9)]
    return [
        fleet.router.choose(RoutingRequest(f"r{at}", prompt, max_tokens=num_answer))
        for at, prompt in enumerate(prompts)
    ]


@given(
    st.integers(1, 2000), st.integers(1, 4000), st.none() | st.builds(LoadCost, st.just("peer"), st.floats(1e-7, 1e-3))
)
@settings(max_examples=60, deadline=None)
def test_siblings_copy_their_root_at_most_once_to_each_worker(
    num_own: int, num_answer: int, peer: LoadCost | None
) -> None:
    """Whether it is read or computed: the next one finds it there."""
    decisions = siblings(num_own, num_answer, peer)
    without = [decision.worker_id for decision in decisions if decision.overlap_blocks < 100]
    assert len(set(without)) == len(without)
    assert "w0" not in without
    readers = [decision.worker_id for decision in decisions if decision.holder is not None]
    assert set(readers) <= set(without)


def test_siblings_spread_if_the_root_can_be_read() -> None:
    """2 ms for a prefix of 1,600 tokens, which would be 1.6 s to compute."""
    spread = Counter(decision.worker_id for decision in siblings(200, 100, LoadCost("peer", 1e-6, 0.0004)))
    assert sorted(spread.values()) == [2, 2, 2, 2]
    piled = Counter(decision.worker_id for decision in siblings(20, 100, None))
    assert piled == {"w0": 8}, "their answers together take less than to compute the root once more"


# -- workers that leave -----------------------------------------------------------------------------------------------


def test_a_worker_that_leaves_is_read_from_for_a_while_and_takes_no_requests() -> None:
    fleet = Fleet(3)
    fleet.sample()
    fleet.has("w0", 100)
    fleet.has("w1", 40)
    fleet.router.remove_worker("w0", lends_for_s=10.0)
    decision = fleet.decide(place=True)
    assert (decision.worker_id, decision.holder) == ("w1", PrefixHolder("w0", 1600))
    assert decision.load_blocks == 60, "the rest it has itself"
    fleet.router.remove_worker("w0")
    assert fleet.decide(1, exclude=("w1",)).holder == PrefixHolder("w0", 1600), "its connection has ended, too"
    fleet.clock.advance(10.0)
    assert fleet.decide(2, exclude=("w1",)).holder == PrefixHolder("w1", 640)
    assert fleet.router.indexed_blocks("w0") == []


def test_a_worker_that_comes_back_competes_with_what_it_has() -> None:
    fleet = Fleet(2)
    fleet.sample()
    fleet.has("w0", 100)
    fleet.router.remove_worker("w0", lends_for_s=10.0)
    fleet.router.add_worker(msgspec.structs.replace(info("w0"), reads_prefixes=True, epoch=1))
    fleet.sample()
    assert fleet.router.leaving(HASHES) == []
    assert fleet.decide().worker_id == "w0"


def test_one_that_lends_nothing_is_forgotten_at_once() -> None:
    fleet = Fleet(2, reads_prefixes=False)
    fleet.has("w0", 100)
    fleet.router.remove_worker("w0", lends_for_s=10.0)
    assert fleet.router.leaving(HASHES) == []
    assert fleet.router.indexed_blocks("w0") == []
