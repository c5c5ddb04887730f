"""vLLM behind the engine contract, without vLLM: what it does wrong is an error of a request, never a token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.adapters import write_adapter
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

from kvrelay.config import EngineConfig, VllmConfig, WorkerConfig, WorkerRole
from kvrelay.core.adapters import AdapterEntry
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.contract import LoadsAdapters, require
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engines import vllm
from kvrelay.engines.hosted import host as host_module
from kvrelay.engines.hosted.backend import AnswerError
from kvrelay.engines.vllm import backend as backend_module
from kvrelay.engines.vllm.adapters import read_adapters
from kvrelay.engines.vllm.backend import VllmBackend
from kvrelay.errors import ConfigError, EngineDeadError, InvalidInputError, WorkerUnavailableError
from kvrelay.executors.mock import mock_generate
from kvrelay.marks.phases import Phase

CONFIG = EngineConfig(num_blocks=64, max_model_len=256, max_num_seqs=4, max_num_waiting=2)
PROMPT = list(range(20, 60))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
EXPECTED = mock_generate(PROMPT, 6, vocab_size=VOCAB_SIZE)


def _settings(**values: Any) -> WorkerConfig:
    return WorkerConfig(model_path=bundled_checkpoint_path(), engine=CONFIG, **values)


@asynccontextmanager
async def _engine(
    role: WorkerRole = WorkerRole.BOTH, config: VllmConfig | None = None, **script: Any
) -> AsyncIterator[tuple[Running, ScriptedVllm]]:
    library = ScriptedVllm(**script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "start_vllm", lambda arguments, settings, memory: scripted_start(library, arguments))
        patch.setattr(host_module, "HEALTH_INTERVAL_S", 0.01)
        running = Running(
            await asyncio.to_thread(vllm.from_settings, _settings(role=role, vllm=config or VllmConfig()), "worker")
        )
        running.host.start(running.on_step, running.dead.append)
        try:
            yield running, library
        finally:
            assert await asyncio.to_thread(running.host.close)
    assert library.is_shut_down


def _with_stats(number: int, output: Any) -> Any:
    """Preempted before its third token."""
    times = {"queued_ts": 1.0, "scheduled_ts": 3.0, "first_token_ts": 6.0}
    return SimpleNamespace(**{**vars(output), "metrics": SimpleNamespace(**times, num_preemptions=int(number >= 2))})


async def test_what_vllm_tells_of_its_phases_is_marked_once() -> None:
    async with _engine(edit=_with_stats) as (engine, _):
        await engine.add("a", listener=lambda request, status: None)
        await engine.end("a")
        begin, (preempted, before_s), (resumed, after_s) = engine.phases("a")[:3], *engine.phases("a")[3:]
        assert begin == [(Phase.TAKEN_IN, 1.0), (Phase.PREFILL_STARTED, 3.0), (Phase.SAMPLED, 6.0)]
        assert (preempted, resumed) == (Phase.PREEMPTED, Phase.RESUMED)
        assert before_s <= after_s
        assert engine.host.stats().num_preemptions == 1
        await engine.add("b")
        await engine.end("b")
        assert engine.phases("b") == [], "no one listens"
        assert engine.host.stats().num_preemptions == 2


async def test_the_drafts_of_an_answer_are_marked_with_its_end() -> None:
    """Three steps of three drafts accepted none, two one, and one three: 5 of 18."""

    def drafting(number: int, output: Any) -> Any:
        if output.finished:
            output.outputs[0].spec_decode_metrics = SimpleNamespace(num_draft_tokens=18, histogram=[3, 2, 0, 1])
        return _with_stats(0, output)

    async with _engine(edit=drafting) as (engine, _):
        await engine.add("a", listener=lambda request, status: None)
        await engine.end("a")
        assert [(mark.phase, mark.value) for mark in engine.marks["a"][-2:]] == [
            (Phase.DRAFTED, 18),
            (Phase.ACCEPTED, 5),
        ]


PARAMS = msgspec.json.encode({"do_remote_prefill": True, "remote_block_ids": [1]})


@pytest.mark.parametrize("arrives", [True, False])
async def test_kv_that_vllm_fetches_is_marked_or_its_loss_is(arrives: bool) -> None:
    def lost(number: int, output: Any) -> Any:
        is_fetch = getattr(library.begun[-1][1], "extra_args", None) is not None
        return RefusedByVllmError("no KV") if is_fetch and not arrives else _with_stats(0, output)

    async with _engine(edit=lost, role=WorkerRole.DECODE) as (engine, library):
        await engine.add("a", mode=PrefillMode.REMOTE, listener=lambda request, status: None)
        await engine.until(lambda: engine.remote)
        handoff_id = engine.remote[0].handoff_id
        assert await engine.host.call(lambda inner: require(inner.moves).fetch_handoff(handoff_id, PARAMS))
        if not arrives:
            await engine.until(lambda: engine.fetched)
            await engine.host.call(lambda inner: inner.compute_handoff_here(handoff_id))
        await engine.end("a")
        assert engine.tokens("a") == EXPECTED
        assert engine.fetched == [(handoff_id, arrives)]
        found = [mark.phase for mark in sorted(engine.marks["a"], key=lambda mark: mark.phase)]
        began = [Phase.PREFILL_QUEUED, Phase.ATTACHED] if arrives else [Phase.PREFILL_QUEUED, Phase.RECOMPUTED]
        entered = [Phase.SAMPLED, Phase.FETCHING] if arrives else [Phase.TAKEN_IN, Phase.SAMPLED]
        assert found == [*began, Phase.PREFILL_STARTED, *entered]


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


async def test_a_request_gets_its_own_adapter_and_blocks(tmp_path: Path) -> None:
    for name in ("chat", "sql"):
        write_adapter(tmp_path / name, 1)
    async with _engine(config=VllmConfig(lora_dir=str(tmp_path))) as (engine, library):
        chat, sql = engine.host.facts.adapters
        await engine.until(lambda: library.calls)
        assert library.loaded_adapters == [(chat, 1, str(tmp_path / "chat")), (sql, 2, str(tmp_path / "sql"))]
        hashes = set()
        for name, adapter in (("a", ""), ("b", sql), ("c", chat)):
            sampling = msgspec.structs.replace(GREEDY, adapter=adapter)
            request = Request(name, PROMPT, sampling)
            request.hash_blocks(1, 16)
            hashes.add(request.sequence_hashes[0])
            await engine.add(name, sampling)
            await engine.end(name)
        assert [None if each is None else each[0] for each in library.adapters] == [None, sql, chat]
        assert len(hashes) == 3
        with pytest.raises(WorkerUnavailableError, match="no adapter sql@0"):
            await engine.add("d", msgspec.structs.replace(GREEDY, adapter="sql@0"))
        assert len(library.begun) == 3, "never the model's own answer"


async def test_an_adapter_is_forgotten_after_its_last_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "ADAPTER_INTERVAL_S", 0.01)
    folder = write_adapter(tmp_path / "chat", 1)
    (read,) = read_adapters(str(tmp_path), bundled_checkpoint_path(), "model")
    entry = AdapterEntry("chat", "model", str(folder), read.digest)
    sampling = msgspec.structs.replace(GREEDY, adapter=entry.id)
    async with _engine(config=VllmConfig(max_loras=1)) as (engine, library):
        host = engine.host
        assert isinstance(host, LoadsAdapters)
        assert (host.facts.adapters, host.facts.max_adapters) == ((), 32)
        with pytest.raises(WorkerUnavailableError, match="no adapter chat@"):
            await engine.add("early", sampling)
        await host.load_adapter(entry)
        library.is_paused_between_tokens = True
        await engine.add("a", sampling)
        await engine.until(lambda: "a" in engine.outputs)
        host.retire_adapter(entry.id)
        # One that was sent before its frontend heard.
        await engine.add("b", sampling)
        await engine.until(lambda: "b" in engine.outputs)
        await host.load_adapter(entry)
        assert len(library.loaded_adapters) == 1, "it was never away"
        host.retire_adapter(entry.id)
        assert library.removed_adapters == []
        library.is_paused_between_tokens = False
        for name in ("a", "b"):
            await engine.end(name)
            assert engine.tokens(name) == EXPECTED
        await engine.until(lambda: library.removed_adapters)
        assert library.removed_adapters == [1]
        with pytest.raises(WorkerUnavailableError, match="no adapter chat@"):
            await engine.add("late", sampling)
        await host.load_adapter(entry)
        await engine.add("again", sampling)
        await engine.end("again")
        assert [request[:2] for request in library.adapters] == [(entry.id, 1), (entry.id, 1), (entry.id, 2)]


async def test_a_thousand_adapters_come_and_go_with_room_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load waits for those that no answer uses any more, and for no other."""
    monkeypatch.setattr(host_module, "ADAPTER_INTERVAL_S", 0.0)
    monkeypatch.setattr(host_module, "UNUSED_LOOKS", 1)
    write_adapter(tmp_path / "files", 1)
    (read,) = read_adapters(str(tmp_path), bundled_checkpoint_path(), "model")
    entries = [AdapterEntry(f"a{number}", "model", str(read.path), read.digest) for number in range(1000)]
    async with _engine(config=VllmConfig(max_loras=1, max_cpu_loras=2)) as (engine, library):
        host = engine.host
        assert isinstance(host, LoadsAdapters)
        for entry in entries:
            await host.load_adapter(entry)
            host.retire_adapter(entry.id)
        await engine.until(lambda: len(library.removed_adapters) == 1000)
        assert sorted(library.removed_adapters) == list(range(1, 1001))
        library.is_paused_between_tokens = True
        for name, entry in (("a", entries[0]), ("b", entries[1])):
            await host.load_adapter(entry)
            await engine.add(name, msgspec.structs.replace(GREEDY, adapter=entry.id))
        host.retire_adapter(entries[0].id)
        with pytest.raises(InvalidInputError, match="has 2 adapters, with those that still answer"):
            await host.load_adapter(entries[2])


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
        assert engine.host.stats().load.num_admitted == 0
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


async def test_logprobs_that_are_not_numbers_reach_no_client() -> None:
    def broken(number: int, output: Any) -> Any:
        for logprob in output.outputs[0].logprobs[0].values():
            logprob.logprob = math.nan if number == 2 else logprob.logprob
        return output

    async with _engine(edit=broken) as (engine, _):
        await engine.add("a", SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1))
        assert (await engine.end("a")).error == "the logprobs of vLLM are not numbers"
        assert engine.tokens("a") == EXPECTED[:2]


@pytest.mark.parametrize(("error", "is_final"), [(RefusedByVllmError("no such thing"), True), (FullVllmError(), False)])
async def test_what_vllm_refuses_says_whose_fault_it_is(error: Exception, is_final: bool) -> None:
    async with _engine(refusal=error) as (engine, _):
        await engine.add("a")
        assert (await engine.end("a")).is_final is is_final


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_prompts_are_scored_with_and_without_an_answer(max_tokens: int) -> None:
    """vLLM samples one token in any case."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    async with _engine() as (engine, library):
        await engine.add("a", sampling)
        assert (await engine.end("a")).finish_reason is FinishReason.LENGTH
        assert engine.tokens("a") == EXPECTED[:max_tokens]
        told = engine.outputs["a"][0].prompt_logprobs
        assert told is not None
        assert told[0] is None
        assert [each.chosen.token_id for each in told[1:] if each] == PROMPT[1:]
        assert [each.top for each in told[1:] if each] == [(each.chosen,) for each in told[1:] if each]
        assert library.begun[0][1].max_tokens == max(max_tokens, 1)
        assert [output.prompt_logprobs for output in engine.outputs["a"][1:]] == [None] * (len(engine.outputs["a"]) - 1)


async def test_prompt_logprobs_of_another_prompt_are_an_error() -> None:
    def cut(number: int, output: Any) -> Any:
        output.prompt_logprobs = output.prompt_logprobs and output.prompt_logprobs[:-1]
        return output

    async with _engine(edit=cut) as (engine, _):
        await engine.add("a", SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert "do not belong to the prompt" in ((await engine.end("a")).error or "")


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type":"object"}', {"json": {"type": "object"}}),
        (GrammarKind.REGEX, "a+", {"regex": "a+"}),
        (GrammarKind.LARK, 'start: <[7]> "a"', {"grammar": 'start: <[7]> "a"'}),
    ],
)
async def test_a_grammar_reaches_vllm(kind: GrammarKind, source: str, expected: dict[str, object]) -> None:
    async with _engine() as (engine, library):
        await engine.add("a", SamplingParams(max_tokens=2, grammar=Grammar(kind, source)))
        await engine.end("a")
        assert library.begun[0][1].structured == expected


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
