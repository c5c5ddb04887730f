"""Real vLLM keeps the engine contract (``make test-vllm``)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import resource_tracker
from unittest import mock

import pytest
import torch
from tests.contracts import test_engine as contract
from tests.lazily import transformers

from kvrelay.config import RunnerConfig, VllmConfig, WorkerConfig
from kvrelay.core.sampling import SamplingParams
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.request import Request
from kvrelay.engines import vllm

pytestmark = [pytest.mark.vllm, pytest.mark.system, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]


COMPILE_TIMEOUT_S = 400
"""vLLM compiles the ranks of logprobs when a request first wants some."""


@pytest.fixture
async def engine(vllm_files: None) -> AsyncIterator[contract.Running]:
    settings = WorkerConfig(
        model_path=bundled_checkpoint_path(),
        engine=replace(contract.CONFIG, kv_cache_memory="64MiB"),
        runner=RunnerConfig(dtype="float32", enforce_eager=True),
        vllm=VllmConfig(engine_args='{"block_size": 32}'),
    )
    # It changes the environment, with which others would no longer be forked (``tests/nursery``).
    with mock.patch.dict(os.environ):
        # vLLM starts where no event loop runs, as in a worker.
        with ThreadPoolExecutor(1) as thread:
            running = contract.Running(thread.submit(vllm.from_settings, settings, "vllm").result())
        running.start()
        try:
            yield running
        finally:
            assert await asyncio.to_thread(running.host.close)
            # The helper of Python's multiprocessing otherwise lives as long as the tests' own process.
            resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


async def test_the_engine_contract(engine: contract.Running) -> None:
    """One engine for all parts, because vLLM takes long to start. Each part finds it idle, with an empty cache."""
    await contract.test_requests_in_tokens_events_and_load_out(engine)
    await _fresh(engine)
    await contract.test_facts_do_not_change_and_fit_the_memory(engine)
    await _fresh(engine)
    await contract.test_callbacks_run_between_steps_and_their_failures_reach_the_caller(engine)
    for prompt, error in contract.REFUSED:
        await _fresh(engine)
        await contract.test_what_is_refused_changes_nothing(engine, prompt, error)
    await _fresh(engine)
    await contract.test_room_is_known_without_waiting_for_a_step(engine)
    await contract.test_an_abort_frees_everything(engine)
    await _fresh(engine)
    await contract.test_a_cached_prefix_counts_until_the_cache_is_cleared(engine)
    await _prompts_are_scored(engine)
    await contract.test_after_close_callers_hear_that_it_has_ended(engine)


async def _prompts_are_scored(engine: contract.Running) -> None:
    """As transformers does, in float32."""
    sampling = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
    request = Request("scored", contract.PROMPT, sampling)
    await engine.host.call(lambda inner: inner.add_request(request))
    async with asyncio.timeout(COMPILE_TIMEOUT_S):
        while "scored" not in engine.outputs:
            await asyncio.sleep(0.05)
    assert await engine.answer("scored") == []
    told = engine.outputs["scored"][0].prompt_logprobs
    assert told is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(bundled_checkpoint_path(), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([contract.PROMPT])).logits[0].log_softmax(-1)
    expected = [logits[position, token].item() for position, token in enumerate(contract.PROMPT[1:])]
    assert [each.chosen.logprob for each in told[1:] if each] == pytest.approx(expected, abs=1e-3)


async def _fresh(engine: contract.Running) -> None:
    await engine.idle()
    await engine.host.call(lambda inner: inner.clear_cache())
    # A load is told once it changes, so the last one still holds.
    engine.outputs.clear()
    engine.events.clear()
