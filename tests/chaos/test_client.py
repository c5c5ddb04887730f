"""The clients of a chaos run, against a server that breaks connections: who has failed, and who only comes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest
from tests.chaos.answers import KnownPrompt, Verdict
from tests.chaos.client import ChaosClient
from tests.patience import listening

PROMPT = KnownPrompt((20, 21), 3, stream=True, answer=(1, 2, 3))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
REFUSED = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
FIRST = b'data: {"choices":[{"token_ids":[1]}]}\n\n'
REST = b'data: {"choices":[{"token_ids":[2,3],"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[str]:
    """A server that gives the first connection the first answer and so on, and closes each; gives its URL."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if b"content-length" in line)
        await reader.readexactly(length)
        writer.write(left.pop(0))
        await writer.drain()

    async with listening(answer) as port:
        yield f"http://127.0.0.1:{port}"
    assert not left


@pytest.mark.parametrize("broken", [HEAD + FIRST, b""], ids=["in the stream", "before it"])
async def test_who_loses_a_killed_frontend_begins_anew_in_the_same_record(broken: bytes) -> None:
    async with answering(broken, broken, HEAD + FIRST + REST) as url, ChaosClient(url, "m") as client:
        with client.frontend_away():
            record = await client.ask(PROMPT)
    assert (record.verdict, record.detail) == (Verdict.RIGHT, "prompt of 2 tokens: 3 of 3 tokens, equal up to 3")
    assert len(record.arrivals_s) == 2 + 2 * bool(broken)
    assert client.num_reconnected == 1
    assert client.records == [record]


@pytest.mark.parametrize(
    ("answer", "is_away"),
    [(HEAD + FIRST, False), (b"", False), (REFUSED, True)],
    ids=["a stream that breaks", "a connection that breaks", "an error status while a frontend is dead"],
)
async def test_whatever_no_killed_frontend_explains_is_a_failure(answer: bytes, is_away: bool) -> None:
    async with answering(answer) as url, ChaosClient(url, "m") as client:
        with client.frontend_away() if is_away else nullcontext():
            record = await client.ask(PROMPT)
    assert record.verdict is Verdict.FAILED
    assert client.num_reconnected == 0


async def test_who_was_about_to_leave_does_not_mind_a_killed_frontend() -> None:
    async with answering(HEAD + FIRST, HEAD + FIRST + REST) as url, ChaosClient(url, "m") as client:
        with client.frontend_away():
            await client.leave_after(PROMPT, 2)
            await client.leave_after(PROMPT, 1)
    assert (client.num_cancelled, client.num_reconnected, client.records) == (2, 0, [])


async def test_a_refused_client_comes_again_when_it_was_told_to() -> None:
    refused = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}"
    async with answering(refused, HEAD + FIRST + REST, refused) as url, ChaosClient(url, "m") as client:
        assert (await client.ask(PROMPT)).verdict is Verdict.RIGHT
        record = await client.ask(PROMPT, patient=False)
    assert (record.verdict, record.detail) == (Verdict.REFUSED, "refused 1 times")
    assert client.num_refused == 2


async def test_an_answer_that_is_not_streamed_is_judged_as_a_whole() -> None:
    body = b'{"choices":[{"token_ids":[1,2,2,3],"finish_reason":"length"}]}'
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with answering(whole) as url, ChaosClient(url, "m") as client:
        record = await client.ask(KnownPrompt((20, 21), 3, stream=False, answer=(1, 2, 3)))
    assert (record.verdict, len(record.arrivals_s)) == (Verdict.REPEATED, 1)


async def test_an_error_in_a_stream_is_a_failure_that_says_so() -> None:
    error = b'data: {"error":{"message":"the pool is gone"}}\n\n'
    async with answering(HEAD + FIRST + error) as url, ChaosClient(url, "m") as client:
        record = await client.ask(PROMPT)
    assert record.verdict is Verdict.FAILED
    assert "after 1 tokens" in record.detail
    assert "the pool is gone" in record.detail


async def test_a_request_without_a_byte_for_too_long_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.client.SILENCE_LIMIT_S", 0.05)
    silent = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silent.wait()

    async with listening(say_nothing) as port, ChaosClient(f"http://127.0.0.1:{port}", "m") as client:
        record = await client.ask(PROMPT)
        silent.set()
    assert (record.verdict, record.detail) == (Verdict.HUNG, "no byte for 0.05 s after 0 tokens")
