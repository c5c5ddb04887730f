from __future__ import annotations

from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.batch import Batch
from kvrelay.engine.request import Request


def request(name: str, arrival: int = 0, priority: int = 0) -> Request:
    made = Request(name, [1, 2, 3], SamplingParams(), priority=priority)
    made.block_ids = [7]
    made.arrival = arrival
    return made


def test_a_slot_that_is_given_on_does_not_inherit_blocks() -> None:
    batch = Batch(1)
    first, second = request("first"), request("second")
    batch.enter(first, decoding=True)
    batch.build(batch.decode_rows(), [])
    batch.add_block(first, 8)
    batch.leave(first)
    batch.enter(second, decoding=True)
    work = batch.build(batch.decode_rows(), [])
    assert work.released_slots == (0,)
    assert [sequence.request_id for sequence in work.new_seqs] == ["second"]
    assert len(work.block_ids) == 0


def test_who_leaves_before_the_executor_heard_of_it_is_not_mentioned() -> None:
    batch = Batch(2)
    first, second = request("first"), request("second")
    batch.enter(first, decoding=False)
    batch.enter(second, decoding=False)
    batch.leave(first)
    work = batch.build([], [(second, 3)])
    assert work.released_slots == ()
    assert [sequence.request_id for sequence in work.new_seqs] == ["second"]
    assert (work.slots.tolist(), work.num_tokens.tolist(), work.samples.tolist()) == ([1], [3], [True])


def test_blocks_of_a_sequence_on_its_way_in_travel_with_it() -> None:
    batch = Batch(1)
    first = request("first")
    batch.enter(first, decoding=True)
    batch.add_block(first, 8)
    work = batch.build(batch.decode_rows(), [])
    assert work.new_seqs[0].block_ids == (7, 8)
    assert len(work.block_ids) == 0


def test_a_step_with_a_chunk_leaves_the_rows_of_other_steps_alone() -> None:
    batch = Batch(2)
    first, second = request("first"), request("second")
    batch.enter(first, decoding=True)
    batch.enter(second, decoding=False)
    work = [batch.build(batch.decode_rows(), []), batch.build(batch.decode_rows(), [(second, 2)])]
    batch.start_decoding(second)
    work.append(batch.build(batch.decode_rows(), []))
    assert [step.num_tokens.tolist() for step in work] == [[1], [1, 2], [1, 1]]
    assert [step.samples.tolist() for step in work] == [[True], [True, False], [True, True]]
