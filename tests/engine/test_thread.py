"""Whoever waits for the engine's thread hears of its end."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.contracts.waiting import eventually
from tests.patience import PATIENCE_S

from kvrelay.config import EngineConfig, MockConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.engine.step import StepOutput
from kvrelay.engine.thread import EngineThread
from kvrelay.errors import EngineDeadError
from kvrelay.executors.mock import MockExecutor


def make_core() -> EngineCore:
    config = EngineConfig(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64)
    executor = MockExecutor(config, MockConfig(speedup_ratio=0), vocab_size=100, max_model_len=256)
    return EngineCore(executor, config, MonotonicClock(), worker_id="w")


async def test_a_call_gives_what_the_order_gives_or_raises():
    thread = EngineThread(make_core())
    thread.start(lambda step: None, lambda error: None)
    assert await thread.call(lambda core: core.worker_id) == "w"
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda core: 1 // 0)
    thread.close()


async def test_calls_that_wait_when_the_thread_dies_fail():
    core = make_core()
    entered, leave = threading.Event(), threading.Event()
    dead: list[EngineDeadError] = []

    def break_down(work: object) -> object:
        entered.set()
        leave.wait(PATIENCE_S)
        raise RuntimeError("device lost")

    core.executor.execute = break_down
    thread = EngineThread(core)
    thread.post(lambda core: core.add_request(Request("r", [1, 2, 3], SamplingParams())))
    thread.start(lambda step: None, dead.append)
    await asyncio.to_thread(entered.wait, PATIENCE_S)

    # The first of them raises when the engine is found dead, the others are never run.
    def touch(core: EngineCore) -> None:
        core.add_request(Request("s", [1], SamplingParams()))

    calls = [asyncio.ensure_future(thread.call(touch)) for _ in range(3)]
    await asyncio.sleep(0)
    leave.set()
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 3
    # Callers hear of the end before its listener does.
    await eventually(lambda: len(dead) > 0)
    assert thread.close(PATIENCE_S)
    assert len(dead) == 1
    with pytest.raises(EngineDeadError):
        await thread.call(lambda core: core.worker_id)


async def test_a_call_behind_the_end_fails():
    thread = EngineThread(make_core())
    thread.start(lambda step: None, lambda error: None)
    thread.close()
    with pytest.raises(EngineDeadError):
        await thread.call(lambda core: core.worker_id)


@pytest.mark.parametrize("samples_load", [True, False])
async def test_a_step_that_produced_nothing_is_not_told(samples_load: bool):
    """An answer of 30 tokens that is told 15 at a time, after its first; nothing else changes but the load."""
    thread = EngineThread(make_core())
    steps: list[StepOutput] = []
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=31, ignore_eos=True), report_interval=15)
    thread.post(lambda core: core.add_request(request))
    thread.start(steps.append, lambda error: None, samples_load=samples_load)
    await eventually(lambda: any(output.finish_reason for step in steps for output in step.outputs))
    assert await thread.call(lambda core: core.stats().tokens.num_steps) == 31
    assert [len(output.token_ids) for step in steps for output in step.outputs] == [1, 15, 15]
    assert not any(step.is_empty for step in steps)
    assert any(step.load is not None for step in steps) == samples_load
    thread.close()
