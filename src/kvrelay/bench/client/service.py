"""Other queries to a server: its health, its model, the number of tokens of a text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from kvrelay.bench.client.connection import ConnectionPool
from kvrelay.bench.errors import BadResponseError, BenchError, ServerDownError
from kvrelay.core.decoding import UNREADABLE, error_text

_T = TypeVar("_T", bound=msgspec.Struct)
_POLL_S = 0.1
_TOKENIZE_AT_ONCE = 4
ASK_TIMEOUT_S = 60.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _TokenCount(msgspec.Struct):
    count: int | None = None
    tokens: list[int] | None = None


class _Text(msgspec.Struct):
    prompt: str


async def first_model(pool: ConnectionPool) -> str:
    """The id of the first model at ``/v1/models``. Raises ServerDownError, BadResponseError."""
    models = await ask(pool, "/v1/models", _Models)
    if not models.data:
        raise BadResponseError(f"{pool.target.url} serves no model")
    return models.data[0].id


async def wait_until_healthy(
    pool: ConnectionPool, timeout_s: float, check_alive: Callable[[], None] = lambda: None
) -> None:
    """Poll ``/health`` until it says 200. ``check_alive`` raises if waiting has become pointless.

    Raises ServerDownError after ``timeout_s`` seconds.
    """
    last = "no answer yet"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                check_alive()
                try:
                    answer = await pool.send(pool.target.head("GET", "/health", 0))
                except BenchError as exc:
                    last = exc.message
                else:
                    if answer.status == 200:
                        return
                    last = f"HTTP {answer.status}"
                await asyncio.sleep(_POLL_S)
    except TimeoutError as exc:
        raise ServerDownError(f"{pool.target.url} was not healthy within {timeout_s:g} s: {last}") from exc


async def count_tokens(pool: ConnectionPool, model: str, texts: Sequence[str]) -> int | None:
    """Tokens of all texts by the server's ``/tokenize``; None if the server has no such endpoint."""
    slots = asyncio.Semaphore(_TOKENIZE_AT_ONCE)

    async def one(text: str) -> int:
        async with slots:
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            found = await ask(pool, "/tokenize", _TokenCount, body)
        return found.count if found.count is not None else len(found.tokens or ())

    # Wait for all, also if one has failed: none may stay in flight.
    counts = await asyncio.gather(*(one(text) for text in texts if text), return_exceptions=True)
    total = 0
    for count in counts:
        if isinstance(count, BenchError):
            return None
        if isinstance(count, BaseException):
            raise count
        total += count
    return total


async def detokenize(pool: ConnectionPool, model: str, tokens: Sequence[int]) -> str:
    """The text of token ids by the server's ``/detokenize``. Raises BadResponseError if the server has no such
    endpoint."""
    return (await ask(pool, "/detokenize", _Text, {"model": model, "tokens": list(tokens)})).prompt


@asynccontextmanager
async def answered_within(timeout_s: float, where: str) -> AsyncIterator[None]:
    """Raises ServerDownError if the block takes longer: the server takes requests and answers none."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as exc:
        raise ServerDownError(f"{where} did not answer within {timeout_s:g} s") from exc


async def ask(
    pool: ConnectionPool, path: str, kind: type[_T], body: object = None, timeout_s: float | None = None
) -> _T:
    """GET, or POST of ``body``. Raises BadResponseError for a status other than 200 and an answer of another kind,
    ServerDownError for none within ``timeout_s``, which is ASK_TIMEOUT_S unless given."""
    content = b"" if body is None else msgspec.json.encode(body)
    where = f"{pool.target.url}{path}"
    async with answered_within(timeout_s or ASK_TIMEOUT_S, where):
        answer = await pool.send(pool.target.head("GET" if body is None else "POST", path, len(content)) + content)
    if answer.status != 200:
        raise BadResponseError(f"{where}: HTTP {answer.status}: {error_text(answer.body)}")
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except UNREADABLE as exc:
        raise BadResponseError(f"{where} answered something unexpected: {exc}") from exc
