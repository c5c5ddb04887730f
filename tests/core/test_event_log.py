"""KvEventLog: numbering, the ring, dumps of what is held, pages."""

from __future__ import annotations

import random

import pytest

from kvrelay.core.event_codec import FULL_DUMP, ReplayReply, ReplayRequest, decode_replay_reply, encode_frame
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from kvrelay.errors import ProtocolError


def stored(parent: int | None, *blocks: int) -> BlockStored:
    return BlockStored(parent, blocks, 2)


def ask(log: KvEventLog, from_seq: int, dump_seq: int = -1, page: int = 0) -> ReplayReply:
    return decode_replay_reply(log.serve_replay(encode_frame(ReplayRequest(from_seq, dump_seq, page))))


def held(batches: list[KvEventBatch]) -> dict[int, int | None]:
    """Block and parent of everything that stored events name; a parent comes before its children."""
    found: dict[int, int | None] = {}
    for batch in batches:
        for event in batch.events:
            assert isinstance(event, BlockStored)
            parent = event.parent_hash
            for block in event.block_hashes:
                assert block not in found
                found[block] = parent
                parent = block
    return found


def test_events_are_numbered_without_gaps() -> None:
    log = KvEventLog("w", 4)
    first, second = log.append([stored(None, 1, 2)]), log.append([BlockRemoved((2,)), stored(1, 3)])
    assert (first.worker_id, first.epoch, first.first_seq, second.first_seq, log.next_seq) == ("w", 4, 0, 1, 3)


def test_a_log_that_no_one_reads_gives_the_same_batches_and_keeps_nothing() -> None:
    full, numbers = KvEventLog("w", 4), KvEventLog("w", 4, only_numbers=True)
    for events in ([stored(None, 1, 2)], [BlockRemoved((2,)), stored(1, 3)], [AllBlocksCleared()], [stored(None, 1)]):
        assert numbers.append(events) == full.append(events)
    assert (full.next_seq, full.num_blocks) == (numbers.next_seq, 1)
    assert not numbers.num_blocks


def test_what_is_published_and_replayed_has_sequence_hashes_alone() -> None:
    log = KvEventLog("w", 4)
    slim = BlockStored(None, (1, 2), 2)
    assert log.append([stored(None, 1, 2)]).events == (slim,)
    assert [batch.events for batch in ask(log, 0).batches] == [(slim,)]


def test_replay_from_the_ring() -> None:
    log = KvEventLog("w", 0)
    for block in range(5):
        log.append([stored(block - 1 if block else None, block)])
    (batch,) = log.replay(2)
    assert batch.first_seq == 2
    assert [event.block_hashes for event in batch.events if isinstance(event, BlockStored)] == [(2,), (3,), (4,)]
    assert log.replay(5) == []
    reply = ask(log, 2)
    assert (reply.batches, reply.next_seq, reply.is_dump) == ((batch,), 5, False)


def test_events_that_left_the_ring_are_answered_with_a_dump() -> None:
    log = KvEventLog("w", 0, capacity=3)
    log.append([stored(None, 1, 2, 3)])
    log.append([stored(2, 7), stored(3, 4), BlockRemoved((4,)), BlockRemoved((99,))])
    assert len(log.replay(2)[0].events) == 3
    for from_seq in (0, 1, FULL_DUMP, 6):
        reply = ask(log, from_seq)
        assert (reply.is_dump, reply.dump_seq, reply.num_pages) == (True, 5, 1)
        assert held(list(reply.batches)) == held(log.replay(from_seq)) == {1: None, 2: 1, 3: 2, 7: 2}
    log.append([AllBlocksCleared()])
    assert held(log.dump()) == {}
    assert log.num_blocks == 0


def test_answers_from_the_ring_are_bounded_and_go_on_where_they_ended() -> None:
    log = KvEventLog("w", 0, max_reply_blocks=10)
    for number in range(8):
        log.append([stored(None, *range(100 * number, 100 * number + 4))])
    at, answers = 0, 0
    while at < log.next_seq:
        reply = ask(log, at)
        assert not reply.is_dump
        (batch,) = reply.batches
        assert batch.first_seq == at
        assert sum(len(event.block_hashes) for event in batch.events) <= 10
        at += len(batch.events)
        answers += 1
    assert answers == 4


def test_an_event_above_the_bound_is_an_answer_of_its_own() -> None:
    log = KvEventLog("w", 0, max_reply_blocks=10)
    log.append([stored(None, 1), stored(None, *range(100, 112)), stored(None, 2)])
    answers = [ask(log, at).batches[0].events for at in range(3)]
    assert [[len(event.block_hashes) for event in events] for events in answers] == [[1], [12], [1]]


def test_dumps_come_in_pages_of_one_moment() -> None:
    log = KvEventLog("w", 0, capacity=1, max_reply_blocks=10)
    log.append([stored(None, *range(35))])
    first = ask(log, FULL_DUMP)
    assert (first.num_pages, first.dump_seq) == (4, 1)
    log.append([stored(34, 35)])
    pages = [first, *(ask(log, FULL_DUMP, 1, page) for page in (1, 2, 3))]
    assert [page.page for page in pages] == [0, 1, 2, 3]
    assert all(page.dump_seq == 1 for page in pages)
    assert set(held([batch for page in pages for batch in page.batches])) == set(range(35))
    for page in (9, 4, -1):
        assert ask(log, FULL_DUMP, 1, page).dump_seq == 2
    assert {event.block_size for page in pages for batch in page.batches for event in batch.events} == {2}


def test_a_dump_of_two_pages_is_kept() -> None:
    log = KvEventLog("w", 0, capacity=1, max_reply_blocks=10)
    log.append([stored(None, *range(15))])
    first = ask(log, FULL_DUMP)
    log.append([stored(14, 15)])
    last = ask(log, FULL_DUMP, first.dump_seq, 1)
    assert (last.page, last.num_pages, last.dump_seq) == (1, 2, first.dump_seq)


def test_only_a_few_dumps_are_kept() -> None:
    log = KvEventLog("w", 0, capacity=1, max_reply_blocks=10)
    log.append([stored(None, *range(35))])
    first = ask(log, FULL_DUMP)
    for number in range(5):
        log.append([stored(None, 1000 + number)])
        ask(log, FULL_DUMP)
    again = ask(log, FULL_DUMP, first.dump_seq, 1)
    assert (again.page, again.dump_seq) == (0, log.next_seq)


def test_a_dump_equals_the_blocks_left_by_any_history() -> None:
    rng = random.Random(3)
    log = KvEventLog("w", 0, capacity=16, max_reply_blocks=7)
    parents: dict[int, int | None] = {}
    for _ in range(2000):
        event: KvEvent
        kind = rng.random()
        if kind < 0.6:
            parent = rng.choice([None, *parents])
            first = rng.randrange(10**9)
            blocks = range(first, first + rng.randrange(1, 12))
            event = stored(parent, *blocks)
            for block in blocks:
                parents[block], parent = parent, block
        elif kind < 0.995 and parents:
            gone = rng.sample(sorted(parents), min(len(parents), rng.randrange(1, 9)))
            event = BlockRemoved(tuple(gone))
            for block in gone:
                del parents[block]
        else:
            event = AllBlocksCleared()
            parents.clear()
        log.append([event])
        if rng.random() < 0.05:
            batches = log.dump()
            assert held(batches) == parents
            assert all(sum(len(e.block_hashes) for e in batch.events) <= 7 for batch in batches)
    assert repr(log) == f"KvEventLog(w, next_seq=2000, blocks={len(parents)})"


def test_a_malformed_request_is_refused() -> None:
    with pytest.raises(ProtocolError):
        KvEventLog("w", 0).serve_replay(b"?")
