"""The scheduled batch of a step: decodes first, chunks by urgency under the budget, exclusive prefills by turns."""

from __future__ import annotations

from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.batch import Batch
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.scheduled_batch import BatchPlanner, ScheduledBatch


def request(
    name: str, length: int, *, mode: PrefillMode = PrefillMode.LOCAL, priority: int = 0, tenant: str = ""
) -> Request:
    return Request(name, range(length), SamplingParams(), mode=mode, priority=priority, tenant=tenant)


def batch_of(decoding: list[Request], prefilling: list[Request]) -> Batch:
    batch = Batch(8)
    for arrival, one in enumerate([*decoding, *prefilling]):
        one.arrival = arrival
        batch.enter(one, decoding=one in decoding)
    return batch


def shown(rows: ScheduledBatch) -> tuple[list[str], list[tuple[str, int]]]:
    return [one.request_id for one in rows.decodes], [(one.request_id, count) for one, count in rows.chunks]


def exclusive(batch: Batch, max_num_tokens: int) -> BatchPlanner:
    planner = BatchPlanner(batch, max_num_tokens)
    planner.exclusive_prefill = True
    return planner


def test_decodes_come_first_and_chunks_share_what_is_left() -> None:
    first, urgent, last = request("first", 6), request("urgent", 4, priority=-1), request("last", 9)
    first.num_computed_tokens = 1
    batch = batch_of([request("d", 3)], [first, urgent, last])
    rows = BatchPlanner(batch, 11).plan()
    assert shown(rows) == (["d"], [("urgent", 4), ("first", 5), ("last", 1)])
    assert (rows.num_prefill_tokens, rows.num_tokens) == (10, 11)


def test_keys_share_the_chunks_whatever_their_priorities() -> None:
    greedy = [request(f"greedy-{number}", 40, priority=-9, tenant="a") for number in range(3)]
    short, long = request("short", 4, tenant="b"), request("long", 40, tenant="c")
    rows = BatchPlanner(batch_of([], [*greedy, short, long]), 28).plan()
    # A quarter is for the oldest; of 21, "b" needs 4 of its 7, and the others share the rest.
    assert dict(rows.chunks) == {short: 4, long: 8, greedy[0]: 7 + 9}


def test_keys_take_exclusive_prefills_by_age() -> None:
    low, high = (
        request(name, 20, mode=PrefillMode.HANDOFF, priority=priority, tenant="a")
        for name, priority in (("low", 0), ("high", -9))
    )
    other = request("other", 20, mode=PrefillMode.HANDOFF, tenant="b")
    planner = exclusive(batch_of([], [low, other, high]), 8)
    assert shown(planner.plan()) == ([], [("other", 8)]), "the high one of the other key is younger"


def test_without_budget_there_is_no_chunk() -> None:
    batch = batch_of([request("a", 3), request("b", 3)], [request("waits", 5)])
    assert shown(BatchPlanner(batch, 2).plan()) == (["a", "b"], [])


def test_nothing_to_do() -> None:
    assert exclusive(batch_of([], []), 8).plan().num_tokens == 0


def test_exclusive_prefills_and_others_take_turns() -> None:
    handoffs = [request(name, 20, mode=PrefillMode.HANDOFF) for name in ("one", "two")]
    planner = exclusive(batch_of([request("d", 3)], [request("local", 2), *handoffs]), 8)
    alone, others = ([], [("one", 8)]), (["d"], [("local", 2)])
    assert [shown(planner.plan()) for _ in range(4)] == [alone, others, alone, others]


def test_an_exclusive_prefill_without_others_takes_every_turn() -> None:
    planner = exclusive(batch_of([], [request("one", 20, mode=PrefillMode.HANDOFF)]), 8)
    assert [shown(planner.plan()) for _ in range(2)] == [([], [("one", 8)])] * 2


def test_a_switch_forgets_whose_turn_it_was() -> None:
    planner = exclusive(batch_of([request("d", 3)], [request("one", 20, mode=PrefillMode.HANDOFF)]), 8)
    assert shown(planner.plan()) == ([], [("one", 8)])
    planner.exclusive_prefill = False
    assert shown(planner.plan()) == (["d"], [("one", 7)])
    planner.exclusive_prefill = True
    assert shown(planner.plan()) == ([], [("one", 8)])
