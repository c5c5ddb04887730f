"""vLLM behind the engine contract, without vLLM: what it does wrong is an error of a request, never a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.openai.test_host import Running
from tests.engines.vllm.scripted import (
    TERMS,
    VOCAB_SIZE,
    DeadVllmError,
    FullVllmError,
    RefusedByVllmError,
    ScriptedVllm,
    scripted_start,
)

from kvrelay.config import EngineConfig, GroupConfig, WorkerConfig
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.request import Request
from kvrelay.engines import vllm
from kvrelay.engines.hosted import host as host_module
from kvrelay.engines.hosted.backend import AnswerError
from kvrelay.engines.vllm import backend as backend_module
from kvrelay.engines.vllm.backend import VllmBackend
from kvrelay.errors import ConfigError, EngineDeadError, InvalidInputError
from kvrelay.executors.mock import mock_generate

CONFIG = EngineConfig(num_blocks=64, max_model_len=256, max_num_seqs=4, max_num_waiting=2)
PROMPT = list(range(20, 60))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
EXPECTED = mock_generate(PROMPT, 6, vocab_size=VOCAB_SIZE)


def _settings(**values: Any) -> WorkerConfig:
    return WorkerConfig(model_path=bundled_checkpoint_path(), engine=CONFIG, **values)


@asynccontextmanager
async def _engine(**script: Any) -> AsyncIterator[tuple[Running, ScriptedVllm]]:
    library = ScriptedVllm(**script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "start_vllm", lambda arguments, settings, memory: scripted_start(library, arguments))
        patch.setattr(host_module, "HEALTH_INTERVAL_S", 0.01)
        running = Running(await asyncio.to_thread(vllm.from_settings, _settings(), "worker"))
        running.host.start(running.on_step, running.dead.append)
        try:
            yield running, library
        finally:
            assert await asyncio.to_thread(running.host.close)
    assert library.is_shut_down


async def test_tokens_and_logprobs_come_from_vllm() -> None:
    async with _engine() as (engine, library):
        await engine.add("a", SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1), priority=-2)
        last = await engine.end("a")
        assert engine.tokens("a") == EXPECTED
        assert last.finish_reason is FinishReason.LENGTH
        logprobs = engine.outputs["a"][0].logprobs
        assert logprobs is not None
        assert (logprobs[0].chosen.token_id, logprobs[0].chosen.rank) == (EXPECTED[0], 1)
        assert [each.token_id for each in logprobs[0].top] == [EXPECTED[0]]
        prompt, _, request_id, priority = library.begun[0]
        assert prompt == {"prompt_token_ids": PROMPT}
        assert (request_id.partition("/")[0], priority) == ("a", -2)
        assert engine.outputs["a"][0].num_cached_tokens == 16


async def test_vllms_processes_are_told_that_their_start_is_over() -> None:
    async with _engine() as (engine, library):
        await engine.until(lambda: library.calls)
        assert library.calls == [("kvrelay_started", ())]


async def test_a_request_from_another_worker_goes_on_at_its_token() -> None:
    async with _engine() as (engine, library):
        seeded = SamplingParams(max_tokens=6, seed=7, ignore_eos=True, min_tokens=5)
        await engine.add("a", seeded, output_token_ids=EXPECTED[:4])
        await engine.end("a")
        assert engine.tokens("a") == EXPECTED[4:]
        assert engine.outputs["a"][0].position == 4
        prompt, sampling, _, _ = library.begun[0]
        assert prompt["prompt_token_ids"] == [*PROMPT, *EXPECTED[:4]]
        assert (sampling.max_tokens, sampling.min_tokens) == (2, 1)
        assert sampling.seed != 7, "vLLM would draw the numbers of the first tokens again"


async def test_a_stop_token_ends_the_answer() -> None:
    async with _engine() as (engine, library):
        stopping = SamplingParams(max_tokens=100, temperature=0.0, stop_token_ids=(EXPECTED[2],), ignore_eos=True)
        await engine.add("a", stopping)
        last = await engine.end("a")
        assert (last.finish_reason, last.stop_token) == (FinishReason.STOP, EXPECTED[2])
        assert engine.tokens("a") == EXPECTED[:3]
        assert not library.aborted


async def test_an_abort_ends_the_request_in_vllm() -> None:
    async with _engine(is_paused_between_tokens=True) as (engine, library):
        await engine.add("a")
        await engine.until(lambda: engine.outputs.get("a"))
        await engine.host.call(lambda inner: inner.abort("a"))
        await engine.until(lambda: library.aborted)
        assert library.aborted[0].startswith("a/")
        assert engine.host.stats().num_running == 0
        library.is_paused_between_tokens = False
        await engine.add("a")
        await engine.end("a")
        assert library.begun[1][2] != library.begun[0][2], "vLLM may still have the first request of that id"


WRONG = {
    "cut": lambda number, output: output if number < 2 else None,
    "an exception": lambda number, output: output if number < 2 else RuntimeError("out of memory"),
    "aborted by vLLM": lambda number, output: _ended(output, "abort") if number == 2 else output,
    "another vocabulary": lambda number, output: _with_token(output, 5000) if number == 2 else output,
    "two completions": lambda number, output: SimpleNamespace(outputs=output.outputs * 2) if number == 2 else output,
}


def _ended(output: Any, reason: str) -> Any:
    output.finished, output.outputs[0].finish_reason = True, reason
    output.outputs[0].token_ids = []
    return output


def _with_token(output: Any, token: int) -> Any:
    output.outputs[0].token_ids = [token]
    return output


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_answer_that_goes_wrong_is_another_workers_to_finish(wrong: str) -> None:
    async with _engine(edit=WRONG[wrong]) as (engine, _):
        await engine.add("a")
        last = await engine.end("a")
        assert (last.finish_reason, last.is_final, last.position) == (FinishReason.ERROR, False, 2)
        assert engine.tokens("a") == EXPECTED[:2]


@pytest.mark.parametrize(("error", "is_final"), [(RefusedByVllmError("no such thing"), True), (FullVllmError(), False)])
async def test_what_vllm_refuses_says_whose_fault_it_is(error: Exception, is_final: bool) -> None:
    async with _engine(refusal=error) as (engine, _):
        await engine.add("a")
        assert (await engine.end("a")).is_final is is_final


async def test_what_vllm_cannot_do_is_refused_by_name() -> None:
    async with _engine() as (engine, _):
        lark = Grammar(GrammarKind.LARK, 'start: "a"')
        for param, sampling in {
            "prompt_logprobs": SamplingParams(max_tokens=2, prompt_logprobs=1),
            "grammar": SamplingParams(max_tokens=2, grammar=lark),
        }.items():
            with pytest.raises(InvalidInputError) as caught:
                await engine.add("a", sampling)
            assert caught.value.param == param


async def test_a_schema_reaches_vllm() -> None:
    async with _engine() as (engine, library):
        schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
        await engine.add("a", SamplingParams(max_tokens=2, grammar=schema))
        await engine.end("a")
        assert library.begun[0][1].structured == {"json": {"type": "object"}}


async def test_an_engine_process_that_ends_ends_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with _engine(is_paused_between_tokens=True) as (engine, library):
        await engine.add("a")
        await engine.until(lambda: engine.outputs.get("a"))
        library.health = DeadVllmError("EngineCore encountered an issue")
        await engine.until(lambda: engine.dead)
        last = await engine.end("a")
        assert (last.finish_reason, last.is_final) == (FinishReason.ERROR, False)
        with pytest.raises(EngineDeadError):
            await engine.add("b")
    assert not any(record.exc_info for record in caplog.records), "a line for each request, not a traceback"


async def test_an_engine_process_that_does_not_answer_counts_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(backend_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    library = ScriptedVllm()
    backend = VllmBackend(library, TERMS, hang_timeout_s=10.0)
    assert await backend.failure() is None
    await asyncio.sleep(0)
    now_s = 60.0
    assert await backend.failure() is None, "it has answered the question before"
    library.is_silent = True
    await asyncio.sleep(0)
    assert await backend.failure() is None
    now_s = 69.0
    assert await backend.failure() is None
    now_s = 71.0
    assert "has not answered for 11 s" in (await backend.failure() or "")
    await backend.close()


def test_blocks_must_fit_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ScriptedVllm()
    monkeypatch.setattr(vllm, "start_vllm", lambda arguments, settings, memory: scripted_start(library, arguments))
    settings = WorkerConfig(model_path=bundled_checkpoint_path(), engine=EngineConfig(block_size=24))
    with pytest.raises(ConfigError, match="no multiple of --block-size 24"):
        vllm.from_settings(settings, "worker")
    assert library.is_shut_down


def test_data_parallel_ranks_are_workers() -> None:
    with pytest.raises(ConfigError, match="start more workers"):
        vllm.from_settings(_settings(group=GroupConfig(dp=2)), "worker")


async def test_a_prefill_is_kept_for_the_vllm_that_pulls_it() -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [3, 4], "remote_host": "h"}

    def with_params(number: int, output: Any) -> Any:
        output.kv_transfer_params = params if output.finished else None
        return output

    library = ScriptedVllm(edit=with_params)
    backend = VllmBackend(library, TERMS, hang_timeout_s=0)
    stopping = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(EXPECTED[0],), ignore_eos=True)
    request = Request("a", PROMPT, stopping)
    request.stop_ids = frozenset(stopping.stop_token_ids)
    prefilled = [item async for item in backend.prefill(request)]
    assert len(prefilled) == 1
    assert prefilled[0].piece is not None
    assert prefilled[0].piece.token_ids == (EXPECTED[0],)
    asked = library.begun[0][1]
    assert (asked.max_tokens, asked.stop_token_ids) == (1, []), "vLLM keeps the KV only of answers that end by length"
    assert asked.extra_args["kv_transfer_params"]["do_remote_decode"] is True
    async for _ in backend.stream(request, 3, prefilled[0].kv_transfer_params):
        pass
    assert library.begun[1][1].extra_args == {"kv_transfer_params": params}
    assert prefilled[0].kv_transfer_params is not None
    await backend.discard(prefilled[0].kv_transfer_params)
    assert (library.rejected, len(library.begun)) == ([params], 2), "it is freed without a step"
    for wrong in (b"[]", b"{}", b"{", b'{"do_remote_prefill": true, "remote_block_ids": []}'):
        with pytest.raises(AnswerError):
            await anext(backend.stream(request, 3, wrong))
        with pytest.raises(AnswerError):
            await backend.discard(wrong)
    await backend.close()


async def test_a_prefill_without_kv_is_no_prefill() -> None:
    backend = VllmBackend(ScriptedVllm(), TERMS, hang_timeout_s=0)
    with pytest.raises(AnswerError, match="keeps no KV"):
        await anext(backend.prefill(Request("a", PROMPT, GREEDY)))
    await backend.close()
