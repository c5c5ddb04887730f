"""What every EngineHost does, whatever engine it holds. Add a builder to ENGINES to hold another one to it."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.engines.openai.scripted import Script, scripted_server
from tests.engines.vllm.scripted import ScriptedVllm, scripted_start
from tests.engines.vllm.staged import STAGED_BLOCK_BYTES, StagedVllm, staged_start
from tests.patience import PATIENCE_S, noticed

from kvrelay.config import EngineConfig, MockConfig, RunnerConfig, UpstreamConfig, VllmConfig, WorkerConfig, WorkerRole
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.events import BlockStored, KvEvent, LoadMetrics
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.contract import Engine, EngineHost, require
from kvrelay.engine.core import EngineCore
from kvrelay.engine.limits import PendingArrivals
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import HandoffChunk, StepOutput
from kvrelay.engine.thread import EngineThread
from kvrelay.engines import vllm
from kvrelay.engines.registry import build_executor, build_host
from kvrelay.engines.vllm.library import Started
from kvrelay.errors import EngineDeadError, InvalidInputError, OverloadedError, PromptTooLongError
from kvrelay.executors.host_memory import HostMemory

CONFIG = EngineConfig(num_blocks=64, max_model_len=256, max_num_seqs=4, max_num_waiting=2, kv_watermark=0)
PROMPT = list(range(20, 60))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def _engine_core(name: str) -> Callable[[], EngineHost]:
    def build() -> EngineHost:
        runner = RunnerConfig(dtype="float32", device="cpu", num_threads=1)
        settings = WorkerConfig(
            model_path=bundled_checkpoint_path(), engine=CONFIG, runner=runner, mock=MockConfig(speedup_ratio=0.0)
        )
        executor = build_executor(name, settings)
        executor.warm_up()
        return EngineThread(EngineCore(executor, CONFIG, MonotonicClock(), worker_id=name))

    return build


@contextmanager
def _core(name: str) -> Iterator[Callable[[], EngineHost]]:
    yield _engine_core(name)


@contextmanager
def _openai() -> Iterator[Callable[[], EngineHost]]:
    with scripted_server(Script(vocab_size=1024)) as server:
        upstream = UpstreamConfig(upstream=server.url, upstream_start_timeout_s=PATIENCE_S)
        settings = WorkerConfig(model_path=bundled_checkpoint_path(), engine=CONFIG, upstream=upstream)
        # It asks the server, for which it needs a thread without an event loop.
        with ThreadPoolExecutor(1) as thread:
            yield lambda: thread.submit(build_host, "openai", settings, "openai").result()  # type: ignore[arg-type,return-value]


@contextmanager
def _vllm() -> Iterator[Callable[[], EngineHost]]:
    settings = WorkerConfig(model_path=bundled_checkpoint_path(), engine=CONFIG)

    def start(arguments: Mapping[str, Any], settings: WorkerConfig, memory: HostMemory) -> Started:
        return scripted_start(ScriptedVllm(), arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "start_vllm", start)
        yield lambda: vllm.from_settings(settings, "vllm")


@contextmanager
def _staged() -> Iterator[Callable[[], EngineHost]]:
    """With kvrelay's connector, and a staging pool of as many blocks as vLLM has."""
    config = VllmConfig(vllm_connector="kvrelay", vllm_staging=str(64 * STAGED_BLOCK_BYTES))
    settings = WorkerConfig(model_path=bundled_checkpoint_path(), engine=CONFIG, role=WorkerRole.DECODE, vllm=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "start_vllm", lambda *given: staged_start(StagedVllm(), *given))
        yield lambda: vllm.from_settings(settings, "vllm")


ENGINES: dict[str, Callable[[], AbstractContextManager[Callable[[], EngineHost]]]] = {
    "mock": lambda: _core("mock"),
    "torch": lambda: _core("torch"),
    "openai": _openai,
    "vllm": _vllm,
    "vllm with kvrelay's connector": _staged,
}


@dataclass
class Running:
    """An engine that runs, and everything that it has told."""

    host: EngineHost
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    events: list[KvEvent] = field(default_factory=list)
    loads: list[LoadMetrics] = field(default_factory=list)
    remote: list[RemotePrefillRequest] = field(default_factory=list)
    chunks: list[HandoffChunk] = field(default_factory=list)
    closed: list[HandoffId] = field(default_factory=list)
    dead: list[EngineDeadError] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def start(self) -> None:
        self.host.start(self._on_step, self.dead.append)

    def _on_step(self, step: StepOutput) -> None:
        self.threads.add(threading.get_ident())
        for output in step.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.events += step.kv_events
        self.remote += step.remote_prefills
        self.chunks += step.handoff_chunks
        self.closed += step.closed_handoffs
        if step.load is not None:
            self.loads.append(step.load)

    async def add(self, name: str, prompt: Sequence[int] = PROMPT, **settings: object) -> None:
        request = Request(name, prompt, GREEDY, **settings)  # type: ignore[arg-type]
        await self.host.call(lambda engine: engine.add_request(request))

    async def until(self, condition: Callable[[], object]) -> None:
        await noticed(condition)

    async def answer(self, name: str) -> list[int]:
        def ended() -> bool:
            return any(output.finish_reason is not None for output in self.outputs.get(name, []))

        await self.until(ended)
        return [token for output in self.outputs[name] for token in output.token_ids]

    async def idle(self) -> None:
        """Every block is back, and the engine says so by itself."""
        await self.host.call(lambda engine: engine.check_integrity())
        await self.until(lambda: self.loads and self.loads[-1].num_blocks_in_use == 0)

    @property
    def blocks(self) -> np.ndarray:
        """The bytes of pool and holding area, [blocks, block_bytes], as a transport sees them."""
        region = self.host.kv_region
        raw = (ctypes.c_uint8 * region.num_bytes).from_address(region.address)
        return np.frombuffer(raw, dtype=np.uint8).reshape(-1, self.host.facts.kv_layout.block_bytes)


@pytest.fixture(params=ENGINES)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Running, Running]]:
    """Two engines of one model: a prefill and a decode worker's."""
    with ENGINES[request.param]() as build:
        made = tuple(Running(build()) for _ in range(2))
        for running in made:
            running.start()
        yield made[0], made[1]
        for running in made:
            assert await asyncio.to_thread(running.host.close)
            assert await asyncio.to_thread(running.host.close)


@pytest.fixture
def handing_over(pair: tuple[Running, Running]) -> tuple[Running, Running]:
    if not pair[0].host.facts.hands_over_kv:
        pytest.skip("this engine hands no KV over")
    return pair


@pytest.fixture
def engine(pair: tuple[Running, Running]) -> Running:
    return pair[0]


async def test_requests_in_tokens_events_and_load_out(engine: Running) -> None:
    await engine.add("a")
    tokens = await engine.answer("a")
    assert len(tokens) == 6
    assert [output.position for output in engine.outputs["a"]] == list(range(len(engine.outputs["a"])))
    assert engine.outputs["a"][-1].finish_reason is FinishReason.LENGTH

    def num_stored() -> int:
        return sum(len(event.block_hashes) for event in engine.events if isinstance(event, BlockStored))

    await engine.until(num_stored)
    assert num_stored() == 2, "two full blocks of sixteen tokens"
    await engine.idle()
    assert engine.threads - {threading.get_ident()} == engine.threads, "steps never run on the caller's thread"
    assert engine.host.stats().tokens.num_generated >= 6


async def test_facts_do_not_change_and_fit_the_memory(engine: Running) -> None:
    facts = engine.host.facts
    assert (facts.num_blocks, facts.max_model_len, facts.kv_layout.block_size) == (64, 256, 16)
    assert engine.host.kv_region.num_bytes >= facts.num_blocks * facts.kv_layout.block_bytes
    await engine.add("a")
    await engine.answer("a")
    assert engine.host.facts == facts


async def test_callbacks_run_between_steps_and_their_failures_reach_the_caller(engine: Running) -> None:
    assert await engine.host.call(lambda inner: threading.get_ident()) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await engine.host.call(lambda inner: 1 // 0)
    engine.host.post(lambda inner: 1 // 0)
    await engine.add("a")
    assert len(await engine.answer("a")) == 6


REFUSED = [([], InvalidInputError), ([-1], InvalidInputError), ([5] * 300, PromptTooLongError)]


@pytest.mark.parametrize(("prompt", "error"), REFUSED)
async def test_what_is_refused_changes_nothing(engine: Running, prompt: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        await engine.add("a", prompt)
    await engine.add("a")
    with pytest.raises(InvalidInputError, match="running already"):
        await engine.host.call(lambda inner: (inner.add_request(Request("b", [5], GREEDY)), _add_twice(inner)))
    assert len(await engine.answer("a")) == 6


def _add_twice(engine: Engine) -> None:
    engine.add_request(Request("b", [5], GREEDY))


async def test_room_is_known_without_waiting_for_a_step(engine: Running) -> None:
    engine.host.peek(lambda inner: inner.check_room(10, is_new=True, ahead=PendingArrivals()))
    with pytest.raises(OverloadedError):
        engine.host.peek(lambda inner: inner.check_room(10, is_new=True, ahead=PendingArrivals(100, 1000)))


async def test_an_abort_frees_everything(engine: Running) -> None:
    request = Request("a", PROMPT, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    await engine.host.call(lambda inner: inner.add_request(request))
    await engine.until(lambda: engine.outputs.get("a"))
    await engine.host.call(lambda inner: inner.abort("a"))
    await engine.host.call(lambda inner: inner.abort("unknown"))
    await engine.idle()


async def test_a_cached_prefix_counts_until_the_cache_is_cleared(engine: Running) -> None:
    def cached(inner: Engine) -> int:
        return inner.num_cached_tokens(Request("?", PROMPT, GREEDY))

    assert await engine.host.call(cached) == 0
    await engine.add("a")
    await engine.answer("a")
    # The events of an engine in another process may follow the answer.
    await engine.until(lambda: engine.events)
    assert await engine.host.call(cached) == 32
    assert len(await engine.host.call(lambda inner: inner.cached_hashes())) == 2
    await engine.host.call(lambda inner: inner.clear_cache())
    assert await engine.host.call(cached) == 0


async def test_kv_is_handed_over(handing_over: tuple[Running, Running]) -> None:
    """The whole contract of a hand-off, with a copy in place of protocol and transport."""
    prefill, decode = handing_over
    await decode.add("plain")
    expected = await decode.answer("plain")
    await decode.host.call(lambda inner: inner.clear_cache())

    await decode.add("a", mode=PrefillMode.REMOTE)
    await decode.until(lambda: decode.remote)
    start = decode.remote[0]
    assert len(start.block_ids) == 3
    await prefill.host.call(lambda inner: inner.schedules and inner.schedules.set_exclusive_prefill(True))
    await prefill.add("a", mode=PrefillMode.HANDOFF)
    await prefill.until(lambda: prefill.chunks and prefill.chunks[-1].last)
    sent = [block for chunk in prefill.chunks for block in chunk.block_ids]
    assert len(sent) == 3
    metrics = await prefill.host.call(lambda inner: inner.metrics())
    assert metrics.num_blocks_in_use == 3, "sent blocks stay in use until the transfer has ended"
    decode.blocks[list(start.block_ids)] = prefill.blocks[sent]
    assert decode.host.checksum_blocks(start.block_ids[:2]) == prefill.host.checksum_blocks(sent[:2])
    token_id = prefill.chunks[-1].token_id
    assert token_id is not None
    resume = await decode.host.call(
        lambda inner: require(inner.lends).resume_handoff(start.handoff_id, 1, token_id, None)
    )
    assert resume
    await decode.host.call(lambda inner: require(inner.lends).end_loan(start.handoff_id, 1))
    await prefill.host.call(lambda inner: inner.sending_finished("a"))
    assert await decode.answer("a") == expected
    await decode.idle()
    await prefill.idle()


async def test_an_engine_has_the_capabilities_that_its_facts_tell(engine: Running) -> None:
    facts = engine.host.facts
    lends, moves, schedules = engine.host.peek(lambda inner: (inner.lends, inner.moves, inner.schedules))
    assert (moves is not None) is facts.moves_kv
    assert (lends is not None) is (facts.hands_over_kv and not facts.moves_kv)
    assert schedules is None or lends is not None, "reads of KV before a step are into blocks of its own"


async def test_kv_that_never_comes_is_computed_here_and_lent_blocks_stay_lent(
    handing_over: tuple[Running, Running],
) -> None:
    engine, _ = handing_over
    await engine.add("plain")
    expected = await engine.answer("plain")
    await engine.host.call(lambda inner: inner.clear_cache())
    await engine.add("a", mode=PrefillMode.REMOTE)
    await engine.until(lambda: engine.remote)
    start = engine.remote[0]
    fresh = await engine.host.call(lambda inner: require(inner.lends).lend_fresh(start.handoff_id, 2))
    assert fresh is not None
    assert not set(fresh) & set(start.block_ids), "the first claimant may still write to the first loan"
    await engine.host.call(lambda inner: inner.compute_handoff_here(start.handoff_id))
    # What a late writer does to lent blocks must not reach the answer.
    engine.blocks[list(start.block_ids)] ^= 0xFF
    engine.blocks[list(fresh)] ^= 0xFF
    assert await engine.answer("a") == expected
    assert not await engine.host.call(lambda inner: require(inner.lends).resume_handoff(start.handoff_id, 1, 5, None))
    metrics = await engine.host.call(lambda inner: inner.metrics())
    assert metrics.num_blocks_in_use == 6
    for loan in (1, 2):
        await engine.host.call(lambda inner, loan=loan: require(inner.lends).end_loan(start.handoff_id, loan))
    with pytest.raises(KeyError):
        await engine.host.call(lambda inner: require(inner.lends).end_loan(start.handoff_id, 2))
    await engine.idle()


async def test_a_request_that_ends_while_it_waits_says_so(handing_over: tuple[Running, Running]) -> None:
    engine, _ = handing_over
    await engine.add("a", mode=PrefillMode.REMOTE)
    await engine.until(lambda: engine.remote)
    await engine.host.call(lambda inner: inner.abort("a"))
    await engine.until(lambda: engine.closed)
    assert engine.closed == [engine.remote[0].handoff_id]
    await engine.host.call(lambda inner: require(inner.lends).end_loan(engine.remote[0].handoff_id, 1))
    await engine.idle()


async def test_after_close_callers_hear_that_it_has_ended(engine: Running) -> None:
    await asyncio.to_thread(engine.host.close)
    with pytest.raises(EngineDeadError):
        await engine.host.call(lambda inner: None)
