"""KvIndexer: order, duplicates, gaps, late joins, restarts, dumps, and a bus that loses what it likes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.router.radix_tree import scores_of

from kvrelay.core.clock import ManualClock
from kvrelay.core.event_codec import decode_events, decode_replay_reply, encode_frame
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.router.base import IndexState
from kvrelay.router.indexer import DUMP_INTERVAL_S, REPLAY_TIMEOUT_S, VERIFY_INTERVAL_S, KvIndexer

BLOCK_SIZE = 16


def stored(locals_: list[int], start: int = 0, block_size: int = BLOCK_SIZE) -> BlockStored:
    chain = compute_sequence_hashes(locals_, 1)
    return BlockStored(chain[start - 1] if start else None, chain[start:], block_size)


class Cluster:
    """Workers' logs, an indexer, and the bus between them: ``deliver`` answers what the indexer has asked."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.asked: list[tuple[str, bytes]] = []
        self.indexer = KvIndexer(BLOCK_SIZE, self.clock, lambda worker, request: self.asked.append((worker, request)))
        self.logs: dict[str, KvEventLog] = {}
        self.num_dumps = 0

    def start(self, name: str, epoch: int = 0, capacity: int = 100, max_reply_blocks: int = 1000) -> KvEventLog:
        self.logs[name] = KvEventLog(name, epoch, capacity, max_reply_blocks)
        self.indexer.add_worker(name)
        return self.logs[name]

    def publish(self, name: str, *events: KvEvent, lost: bool = False) -> None:
        frame = encode_frame(self.logs[name].append(events))
        if not lost:
            self.indexer.apply(decode_events(frame))

    def deliver(self) -> int:
        """Answer until nothing is asked any more; how many answers it took."""
        answers = 0
        while self.asked:
            name, request = self.asked.pop(0)
            answer = self.logs[name].serve_replay(request)
            self.num_dumps += decode_replay_reply(answer).is_dump
            self.indexer.apply_replay(name, answer)
            answers += 1
            assert answers < 1000
        return answers

    def scores(self, *locals_: int) -> dict[str, int]:
        return scores_of(self.indexer, compute_sequence_hashes(locals_, 1))

    def check(self) -> None:
        """The index is the union of what the workers hold."""
        self.indexer.index.compact()
        self.indexer.index.check_integrity()
        found = {(name, block) for name in self.indexer.index.worker_ids for block in self.indexer.indexed_blocks(name)}
        true = {
            (name, block)
            for name, log in self.logs.items()
            for batch in log.dump()
            for event in batch.events
            if isinstance(event, BlockStored)
            for block in event.block_hashes
        }
        assert found == true


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_batches_in_order(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.deliver()
    cluster.publish("a", stored([1, 2]), stored([1, 2, 3], 2))
    cluster.publish("a", BlockRemoved((compute_sequence_hashes([1, 2, 3], 1)[2],)))
    assert cluster.scores(1, 2, 3) == {"a": 2}
    assert cluster.asked == []


def test_a_worker_without_events_is_synced_at_once(cluster: Cluster) -> None:
    cluster.start("a")
    assert cluster.indexer.index_state("a") is IndexState.CATCHING_UP
    assert cluster.deliver() == 1
    assert cluster.indexer.index_state("a") is IndexState.SYNCED


def test_duplicates_and_overlapping_batches_count_once(cluster: Cluster) -> None:
    log = cluster.start("a")
    cluster.deliver()
    first = log.append([stored([1]), stored([1, 2], 1)])
    cluster.indexer.apply(first)
    cluster.publish("a", AllBlocksCleared())
    cluster.indexer.apply(first)
    assert cluster.scores(1, 2) == {}
    overlapping = KvEventBatch("a", 0, 2, (AllBlocksCleared(), stored([7])))
    cluster.indexer.apply(overlapping)
    assert cluster.scores(7) == {"a": 1}


def test_a_gap_is_closed_by_a_replay(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.deliver()
    cluster.publish("a", stored([1]))
    cluster.publish("a", stored([1, 2], 1), lost=True)
    cluster.publish("a", stored([1, 2, 3], 2))
    cluster.publish("a", stored([1, 2, 3, 4], 3))
    assert cluster.scores(1, 2, 3, 4) == {"a": 1}
    assert cluster.deliver() == 1
    assert cluster.scores(1, 2, 3, 4) == {"a": 4}
    assert cluster.indexer.index_state("a") is IndexState.SYNCED
    cluster.check()


def test_a_late_joiner_learns_what_happened_before(cluster: Cluster) -> None:
    log = KvEventLog("a", 0)
    log.append([stored([1, 2, 3])])
    cluster.logs["a"] = log
    cluster.indexer.add_worker("a")
    cluster.deliver()
    assert cluster.scores(1, 2, 3) == {"a": 3}


def test_two_frontends_arrive_at_the_same(cluster: Cluster) -> None:
    other = Cluster()
    other.logs = cluster.logs
    cluster.start("a", capacity=2)
    cluster.deliver()
    for number in range(10):
        cluster.publish("a", stored([number, number + 1]))
    other.indexer.add_worker("a")
    other.deliver()
    assert other.num_dumps == 1
    cluster.check()
    other.check()


def test_a_dump_in_pages_while_events_go_on(cluster: Cluster) -> None:
    log = cluster.start("a", capacity=4, max_reply_blocks=3)
    for number in range(0, 40, 2):
        log.append([stored([number, 1, 2])])
    log.append([BlockRemoved((compute_sequence_hashes([0, 1], 1)[1],))])  # leaves a block without its parent
    answers = 0
    while cluster.asked:
        name, request = cluster.asked.pop(0)
        cluster.indexer.apply_replay(name, log.serve_replay(request))
        cluster.publish("a", stored([100 + answers]))
        answers += 1
        assert answers < 60
    assert answers >= 20
    assert cluster.indexer.index_state("a") is IndexState.SYNCED
    cluster.check()
    cluster.publish("a", stored([0, 1], 1))
    assert cluster.scores(0, 1, 2) == {"a": 3}


def test_events_that_overtake_a_dump_are_not_lost(cluster: Cluster) -> None:
    log = cluster.start("a")
    cluster.deliver()
    cluster.indexer.apply(KvEventBatch("a", 0, 0, (stored([5, 6], 1),)))  # its parent was never stored
    log.append([stored([8, 9])])
    (name, request) = cluster.asked.pop()
    answer = log.serve_replay(request)
    cluster.publish("a", stored([1]))
    cluster.indexer.apply_replay(name, answer)
    cluster.deliver()
    assert cluster.scores(1) == {"a": 1}
    assert cluster.scores(8, 9) == {"a": 2}
    cluster.check()


def test_a_worker_whose_events_never_fit_is_asked_for_dumps_at_a_bounded_rate(cluster: Cluster) -> None:
    log = cluster.start("a")
    cluster.deliver()
    for number in range(50):
        cluster.indexer.apply(log.append([stored([number, 77], 1)]))
        cluster.deliver()
        cluster.clock.advance(DUMP_INTERVAL_S / 10)
    assert 4 <= cluster.num_dumps <= 6


@pytest.mark.parametrize("lost", ["question", "answer"])
def test_lost_questions_and_answers_are_repeated_when_the_worker_is_heard(cluster: Cluster, lost: str) -> None:
    log = cluster.start("a")
    log.append([stored([1, 2])])
    if lost == "answer":
        log.serve_replay(cluster.asked[0][1])
    cluster.asked.clear()
    cluster.indexer.heard("a")
    assert cluster.asked == []
    cluster.clock.advance(REPLAY_TIMEOUT_S)
    cluster.indexer.heard("a")
    assert cluster.deliver() == 1
    assert cluster.scores(1, 2) == {"a": 2}


def test_the_loss_of_the_very_last_batch_is_noticed(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.publish("a", stored([1]))
    cluster.deliver()
    cluster.publish("a", stored([1, 2], 1), lost=True)
    cluster.indexer.heard("a")
    assert cluster.deliver() == 0
    cluster.clock.advance(VERIFY_INTERVAL_S)
    cluster.indexer.heard("a")
    assert cluster.deliver() == 1
    assert cluster.scores(1, 2) == {"a": 2}


def test_the_first_batch_of_a_new_epoch_replaces_what_was_held(cluster: Cluster) -> None:
    """Its number is one that the old epoch had."""
    cluster.start("a")
    cluster.deliver()
    cluster.publish("a", stored([1, 2]))
    cluster.logs["a"] = KvEventLog("a", 1)
    cluster.publish("a", stored([3]))
    assert (cluster.scores(1, 2), cluster.scores(3)) == ({}, {"a": 1})
    assert cluster.asked == []


def test_a_new_epoch_starts_from_nothing(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.publish("a", stored([1, 2]))
    cluster.deliver()
    old = cluster.logs["a"]
    cluster.logs["a"] = KvEventLog("a", 1)
    cluster.logs["a"].append([stored([3])])
    cluster.publish("a", stored([3, 4], 1))
    cluster.deliver()
    assert (cluster.scores(1, 2), cluster.scores(3, 4)) == ({}, {"a": 2})
    cluster.indexer.apply(old.append([stored([1, 2])]))
    assert cluster.scores(1, 2) == {}
    cluster.check()


def test_workers_that_are_unknown_or_gone_are_ignored(cluster: Cluster) -> None:
    cluster.indexer.apply(KvEventBatch("stranger", 0, 0, (stored([1]),)))
    cluster.start("a")
    cluster.publish("a", stored([1, 2]))
    cluster.indexer.remove_worker("a")
    cluster.indexer.remove_worker("a")
    cluster.publish("a", stored([3]))
    cluster.deliver()
    cluster.indexer.heard("a")
    assert (cluster.scores(1, 2), cluster.scores(3)) == ({}, {})
    assert cluster.indexer.index_state("a") is IndexState.NONE
    cluster.indexer.add_worker("a")
    cluster.deliver()
    cluster.check()


def test_wrong_block_sizes_are_logged_once(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.start("a")
    for number in range(3):
        cluster.publish("a", stored([number], block_size=32))
    assert cluster.scores(1) == {}
    assert len(caplog.records) == 1


def test_malformed_and_foreign_answers_are_dropped(cluster: Cluster) -> None:
    log = cluster.start("a")
    cluster.start("b")
    log.append([stored([1])])
    (_, request), _ = cluster.asked
    cluster.indexer.apply_replay("a", b"garbage")
    cluster.indexer.apply_replay("b", log.serve_replay(request))
    assert cluster.scores(1) == {}
    cluster.indexer.apply_replay("a", log.serve_replay(request))
    assert cluster.scores(1) == {"a": 1}


def test_a_stray_page_of_a_dump_changes_nothing(cluster: Cluster) -> None:
    log = cluster.start("a", capacity=1, max_reply_blocks=2)
    log.append([stored([1, 2, 3, 4])])
    log.append([stored([9])])
    (name, request) = cluster.asked.pop()
    cluster.indexer.apply_replay(name, log.serve_replay(request))
    (_, second) = cluster.asked.pop()
    page = log.serve_replay(second)
    cluster.indexer.apply_replay(name, page)
    cluster.indexer.apply_replay(name, page)
    cluster.deliver()
    cluster.check()


def test_without_a_way_to_ask_the_worker_is_learnt_anew_after_a_gap() -> None:
    indexer = KvIndexer(BLOCK_SIZE, ManualClock())
    indexer.add_worker("a")
    indexer.apply(KvEventBatch("a", 0, 0, (stored([1, 2]),)))
    indexer.apply(KvEventBatch("a", 0, 5, (stored([3]), stored([1, 2, 4], 2))))
    assert scores_of(indexer, compute_sequence_hashes([1, 2], 1)) == {}
    assert scores_of(indexer, compute_sequence_hashes([3], 1)) == {"a": 1}


class TrueCache:
    """An engine's block manager as the events show it: children leave before their parents, nearly always."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.blocks: dict[int, int | None] = {}

    def event(self) -> KvEvent:
        rng = self.rng
        kind = rng.random()
        if kind < 0.6 or not self.blocks:
            locals_ = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 12))]
            chain = compute_sequence_hashes(locals_, 1)
            start = next((at for at, block in enumerate(chain) if block not in self.blocks), len(chain) - 1)
            for at in range(start, len(chain)):
                self.blocks[chain[at]] = chain[at - 1] if at else None
            return stored(locals_, start)
        if kind < 0.995:
            parents = set(self.blocks.values())
            leaves = (
                [block for block in self.blocks if block not in parents] if rng.random() < 0.9 else list(self.blocks)
            )
            gone = rng.sample(leaves, min(len(leaves), rng.randrange(1, 4)))
            for block in gone:
                del self.blocks[block]
            return BlockRemoved(tuple(gone))
        self.blocks.clear()
        return AllBlocksCleared()


@pytest.mark.parametrize("seed", range(3))
def test_the_index_converges_over_a_bus_that_loses_repeats_and_reorders(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster()
    caches: dict[str, TrueCache] = {}
    in_flight: list[Callable[[], None]] = []
    num_lost = 0
    for step in range(1500):
        cluster.clock.advance(0.05)
        name = f"w{rng.randrange(4)}.{step // 500}"  # every worker restarts under a new id now and then
        if name not in cluster.logs:
            for gone in [known for known in cluster.logs if known.startswith(name[:3])]:
                cluster.indexer.remove_worker(gone)
                del cluster.logs[gone]
            cluster.start(name, capacity=rng.choice([4, 50]), max_reply_blocks=rng.choice([3, 200]))
            caches[name] = TrueCache(rng)
        batch = cluster.logs[name].append([caches[name].event() for _ in range(rng.randrange(1, 4))])
        is_lost = rng.random() <= 0.05
        num_lost += is_lost
        if not is_lost:
            in_flight += [lambda batch=batch: cluster.indexer.apply(batch)] * (2 if rng.random() < 0.05 else 1)
        for asked_name, request in cluster.asked:
            if rng.random() > 0.2 and asked_name in cluster.logs:
                answer = cluster.logs[asked_name].serve_replay(request)
                in_flight.append(lambda who=asked_name, answer=answer: cluster.indexer.apply_replay(who, answer))
        cluster.asked.clear()
        while len(in_flight) > 3:
            in_flight.pop(rng.randrange(2))()
        cluster.indexer.heard(name)
    for message in in_flight:
        message()
    for _ in range(3):
        cluster.clock.advance(VERIFY_INTERVAL_S)
        for name in cluster.logs:
            cluster.indexer.heard(name)
        cluster.deliver()
    assert num_lost > 10
    assert all(cluster.indexer.index_state(name) is IndexState.SYNCED for name in cluster.logs)
    cluster.check()
