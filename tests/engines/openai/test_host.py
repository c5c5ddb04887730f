"""An engine whose tokens come from a server: what the server does wrong is an error of a request, never a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.engines.openai.scripted import Event, Script, scripted_server
from tests.patience import PATIENCE_S, noticed

from kvrelay.config import EngineConfig, UpstreamConfig, WorkerConfig
from kvrelay.core.events import AllBlocksCleared, BlockStored, KvEvent
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.contract import EngineHost
from kvrelay.engine.request import Request
from kvrelay.engine.step import StepOutput
from kvrelay.engines.hosted import host as host_module
from kvrelay.engines.hosted import load as backoff_module
from kvrelay.engines.hosted.engine import HostedEngine
from kvrelay.engines.openai.text_tokens import TextTokenizer
from kvrelay.engines.registry import build_executor, build_host
from kvrelay.errors import ConfigError, EngineDeadError, InvalidInputError, OverloadedError
from kvrelay.executors.mock import mock_generate
from kvrelay.marks.phases import Phase
from kvrelay.marks.recorder import Mark, marks_of

CONFIG = EngineConfig(num_blocks=64, max_num_seqs=4, max_num_waiting=2)
PROMPT = list(range(20, 60))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
EXPECTED = mock_generate(PROMPT, 6, vocab_size=1024)


def _settings(url: str, **upstream: object) -> WorkerConfig:
    values = {"upstream": url, "upstream_start_timeout_s": 0.0, **upstream}
    return WorkerConfig(model_path=bundled_checkpoint_path(), engine=CONFIG, upstream=UpstreamConfig(**values))


class Running:
    """A host that runs, and what it has told."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.events: list[KvEvent] = []
        self.remote: list[RemotePrefillRequest] = []
        self.fetched: list[tuple[HandoffId, bool]] = []
        self.marks: dict[str, list[Mark]] = {}
        self.dead: list[EngineDeadError] = []

    def on_step(self, step: StepOutput) -> None:
        for output in step.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.events += step.kv_events
        self.remote += step.remote_prefills
        self.fetched += step.fetched_handoffs
        for request_id, numbers in step.marks:
            self.marks.setdefault(request_id, []).extend(marks_of(numbers))

    def phases(self, name: str) -> list[tuple[Phase, float]]:
        """With the numbers of those that have one, or else the times."""
        return [(mark.phase, mark.value or mark.at_s) for mark in self.marks.get(name, [])]

    async def add(self, name: str, sampling: SamplingParams = GREEDY, **settings: Any) -> None:
        request = Request(name, PROMPT, sampling, **settings)
        await self.host.call(lambda engine: engine.add_request(request))

    async def until(self, condition: Callable[[], object]) -> None:
        await noticed(condition)

    async def end(self, name: str) -> TokenOutput:
        await self.until(lambda: self.outputs.get(name) and self.outputs[name][-1].finish_reason is not None)
        return self.outputs[name][-1]

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]


@contextmanager
def _server(**script: object) -> Iterator[tuple[Script, str]]:
    values = Script(**{"vocab_size": 1024, **script})
    with scripted_server(values) as server:
        yield values, server.url


@asynccontextmanager
async def _engine(**script: object) -> AsyncIterator[tuple[Running, Script]]:
    with _server(**script) as (values, url):
        host = await asyncio.to_thread(build_host, "openai", _settings(url), "worker")
        assert host is not None
        running = Running(host)
        values.bodies.clear()
        host.start(running.on_step, running.dead.append)
        try:
            yield running, values
        finally:
            assert await asyncio.to_thread(host.close)


async def test_tokens_logprobs_and_hits_come_from_the_server() -> None:
    async with _engine() as (engine, script):
        await engine.add("a", SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2))
        last = await engine.end("a")
        assert engine.tokens("a") == EXPECTED
        assert last.finish_reason is FinishReason.LENGTH
        assert [output.position for output in engine.outputs["a"]] == list(range(6))
        assert engine.outputs["a"][0].num_cached_tokens == 16
        logprobs = engine.outputs["a"][0].logprobs
        assert logprobs is not None
        assert (logprobs[0].chosen.token_id, logprobs[0].chosen.logprob) == (EXPECTED[0], -0.25)
        assert script.bodies[0]["prompt"] == PROMPT
        assert script.bodies[0]["model"] == "served"


async def test_a_request_from_another_worker_goes_on_at_its_token() -> None:
    async with _engine() as (engine, script):
        await engine.add("a", output_token_ids=EXPECTED[:4])
        await engine.end("a")
        assert engine.tokens("a") == EXPECTED[4:]
        assert engine.outputs["a"][0].position == 4
        assert (script.bodies[0]["prompt"], script.bodies[0]["max_tokens"]) == ([*PROMPT, *EXPECTED[:4]], 2)
        await engine.add("b", output_token_ids=EXPECTED)
        assert (await engine.end("b")).finish_reason is FinishReason.LENGTH
        assert len(script.bodies) == 1, "nothing is left to compute"


async def test_stop_tokens_hold_even_if_the_server_ignores_them() -> None:
    async with _engine() as (engine, _):
        stopping = SamplingParams(max_tokens=100, temperature=0.0, stop_token_ids=(EXPECTED[2],), ignore_eos=True)
        await engine.add("a", stopping)
        last = await engine.end("a")
        assert (last.finish_reason, last.stop_token) == (FinishReason.STOP, EXPECTED[2])
        assert engine.tokens("a") == EXPECTED[:3]
        times = engine.host.stats().times
        assert (times.prefill.count, times.handoff.count, times.queue.count, times.step.count) == (1, 0, 0, 0)


async def test_an_abort_closes_the_connection() -> None:
    async with _engine() as (engine, script):
        script.is_paused = True
        await engine.add("a")
        await engine.until(lambda: engine.outputs.get("a"))
        await engine.host.call(lambda inner: inner.abort("a"))
        await engine.until(lambda: script.num_cut)
        assert engine.host.stats().load.num_admitted == 0


async def test_what_no_request_waits_for_may_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("it is busy")

    async with _engine() as (engine, _):
        backend = engine.host.backend  # type: ignore[attr-defined]
        for name in ("clear_cache", "discard"):
            monkeypatch.setattr(backend, name, fail)
        await engine.host.call(lambda inner: (inner.clear_cache(), HostedEngine.discard(inner, b"{}")))
        await engine.until(lambda: caplog.text.count("it is busy") == 2)
        await engine.add("a")
        assert (await engine.end("a")).finish_reason is FinishReason.LENGTH
    assert "asyncio" not in {record.name for record in caplog.records}, "an exception was not retrieved"


def _cut(number: int, event: Event) -> Event | None:
    return event if number < 2 else None


def _with(number: int, change: Callable[[Event], object]) -> Callable[[int, Event], Event]:
    def edit(at: int, event: Event) -> Event:
        if at == number:
            change(event)
        return event

    return edit


WRONG = {
    "cut": _cut,
    "rubbish": lambda number, event: event if number < 2 else b"<html>",
    "an error": lambda number, event: event if number < 2 else {"error": {"message": "out of memory"}},
    "another vocabulary": _with(2, lambda event: event["choices"][0].update(token_ids=[5000])),
    "no ids": _with(2, lambda event: event["choices"][0].pop("token_ids")),
    "another prompt": _with(2, lambda event: event.update(usage={"prompt_tokens": 41})),
    "an unknown end": _with(2, lambda event: event["choices"][0].update(finish_reason="tool_calls")),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_answer_that_goes_wrong_is_another_workers_to_finish(wrong: str) -> None:
    async with _engine() as (engine, script):
        await engine.add("before")
        await engine.end("before")
        script.edit = WRONG[wrong]
        await engine.add("a")
        last = await engine.end("a")
        assert (last.finish_reason, last.is_final) == (FinishReason.ERROR, False)
        assert last.error
        assert not any(said in last.error for said in ("127.0.0.1", "out of memory", "tool_calls")), "not for clients"
        assert engine.tokens("a") == EXPECTED[:2]
        assert last.position == 2
        assert isinstance(engine.events[-1], AllBlocksCleared), "its cache may be gone"
        script.edit = lambda number, event: event
        await engine.add("b")
        await engine.end("b")
        assert engine.tokens("b") == EXPECTED


async def test_what_the_server_finds_wrong_is_final(caplog: pytest.LogCaptureFixture) -> None:
    async with _engine() as (engine, script):
        script.status = 400
        await engine.add("a")
        last = await engine.end("a")
        assert last.is_final
        assert last.error == "the server refused the request with status 400"
        assert "not now" in caplog.text, "what it said, and where, is for the operator"
        assert "http://127.0.0.1" in caplog.text


async def test_a_full_server_is_left_alone_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff_module, "FIRST_S", PATIENCE_S)
    monkeypatch.setattr(backoff_module, "LONGEST_S", PATIENCE_S)
    async with _engine() as (engine, script):
        script.status, script.retry_after = 429, "1e308"
        await engine.add("a")
        assert not (await engine.end("a")).is_final
        with pytest.raises(OverloadedError) as caught:
            await engine.add("b")
        assert 1 < caught.value.retry_after_s <= PATIENCE_S
        script.status = 200
        await engine.add("c", output_token_ids=EXPECTED[:1])
        await engine.end("c")
        assert engine.tokens("c") == EXPECTED[1:], "what was begun elsewhere is not turned away"


async def test_a_full_server_gets_a_probe_whatever_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff_module, "FIRST_S", 0.01)
    async with _engine() as (engine, script):
        script.status, script.retry_after = 429, "1e308"
        await engine.add("a")
        await engine.end("a")
        script.status = 200
        is_admitted = False
        async with asyncio.timeout(PATIENCE_S):
            while not is_admitted:
                await asyncio.sleep(0.002)
                with suppress(OverloadedError):
                    await engine.add("probe")
                    is_admitted = True
        await engine.end("probe")
        await engine.add("after")
        assert (await engine.end("after")).finish_reason is FinishReason.LENGTH


async def test_more_than_may_wait_is_refused() -> None:
    async with _engine() as (engine, script):
        script.is_paused = True
        for number in range(6):
            await engine.add(str(number))
        with pytest.raises(OverloadedError):
            await engine.add("more")
        assert engine.host.stats().load.num_waiting == 2


async def test_keys_take_turns_at_the_server_whatever_their_priorities() -> None:
    """Four requests are at the server, two wait here: the one of the other key is next when a place is free."""
    async with _engine() as (engine, script):
        script.is_paused = True
        for number in range(5):
            await engine.add(f"a{number}", tenant="a", priority=-(2**30))
        await engine.add("b", tenant="b")
        # A key is charged for tokens that it got, so a0 must have one; else both keys have been served alike.
        await engine.until(lambda: len(script.bodies) == 4 and "a0" in engine.outputs)
        assert engine.host.stats().load.num_waiting == 2
        await engine.host.call(lambda inner: inner.abort("a0"))
        await engine.until(lambda: engine.outputs.get("b"))
        assert "a4" not in engine.outputs
        script.is_paused = False
        for name in ("b", "a1", "a2", "a3", "a4"):
            await engine.end(name)
            assert engine.tokens(name) == EXPECTED
        assert all("priority" not in body for body in script.bodies), "the server knows no keys"


async def test_a_held_request_ends_by_an_abort_and_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "HEALTH_INTERVAL_S", 0.01)
    async with _engine() as (engine, script):
        script.is_paused = True
        for number in range(6):
            await engine.add(str(number), tenant="a")
        await engine.host.call(lambda inner: inner.abort("4"))
        assert engine.host.stats().load.num_waiting == 1
        script.health = 503
        assert (await engine.end("5")).finish_reason is FinishReason.ERROR
        assert len(script.bodies) <= 4, "it never began"


async def test_a_server_that_is_gone_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "HEALTH_INTERVAL_S", 0.01)
    async with _engine() as (engine, script):
        script.is_paused = True
        await engine.add("a")
        await engine.until(lambda: engine.outputs.get("a"))
        script.health = 503
        await engine.until(lambda: engine.dead)
        last = await engine.end("a")
        assert (last.finish_reason, last.is_final) == (FinishReason.ERROR, False)
        assert "health" in engine.dead[0].message
        assert last.error == "the server is gone"
        with pytest.raises(EngineDeadError):
            await engine.add("b")


async def test_text_becomes_ids_when_the_server_tells_none() -> None:
    tokenizer = TextTokenizer(bundled_checkpoint_path())
    async with _engine(tells_token_ids=False, decode=tokenizer.decode) as (engine, _):
        await engine.add("a")
        await engine.end("a")
        assert tokenizer.decode(engine.tokens("a")) == "".join(tokenizer.decode([token]) for token in EXPECTED)
        with pytest.raises(InvalidInputError) as caught:
            await engine.add("b", SamplingParams(max_tokens=2, logprobs=1))
        assert caught.value.param == "logprobs"


async def test_text_without_end_is_an_error() -> None:
    def endless(number: int, event: Event) -> Event:
        for choice in event["choices"]:
            choice["text"], choice["finish_reason"] = " more" * 1000, None
        return event

    async with _engine(tells_token_ids=False) as (engine, script):
        script.edit = endless
        await engine.add("a")
        last = await engine.end("a")
        assert (last.finish_reason, last.is_final) == (FinishReason.ERROR, False)
        assert "more tokens than" in (last.error or "")
        await engine.until(lambda: script.num_cut or script.num_ended)


async def test_what_was_placed_is_told_as_cached() -> None:
    async with _engine() as (engine, _):
        await engine.add("a")
        await engine.end("a")
        await engine.until(lambda: engine.events)
        stored = engine.events[0]
        assert isinstance(stored, BlockStored)
        assert stored.block_hashes == compute_sequence_hashes(PROMPT[:32], stored.block_size)


@pytest.mark.parametrize(
    ("upstream", "script", "message"),
    [
        ({"upstream": ""}, {}, "needs --upstream"),
        ({"upstream": "ftp://a"}, {}, "no URL"),
        ({"upstream": "http://"}, {}, "no URL"),
        ({"upstream": "http://a:99999"}, {}, "no URL"),
        ({"upstream_model": "other"}, {}, "does not have the model other; it has served"),
        ({}, {"needs_key": "secret"}, "refuses us: status 401"),
        ({"upstream_api_key_file": "/nonexistent"}, {}, "cannot read the key"),
        ({"upstream_ca": "/nonexistent"}, {}, "cannot read /nonexistent"),
    ],
)
def test_what_is_configured_wrongly_is_said_at_start(
    upstream: dict[str, str], script: dict[str, str], message: str
) -> None:
    with _server(**script) as (_, url), pytest.raises(ConfigError, match=message):
        build_host("openai", _settings(**{"url": url, **_renamed(upstream)}), "worker")


@pytest.mark.parametrize("parent", [None, "base"])
def test_an_adapter_of_the_server_is_a_model_of_its_own(parent: str | None) -> None:
    with _server(parent=parent) as (_, url):
        host = build_host("openai", _settings(url=url), "worker")
        assert host.facts.adapter == ("served" if parent else "")
        host.close()


def _renamed(upstream: dict[str, str]) -> dict[str, str]:
    return {("url" if name == "upstream" else name): value for name, value in upstream.items()}


def test_a_key_is_sent(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with _server(needs_key="secret") as (_, url):
        host = build_host("openai", _settings(url, upstream_api_key_file=str(key)), "worker")
        assert host is not None
        assert host.facts.max_model_len == 256
        assert not host.facts.hands_over_kv
        assert host.close()


def test_a_server_that_does_not_come_up_is_named() -> None:
    with pytest.raises(EngineDeadError, match=r"127\.0\.0\.1:9 is not ready"):
        build_host("openai", _settings("http://127.0.0.1:9"), "worker")


def test_it_is_no_executor() -> None:
    with pytest.raises(ConfigError, match="has no executor"):
        build_executor("openai", _settings("http://127.0.0.1:9"))
