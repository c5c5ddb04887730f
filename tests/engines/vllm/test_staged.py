"""kvrelay's connector in vLLM, without vLLM: KV passes through the staging pool, and no block of it is used twice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.contracts import test_engine as contract
from tests.engines.openai.test_host import Running
from tests.engines.vllm.scripted import BLOCK_SIZE, VOCAB_SIZE
from tests.engines.vllm.staged import STAGED_BLOCK_BYTES, StagedVllm, staged_start
from tests.worker.cluster import Client, Cluster, Node, cluster, prompt

from kvrelay.config import EngineConfig, VllmConfig, WorkerConfig, WorkerRole
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.contract import Engine, EngineHost, require
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import HandoffChunk, StepOutput
from kvrelay.engines import vllm
from kvrelay.engines.connector.terms import CopyKind, Report, encode_report
from kvrelay.engines.hosted.engine import HostedEngine
from kvrelay.engines.hosted.host import BackendHost
from kvrelay.engines.hosted.staging import KvReports, StagingBlocks
from kvrelay.engines.vllm import backend
from kvrelay.errors import ConfigError
from kvrelay.executors.mock import mock_generate
from kvrelay.marks.phases import Phase

PROMPT = list(range(20, 60))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
EXPECTED = mock_generate(PROMPT, 6, vocab_size=VOCAB_SIZE)


def _with_times(number: int, output: Any) -> Any:
    times = {"queued_ts": 1.0, "scheduled_ts": 3.0, "first_token_ts": 6.0, "num_preemptions": 0}
    return SimpleNamespace(**{**vars(output), "metrics": SimpleNamespace(**times)})


def _settings(num_staging_blocks: int = 64, **engine: int) -> WorkerConfig:
    return WorkerConfig(
        model_path=bundled_checkpoint_path(),
        engine=EngineConfig(**{"max_model_len": 256, "max_num_seqs": 16, **engine}),
        role=WorkerRole.DECODE,
        vllm=VllmConfig(vllm_connector="kvrelay", vllm_staging=str(num_staging_blocks * STAGED_BLOCK_BYTES)),
    )


def _host(library: StagedVllm, settings: WorkerConfig, worker_id: str) -> BackendHost:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "start_vllm", partial(staged_start, library))
        return vllm.from_settings(settings, worker_id)


def _pool(engine: Engine) -> StagingBlocks:
    assert isinstance(engine, HostedEngine)
    assert engine.lends is not None
    return engine.lends.pool


class _Engine(Running):
    """A host that runs, with what its steps say of hand-offs."""

    def __init__(self, host: EngineHost) -> None:
        super().__init__(host)
        self.steps: list[StepOutput] = []

    def on_step(self, step: StepOutput) -> None:
        super().on_step(step)
        self.steps.append(step)

    @property
    def lent(self) -> list[tuple[int, ...]]:
        return [remote.block_ids for step in self.steps for remote in step.remote_prefills]

    @property
    def chunks(self) -> list[HandoffChunk]:
        return [chunk for step in self.steps for chunk in step.handoff_chunks]

    async def num_free(self) -> int:
        def free(engine: Engine) -> int:
            engine.check_integrity()
            return _pool(engine).num_free

        return await self.host.call(free)


@asynccontextmanager
async def _engine(num_staging_blocks: int = 64, **script: Any) -> AsyncIterator[tuple[_Engine, StagedVllm]]:
    library = StagedVllm(**script)
    running = _Engine(await asyncio.to_thread(_host, library, _settings(num_staging_blocks), "worker"))
    running.host.start(running.on_step, running.dead.append)
    try:
        yield running, library
    finally:
        library.holds, library.confirms = False, True
        assert await asyncio.to_thread(running.host.close)


# -- the engine -------------------------------------------------------------------------------------------------------


async def test_blocks_of_a_cancelled_prefill_are_used_again_only_when_vllm_is_at_rest() -> None:
    async with _engine(holds=True, confirms=False) as (engine, library):
        await engine.add("a", mode=PrefillMode.HANDOFF)
        await engine.until(lambda: library.paged is not None and engine.host.stats().load.num_admitted)
        assert await engine.num_free() == 61
        await engine.host.call(lambda inner: inner.abort("a"))
        await engine.host.call(lambda inner: inner.sending_finished("a"))
        assert await engine.num_free() == 61, "a step of vLLM may still save to them"
        library.confirms = True
        await engine.until(lambda: "kvrelay_at_rest" in [method for method, _ in library.calls])
        while await engine.num_free() < 64:
            await asyncio.sleep(0.002)


async def test_a_prefill_that_vllm_gives_up_fails_at_once() -> None:
    """Its KV is never saved, e.g. if its grammar does not compile: nothing waits for it."""

    async with _engine(gives_up=True) as (engine, library):
        await engine.add("a", mode=PrefillMode.HANDOFF)
        assert (await engine.end("a")).finish_reason is FinishReason.ERROR
        assert "kvrelay_at_rest" in [method for method, _ in library.calls], "before its blocks are used again"
        await engine.host.call(lambda inner: inner.sending_finished("a"))
        while await engine.num_free() < 64:
            await asyncio.sleep(0.002)


async def test_without_a_confirmation_blocks_are_never_used_again(caplog: pytest.LogCaptureFixture) -> None:
    async with _engine(holds=True) as (engine, library):

        async def silent(*_: object) -> object:
            raise TimeoutError("no answer")

        await engine.add("a", mode=PrefillMode.HANDOFF)
        await engine.num_free()
        library.collective_rpc = silent  # type: ignore[method-assign]
        await engine.host.call(lambda inner: inner.abort("a"))
        await engine.host.call(lambda inner: inner.sending_finished("a"))
        await engine.until(lambda: "are not used again" in caplog.text)
        assert await engine.num_free() == 61


async def test_a_vllm_that_hangs_ends_the_worker_though_it_confirms_no_end() -> None:
    """One whose rank never reports: a request is under way, and another that is cancelled waits for its word."""
    async with _engine(holds=True, confirms=False) as (engine, library):
        for name in ("a", "b"):
            await engine.add(name, mode=PrefillMode.HANDOFF)
        await engine.num_free()
        await engine.host.call(lambda inner: inner.abort("a"))
        library.health = RuntimeError("it has hung")
        await engine.until(lambda: engine.dead)
        assert library.is_shut_down


async def test_the_word_of_a_vllm_that_hangs_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "CONFIRM_TIMEOUT_S", 0.05)
    async with _engine(holds=True, confirms=False) as (engine, _):
        await engine.add("a", mode=PrefillMode.HANDOFF)
        await engine.num_free()
        await engine.host.call(lambda inner: inner.abort("a"))
        await engine.until(lambda: "are not used again" in caplog.text)


async def test_a_request_waits_for_staging_blocks_and_gets_them_in_order() -> None:
    async with _engine(num_staging_blocks=16) as (engine, _):
        long = list(range(20, 20 + 150))  # ten blocks
        for name in ("a", "b"):
            request = Request(name, long, GREEDY, mode=PrefillMode.REMOTE)
            await engine.host.call(lambda inner, request=request: inner.add_request(request))
        await engine.until(lambda: engine.lent)
        assert [len(blocks) for blocks in engine.lent] == [10]
        handoff_id = next(remote.handoff_id for step in engine.steps for remote in step.remote_prefills)
        await engine.host.call(lambda inner: inner.compute_handoff_here(handoff_id))
        await engine.host.call(lambda inner: require(inner.lends).end_loan(handoff_id, 1))
        await engine.until(lambda: len(engine.lent) == 2)
        await engine.host.call(lambda inner: inner.abort("b"))
        await engine.end("a")


async def test_when_prefill_workers_are_gone_waiting_requests_are_computed_here() -> None:
    async with _engine(num_staging_blocks=16) as (engine, _):
        for name in ("a", "b"):
            request = Request(name, list(range(20, 170)), GREEDY, mode=PrefillMode.REMOTE)
            await engine.host.call(lambda inner, request=request: inner.add_request(request))
        await engine.host.call(lambda inner: inner.keep_prefills_here())
        assert len((await engine.end("b")).token_ids) == 1
        assert len(engine.tokens("b")) == 6
        assert "a" not in engine.outputs, "its hand-off decides"


SAMPLED_AGAIN: dict[str, dict[str, Any]] = {
    "": {},
    "grammar": {"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'), "ignore_eos": False},
    "penalty": {"presence_penalty": 1.0},
    "seed": {"temperature": 1.0, "seed": 3},
}


@pytest.mark.parametrize("why", SAMPLED_AGAIN)
async def test_a_first_token_that_vllm_must_remember_is_sampled_again(why: str) -> None:
    """A grammar begins at vLLM's first own token, and penalties count its own tokens only."""
    sampling = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **SAMPLED_AGAIN[why]})
    async with _engine() as (engine, library):
        await engine.add("a", sampling, mode=PrefillMode.REMOTE)
        await engine.until(lambda: engine.lent)
        remote = next(remote for step in engine.steps for remote in step.remote_prefills)
        await engine.add("p", mode=PrefillMode.HANDOFF)
        await engine.until(lambda: engine.chunks and engine.chunks[-1].last)
        assert engine.chunks[-1].token_id == EXPECTED[0]
        memory = contract.Running(engine.host).blocks
        memory[list(remote.block_ids)] = memory[[number for chunk in engine.chunks for number in chunk.block_ids]]
        await engine.host.call(
            lambda inner: require(inner.lends).resume_handoff(remote.handoff_id, 1, EXPECTED[0], None)
        )
        await engine.end("a")
        assert engine.tokens("a") == EXPECTED
        asked = [prompt["prompt_token_ids"] for prompt, _, name, _ in library.begun if name.startswith("a/")]
        assert asked == [PROMPT if why else [*PROMPT, EXPECTED[0]]]
        # The same vLLM has the first block from "p".
        assert library.loaded["a"] == len(PROMPT) - BLOCK_SIZE - bool(why), "it computes the last token again"
        await engine.host.call(lambda inner: require(inner.lends).end_loan(remote.handoff_id, 1))
        await engine.host.call(lambda inner: inner.sending_finished("p"))
        while await engine.num_free() < 64:
            await asyncio.sleep(0.002)


async def test_blocks_leave_when_their_chunk_is_computed() -> None:
    """Chunks of 24 tokens, blocks of 16: of 40 tokens the first chunk fills block 0, the second one blocks 1 and 2. The
    answer does not come before that."""
    async with _engine() as (engine, library):
        library.holds_answers = True
        await engine.add("p", mode=PrefillMode.HANDOFF)
        await engine.until(lambda: [block for chunk in engine.chunks for block in chunk.block_ids][1:])
        assert [(chunk.first_block, len(chunk.block_ids), chunk.last) for chunk in engine.chunks] == [
            (0, 1, False),
            (1, 1, False),
        ]
        library.holds_answers = False
        await engine.until(lambda: engine.chunks[-1].last)
        last = engine.chunks[-1]
        assert (last.first_block, len(last.block_ids), last.token_id) == (2, 1, EXPECTED[0])
        assert library.paged is not None
        assert library.paged.worker.num_bytes == 3 * STAGED_BLOCK_BYTES


async def test_blocks_that_the_decode_worker_has_are_neither_saved_nor_sent() -> None:
    async with _engine() as (engine, library):
        request = Request("p", PROMPT, GREEDY, mode=PrefillMode.HANDOFF, num_load_tokens=32)
        await engine.host.call(lambda inner: inner.add_request(request))
        await engine.until(lambda: engine.chunks)
        (last,) = engine.chunks
        assert (last.first_block, len(last.block_ids), last.last) == (2, 1, True)
        assert library.paged is not None
        assert library.paged.worker.num_bytes == STAGED_BLOCK_BYTES


async def test_a_remote_prefill_and_what_follows_are_marked_on_both_sides() -> None:
    """One vLLM plays both: its second answer has another salt, so it loads."""
    async with _engine(edit=_with_times) as (engine, _):
        listening: dict[str, Any] = {"listener": lambda request, status: None}
        await engine.add("a", mode=PrefillMode.REMOTE, **listening)
        await engine.add("p", mode=PrefillMode.HANDOFF, **listening)
        await engine.until(lambda: engine.chunks and engine.chunks[-1].last)
        prefill = engine.phases("p")
        assert prefill[:2] == [(Phase.SAVED, STAGED_BLOCK_BYTES), (Phase.SAVED, STAGED_BLOCK_BYTES)]
        assert prefill[2:] == [
            *((Phase.TAKEN_IN, 1.0), (Phase.PREFILL_STARTED, 3.0), (Phase.PREFILL_ENDED, 6.0)),
            (Phase.SAVED, STAGED_BLOCK_BYTES),
        ]
        remote = next(remote for step in engine.steps for remote in step.remote_prefills)
        memory = contract.Running(engine.host).blocks
        memory[list(remote.block_ids)] = memory[[number for chunk in engine.chunks for number in chunk.block_ids]]
        await engine.host.call(
            lambda inner: require(inner.lends).resume_handoff(remote.handoff_id, 1, EXPECTED[0], None)
        )
        await engine.end("a")
        marks = sorted(engine.marks["a"], key=lambda mark: mark.phase)
        assert [(mark.phase, mark.value) for mark in marks] == [
            *((Phase.PREFILL_QUEUED, 0), (Phase.ATTACHED, 0), (Phase.RESUMED, 0), (Phase.LOADING, 0)),
            *((Phase.PREFILL_STARTED, 0), (Phase.TAKEN_IN, 0), (Phase.LOADED, STAGED_BLOCK_BYTES)),
        ]


async def test_an_answer_waits_for_ranks_that_have_not_saved_yet() -> None:
    """vLLM's first token says nothing of copies that are under way."""
    reports = KvReports(num_ranks=2)
    loop = asyncio.get_running_loop()
    reports.open(loop)
    heard: list[int] = []
    writer = os.open(reports.path, os.O_WRONLY)
    with reports.expect(3, heard.append) as progress:
        complete = asyncio.ensure_future(progress.complete())
        for rank, num_blocks in ((0, 3), (1, 2), (1, 3)):
            assert not complete.done()
            os.write(writer, encode_report(Report(progress.ticket, rank, CopyKind.SAVE, num_blocks, 8, 1.0, 2.0)))
            while reports.bytes_copied[CopyKind.SAVE] < 8 * (1 + rank * (num_blocks - 1)):
                await asyncio.sleep(0)
        await complete
    assert heard == [2, 3]
    os.write(writer, encode_report(Report(progress.ticket, 0, CopyKind.LOAD, 1, 8, 1.0, 2.0)))
    while not reports.bytes_copied[CopyKind.LOAD]:
        await asyncio.sleep(0)
    assert heard == [2, 3], "no one waits any more"
    os.close(writer)
    reports.close(loop)


async def test_a_first_token_that_ends_the_answer_needs_no_vllm() -> None:
    async with _engine() as (engine, library):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        await engine.add("a", sampling, mode=PrefillMode.REMOTE)
        await engine.until(lambda: engine.lent)
        remote = next(remote for step in engine.steps for remote in step.remote_prefills)
        assert not await engine.host.call(
            lambda inner: require(inner.lends).resume_handoff(remote.handoff_id, 2, 5, None)
        )
        assert await engine.host.call(lambda inner: require(inner.lends).resume_handoff(remote.handoff_id, 1, 5, None))
        await engine.end("a")
        assert (engine.tokens("a"), library.begun) == ([5], [])


async def test_a_first_token_of_another_vocabulary_is_none() -> None:
    async with _engine() as (engine, library):
        await engine.add("a", mode=PrefillMode.REMOTE)
        await engine.until(lambda: engine.lent)
        remote = next(remote for step in engine.steps for remote in step.remote_prefills)
        assert not await engine.host.call(
            lambda inner: require(inner.lends).resume_handoff(remote.handoff_id, 1, 10**6, None)
        )
        await engine.end("a")
        assert engine.tokens("a") == EXPECTED
        assert library.loaded["a"] == 0


def test_a_staging_pool_must_hold_the_longest_prompt() -> None:
    with pytest.raises(ConfigError, match="holds no prompt of 256 tokens: set it to 16384 bytes"):
        _host(StagedVllm(), _settings(15), "worker")


async def test_workers_whose_blocks_differ_inside_are_no_pair() -> None:
    """The fingerprint is part of the compatibility digest."""
    async with _engine() as (engine, _):
        facts = engine.host.facts
        assert facts.weights_fingerprint.endswith(" scripted")
        assert (facts.moves_kv, facts.hands_over_kv) == (False, True)


def test_staging_blocks_are_free_when_no_use_is_left() -> None:
    pool = StagingBlocks(4)
    blocks = pool.take(3)
    assert blocks is not None
    assert pool.take(2) is None
    pool.use(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 4
    with pytest.raises(AssertionError):
        pool.release(blocks)
    pool.check_integrity()


# -- two workers ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _pair(**disagg: object) -> AsyncIterator[tuple[Cluster, Node, Node, Client, tuple[StagedVllm, StagedVllm]]]:
    libraries = StagedVllm(), StagedVllm()
    async with cluster(disagg_policy="always", **disagg) as running:
        prefill = await running.join(WorkerRole.PREFILL, host=partial(_host, libraries[0], _settings()))
        decode = await running.join(WorkerRole.DECODE, host=partial(_host, libraries[1], _settings()))
        await running.acquainted(prefill, decode)
        yield running, prefill, decode, await running.client(decode), libraries
        engines = [node.engine for node in (prefill, decode)]

        def is_idle() -> bool:
            pools = [engine.peek(_pool) for engine in engines]
            return all(pool.num_free == pool.num_blocks for pool in pools)

        await running.until(is_idle)


async def test_kv_goes_from_vllm_to_vllm_by_kvrelays_transport() -> None:
    async with _pair() as (running, prefill, decode, client, libraries):
        prompts = {
            f"r{number}": prompt(length, start=number) for number, length in enumerate((1, 15, 16, 17, 100, 200))
        }
        for name, tokens in prompts.items():
            client.send(name, tokens, 8, ignore_eos=True)
        for name, tokens in prompts.items():
            assert await client.answer(name) == mock_generate(tokens, 8, vocab_size=VOCAB_SIZE)
        assert decode.worker.stats().decode.num_remote_done == 6
        assert {name: libraries[1].loaded[name] for name in prompts} == {
            name: len(tokens) for name, tokens in prompts.items()
        }
        await running.until(lambda: prefill.worker.stats().prefill.num_prefills == 6)
        await running.until(lambda: prefill.engine.peek(lambda engine: engine.stats()).times.sending.count == 6)
        came, sent = (
            node.worker.activity(node.engine.peek(lambda engine: engine.stats())) for node in (decode, prefill)
        )
        assert (came.claims.num, came.handoffs.num, sent.sends.num) == (6, 6, 6)


async def test_blocks_in_the_decode_workers_cache_stay_where_they_are() -> None:
    """Its vLLM has stored three blocks of 32 tokens, six of ours, of the 100 tokens of the first request."""
    async with _pair() as (running, prefill, decode, client, libraries):
        tokens = prompt(100)
        for name, num_loaded in (("first", 100), ("second", 100 - 96)):
            client.send(name, tokens, 8, ignore_eos=True)
            assert await client.answer(name) == mock_generate(tokens, 8, vocab_size=VOCAB_SIZE)
            assert libraries[1].loaded[name] == num_loaded
            await running.until(lambda: decode.engine.peek(lambda engine: len(engine.cached_hashes())) == 6)
        assert prefill.outgoing.counters.num_sent_bytes == (7 + 1) * STAGED_BLOCK_BYTES


async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async with _pair() as (running, _, _, client, libraries):
        paged = libraries[0].paged
        assert paged is not None
        num_free, libraries[0].holds = len(paged.free), True
        client.send("r", prompt(100), 8)
        await running.until(lambda: len(paged.free) < num_free)
        client.abort("r")
        await running.until(lambda: len(paged.free) == num_free)
