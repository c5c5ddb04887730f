"""Shutdown: how long the engine's thread is waited for."""

from __future__ import annotations

import pytest

from kvrelay.errors import EngineDeadError, EngineHungError, FatalError
from kvrelay.worker.shutdown import FAILED_JOIN_S, HUNG_JOIN_S, Shutdown


async def test_a_worker_that_drains_waits_for_its_engine() -> None:
    shutdown = Shutdown()
    shutdown.begin()
    await shutdown.begun()
    assert shutdown.engine_join_s is None


@pytest.mark.parametrize(
    ("first", "join_s"), [(EngineHungError("hangs"), HUNG_JOIN_S), (EngineDeadError("dead"), FAILED_JOIN_S)]
)
async def test_the_first_failure_decides_how_long(first: FatalError, join_s: float) -> None:
    shutdown = Shutdown()
    shutdown.fail(first)
    shutdown.transfer_failed(RuntimeError("later"))
    await shutdown.begun()
    assert shutdown.failure is first
    assert shutdown.engine_join_s == join_s
