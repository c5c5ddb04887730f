"""When the benchmark gives up on faults: only when none of them makes progress."""

from __future__ import annotations

import asyncio

import pytest
from tests.chaos.run import _until_stuck

from kvrelay.errors import FatalError

NEVER_S = 1000.0


async def test_faults_that_wait_for_each_other_are_all_waited_for():
    lock, healed = asyncio.Lock(), []

    async def fault(number: int) -> None:
        async with lock:
            await asyncio.sleep(0)
            healed.append(number)

    assert await _until_stuck([asyncio.ensure_future(fault(number)) for number in range(20)], NEVER_S) == set()
    assert len(healed) == 20


async def test_a_fault_that_makes_no_progress_is_given_up():
    hung, healed = asyncio.get_running_loop().create_future(), asyncio.get_running_loop().create_future()
    healed.set_result(None)
    assert await _until_stuck([hung, healed], 0.001) == {hung}


async def test_what_a_fault_raised_is_raised():
    async def fail() -> None:
        raise FatalError("no worker to spare")

    with pytest.raises(FatalError, match="no worker to spare"):
        await _until_stuck([asyncio.ensure_future(fail())], NEVER_S)


async def test_no_faults_need_no_wait():
    assert await _until_stuck([], NEVER_S) == set()
