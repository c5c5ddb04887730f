"""Ending: how long the engine's thread is waited for."""

from __future__ import annotations

import pytest

from kvrelay.errors import EngineDeadError, EngineHungError, FatalError
from kvrelay.worker.shutdown import FAILED_JOIN_S, HUNG_JOIN_S, Ending


async def test_a_worker_that_drains_waits_for_its_engine() -> None:
    ending = Ending()
    ending.begin()
    await ending.begun()
    assert ending.engine_join_s is None


@pytest.mark.parametrize(
    ("first", "join_s"), [(EngineHungError("hangs"), HUNG_JOIN_S), (EngineDeadError("dead"), FAILED_JOIN_S)]
)
async def test_the_first_failure_decides_how_long(first: FatalError, join_s: float) -> None:
    ending = Ending()
    ending.fail(first)
    ending.transfer_failed(RuntimeError("later"))
    await ending.begun()
    assert ending.failure is first
    assert ending.engine_join_s == join_s
