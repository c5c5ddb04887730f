"""Large requests are worked on beside the event loop, in pieces, in turn."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.frontend.doubles import Script, running
from tests.frontend.raw_http import RawClient, send

from kvrelay.core.sampling import SamplingParams
from kvrelay.frontend import side_threads
from kvrelay.frontend.generate import prompts
from kvrelay.frontend.generate.sequence import Sequence
from kvrelay.frontend.loop_turns import START_COST, TURN_COST
from kvrelay.frontend.openai import requests
from kvrelay.frontend.side_threads import INLINE_SIZE, NUM_THREADS, Pieces, SideThreads
from kvrelay.frontend.tokens import chat_template, tokenizer

LARGE = INLINE_SIZE + 1
KNOWN_BEGINNING = "This model's maximum context length is 512 tokens"
"""OpenAI's and vLLM's."""


@pytest.fixture
def threads() -> Iterator[SideThreads]:
    made = SideThreads()
    yield made
    made.close()


def pieces(number: int, names: list[str], name: str = "") -> Pieces[int]:
    for _ in range(number):
        names.append(name or threading.current_thread().name)
        yield
    return number


async def test_small_work_is_done_in_place(threads: SideThreads) -> None:
    names: list[str] = []
    assert await threads.run(INLINE_SIZE, pieces(3, names)) == 3
    assert set(names) == {threading.current_thread().name}
    assert await threads.call(INLINE_SIZE, threading.current_thread) is threading.current_thread()


async def test_large_work_is_done_beside_the_loop(threads: SideThreads) -> None:
    names: list[str] = []
    assert await threads.run(LARGE, pieces(3, names)) == 3
    assert len(names) == 3
    assert threading.current_thread().name not in names
    assert await threads.call(LARGE, threading.current_thread) is not threading.current_thread()


async def test_an_exception_reaches_the_caller(threads: SideThreads) -> None:
    def failing() -> Pieces[None]:
        yield
        raise ValueError("x")

    for size in (INLINE_SIZE, LARGE):
        with pytest.raises(ValueError, match="x"):
            await threads.run(size, failing())


async def test_large_requests_take_turns(threads: SideThreads) -> None:
    """Each piece waits its turn anew: here all threads but one are held."""
    gate = threading.Event()
    order: list[str] = []
    held = [asyncio.create_task(threads.call(LARGE, gate.wait)) for _ in range(NUM_THREADS - 1)]
    first = asyncio.create_task(threads.run(LARGE, pieces(50, order, "first")))
    second = asyncio.create_task(threads.run(LARGE, pieces(2, order, "second")))
    await asyncio.gather(first, second)
    gate.set()
    await asyncio.gather(*held)
    assert order.count("second") == 2
    assert order[-1] == "first"


async def test_a_shorter_request_passes_longer_ones(threads: SideThreads) -> None:
    gate = threading.Event()
    order: list[str] = []
    held = [asyncio.create_task(threads.call(LARGE, gate.wait)) for _ in range(NUM_THREADS)]
    await asyncio.sleep(0)
    long = [asyncio.create_task(threads.run(10 * LARGE, pieces(2, order, "long"))) for _ in range(20)]
    await asyncio.sleep(0)
    short = asyncio.create_task(threads.run(LARGE, pieces(2, order, "short")))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*long, short, *held)
    assert order.index("short") <= 2
    assert order.count("long") == 40


async def test_waiting_pieces_end_when_the_threads_close() -> None:
    threads, gate = SideThreads(), threading.Event()
    held = [asyncio.create_task(threads.call(LARGE, gate.wait)) for _ in range(NUM_THREADS)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(threads.call(LARGE, threading.current_thread))
    await asyncio.sleep(0)
    threads.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await asyncio.gather(*held)


async def test_a_completion_of_some_length_is_parsed_on_the_loop(threads: SideThreads) -> None:
    here = threading.current_thread()
    assert await threads.parse(LARGE, threading.current_thread) is here
    assert await threads.parse(side_threads.LOOP_SIZE, threading.current_thread) is here
    assert await threads.parse(side_threads.LOOP_SIZE + 1, threading.current_thread) is not here
    names: list[str] = []
    assert await threads.run(side_threads.LOOP_SIZE, pieces(3, names), is_light=True) == 3
    assert await threads.run(side_threads.LOOP_SIZE + 1, pieces(1, names), is_light=True) == 1
    assert names[:3] == [here.name] * 3
    assert names[3].startswith("side")


async def test_work_that_is_not_wanted_any_more_ends(threads: SideThreads) -> None:
    names: list[str] = []

    def check() -> None:
        if len(names) == 2:
            raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        await threads.run(LARGE, pieces(50, names), check)
    assert len(names) == 2


LONG = "The quick brown fox\n" * 400
LARGE_BODIES = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": ["short"] * 1000}),
    ("/v1/completions", {"prompt": [5] * 6000, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}] * 300}),
    ("/v1/kvrelay/route", {"prompt": LONG}),
    ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    ("/detokenize", {"tokens": [5] * 6000}),
]


@pytest.mark.parametrize(("path", "body"), LARGE_BODIES)
async def test_nothing_of_a_large_body_is_worked_on_in_the_loop(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    """Parsing, templates and tokenizing, whichever the request needs: all that takes longer for a larger body."""
    monkeypatch.setattr(side_threads, "LOOP_SIZE", INLINE_SIZE)
    seen: dict[str, set[str]] = {}

    def spy(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def called(*args: object, **kwargs: object) -> object:
            seen.setdefault(name, set()).add(threading.current_thread().name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    spy(requests, "check_body")
    spy(prompts, "_split")
    spy(prompts, "_packed")
    spy(prompts, "template_messages")
    spy(chat_template, "_joined")
    for name in ("encode_batch", "decode", "token_string"):
        spy(tokenizer.Tokenizer, name)
    async with running(model_dir, Script((10,)), max_waiting_requests=8192) as cluster:
        await cluster.register(cluster.workers["w0"], max_model_len=8192)
        model = cluster.frontend.cluster.model(None)
        await cluster.until(lambda: model.max_model_len == 8192)
        seen.clear()
        fields = {} if "tokenize" in path else {"max_tokens": 1}
        answer = await send(cluster.frontend.port, "POST", path, {**fields, **body})
        assert answer.status == 200, answer.body
    names = set().union(*seen.values())
    assert seen["check_body"]
    assert len(seen) > 1
    assert all(name.startswith("side") for name in names), seen


async def test_a_client_that_leaves_ends_its_work(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, started = threading.Event(), threading.Event()
    calls: list[int] = []
    real = tokenizer.Tokenizer.encode_batch

    def slow(self: tokenizer.Tokenizer, batch: list[str], special: bool) -> Iterator[list[int]]:
        calls.append(len(batch))
        started.set()
        gate.wait(30)
        return real(self, batch, special)

    async with running(model_dir, Script((10,))) as cluster:
        monkeypatch.setattr(tokenizer.Tokenizer, "encode_batch", slow)
        client = await RawClient.connect(cluster.frontend.port)
        body = json.dumps({"prompt": ["short"] * 1000}).encode()
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        await cluster.until(started.is_set)
        await client.close()
        await cluster.until(lambda: len(cluster.frontend.server.connections) == 0)
        gate.set()
        await cluster.until(lambda: cluster.frontend.metrics.num_in_flight_of() == 0)
    assert calls == [256]


async def test_many_sequences_start_in_turns_of_the_loop(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, turns = 0, []
    start = Sequence.start

    def counted(self: Sequence) -> None:
        turns.append(turn)
        start(self)

    monkeypatch.setattr(Sequence, "start", counted)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async with running(model_dir, Script((10,))) as cluster:
        counter = asyncio.create_task(count_turns())
        body = {"prompt": ["a"] * 10, "n": 100, "max_tokens": 1}
        answer = await send(cluster.frontend.port, "POST", "/v1/completions", body)
        counter.cancel()
    assert answer.status == 200
    assert len(answer.json["choices"]) == len(turns) == 1000
    assert max(turns.count(each) for each in set(turns)) <= TURN_COST // START_COST


async def test_no_more_is_started_when_one_has_failed(model_dir: Path) -> None:
    """The refusal of the first arrives while the others are being started."""
    async with running(model_dir, Script(fail_after=0), migration_limit=0) as cluster:
        body = {"prompt": ["a"] * 100, "n": 10, "max_tokens": 5}
        answer = await send(cluster.frontend.port, "POST", "/v1/completions", body)
        assert answer.status == 503
        assert len(cluster.workers["w0"].requests) < 1000
        await cluster.until(lambda: cluster.frontend.metrics.num_in_flight_of() == 0)


async def test_too_many_sequences_are_refused_before_anything_is_tokenized(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model_dir, Script((10,)), max_waiting_requests=8) as cluster:
        monkeypatch.setattr(tokenizer.Tokenizer, "encode_texts", None)
        answer = await send(cluster.frontend.port, "POST", "/v1/completions", {"prompt": ["a"] * 3, "n": 3})
        assert answer.status == 400
        assert answer.error["param"] == "n"


async def test_a_text_that_cannot_fit_is_not_tokenized(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        model = cluster.frontend.cluster.model(None)
        max_chars = model.tokenizer.max_chars_per_token * model.max_model_len
        monkeypatch.setattr(tokenizer.Tokenizer, "encode_batch", None)
        answer = await send(cluster.frontend.port, "POST", "/v1/completions", {"prompt": "x" * (max_chars + 1)})
        assert answer.status == 400
        assert (answer.error["param"], answer.error["code"]) == ("prompt", "context_length_exceeded")
        assert answer.error["message"].startswith(KNOWN_BEGINNING)
        messages = [{"role": "user", "content": "x" * max_chars}]
        answer = await send(cluster.frontend.port, "POST", "/v1/chat/completions", {"messages": messages})
        assert answer.status == 400
        assert (answer.error["param"], answer.error["code"]) == ("messages", "context_length_exceeded")
        assert answer.error["message"].startswith(KNOWN_BEGINNING)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("num_chars", [600, 5000])
async def test_clients_know_a_prompt_that_is_too_long_by_the_words(model_dir: Path, path: str, num_chars: int) -> None:
    """litellm falls back to another model, and Claude Code compacts the conversation; neither reads the code."""
    prompt, words = "x " * (num_chars // 2), "prompt is too long: " if path == "/v1/messages" else ""
    body: dict[str, object] = {"max_tokens": 5, "messages": [{"role": "user", "content": prompt}]}
    async with running(model_dir, Script((10,))) as cluster:
        answer = await send(
            cluster.frontend.port, "POST", path, {"prompt": prompt} if path == "/v1/completions" else body
        )
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith(words + KNOWN_BEGINNING)


async def test_tokens_are_checked_once_per_request(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once per sequence: a thousand of a thousand would be a million."""
    calls = []
    check = SamplingParams.validate_tokens

    def counted(self: SamplingParams, vocab_size: int | None) -> None:
        calls.append(vocab_size)
        check(self, vocab_size)

    monkeypatch.setattr(SamplingParams, "validate_tokens", counted)
    async with running(model_dir, Script((10,))) as cluster:
        calls.clear()  # that of the model's own defaults
        body = {"prompt": ["a"] * 10, "n": 10, "max_tokens": 1, "stop_token_ids": [3] * 1000}
        assert (await send(cluster.frontend.port, "POST", "/v1/completions", body)).status == 200
    assert calls == [None, 400]


@pytest.mark.parametrize(
    ("count", "length", "n", "stream", "status"),
    [
        (20, 2**18 // 28, 1, False, 200),
        (20, 2**18 // 28 + 1, 1, False, 400),
        (20, 2**17 // 28, 1, True, 200),
        (20, 2**17 // 28 + 1, 1, True, 400),
        (1, 500, 2**21 // 4500 + 1, False, 400),
    ],
)
async def test_logprobs_of_prompts_are_bounded(
    model_dir: Path, count: int, length: int, n: int, stream: bool, status: int
) -> None:
    async with running(model_dir, Script((10,)), max_n=2000) as cluster:
        await cluster.register(cluster.workers["w0"], max_model_len=16384)
        model = cluster.frontend.cluster.model(None)
        await cluster.until(lambda: model.max_model_len == 16384)
        body = {"prompt": [5] * length, "n": n, "prompt_logprobs": count, "max_tokens": 1, "stream": stream}
        answer = await send(cluster.frontend.port, "POST", "/v1/completions", body)
        assert answer.status == status
        assert bool(cluster.workers["w0"].requests) == (status == 200)
        if status == 400:
            assert answer.error["param"] == "prompt_logprobs"
