"""DecodeAllocator: the next block of a decode, and who gives way when there is none."""

from __future__ import annotations

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RequestStatus
from kvrelay.engine.allocation import DecodeAllocator
from kvrelay.engine.batch import Batch
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.request import PrefillMode, Request

BLOCK_SIZE = 4


class Engine:
    """``num_requests`` decodes, in order of arrival; each has filled its only block of the pool and needs another."""

    def __init__(self, num_blocks: int, num_requests: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.batch = Batch(num_requests)
        self.waiting: list[Request] = []
        self.decode_allocator = DecodeAllocator(self.pool, self.batch, ManualClock(), self.waiting.append)
        self.requests = [self._running(number) for number in range(num_requests)]
        self.decode_allocator.needing = list(reversed(self.requests))

    def _running(self, number: int) -> Request:
        request = Request(str(number), list(range(BLOCK_SIZE + 1)), SamplingParams())
        request.arrival = number
        block_ids = self.pool.allocate(1)
        assert block_ids is not None
        request.block_ids = block_ids
        request.move(RequestStatus.RUNNING, 0.0)
        self.batch.enter(request, decoding=True)
        return request

    @property
    def num_blocks(self) -> list[int]:
        return [len(request.block_ids) for request in self.requests]


def test_every_decode_that_needs_a_block_gets_one() -> None:
    engine = Engine(num_blocks=4, num_requests=2)
    assert not engine.decode_allocator.grow()
    assert engine.num_blocks == [2, 2]
    assert not engine.decode_allocator.grow(), "none needs another"
    assert engine.num_blocks == [2, 2]


def test_the_latest_gives_its_blocks_to_the_others() -> None:
    engine = Engine(num_blocks=4, num_requests=3)
    assert engine.decode_allocator.grow()
    assert engine.num_blocks == [2, 2, 0]
    last = engine.requests[2]
    assert engine.waiting == [last]
    assert (last.status, last.slot, engine.decode_allocator.num_preemptions) == (RequestStatus.PREEMPTED, -1, 1)


def test_a_hand_off_keeps_its_blocks() -> None:
    """A transfer may read them."""
    engine = Engine(num_blocks=3, num_requests=3)
    engine.requests[2].mode = PrefillMode.HANDOFF
    engine.decode_allocator.needing = [engine.requests[0]]
    assert engine.decode_allocator.grow()
    assert engine.num_blocks == [2, 0, 1]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_who_has_left_meanwhile_gets_nothing(num_requests: int) -> None:
    engine = Engine(num_blocks=4, num_requests=num_requests)
    engine.batch.leave(engine.requests[0])
    assert not engine.decode_allocator.grow()
    assert engine.num_blocks == [1, 2][:num_requests]
