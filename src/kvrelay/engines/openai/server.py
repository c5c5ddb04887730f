"""The HTTP side: a server with the OpenAI API, over kept connections.

It knows URLs, headers, status codes and how a stream of events is cut into lines. It never repeats a request: the
cluster, which knows the tokens so far, decides about retries.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any

import aiohttp
import msgspec

from kvrelay.config import UpstreamConfig
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.event_stream import EventParser, EventTooLongError
from kvrelay.engines.hosted.backend import AnswerError, BackendRefusedError, one_line
from kvrelay.engines.openai.address import address_of
from kvrelay.engines.openai.wire import TextPiece, parse_event
from kvrelay.errors import ConfigError, EngineDeadError
from kvrelay.marks.trace_context import HEADER, followed

_log = logging.getLogger(__name__)

START_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
KEPT_S = 4.0
"""Idle connections are closed after it: before the server does, which takes 5 s with uvicorn's default."""
END_TIMEOUT_S = 1.0
"""A connection is kept only if its answer is over so soon after the last event."""
DONE = b"[DONE]"
JSON = {"Content-Type": "application/json"}
MAX_BODY_PART_BYTES = 1 << 16
MAX_EVENT_BYTES = 8 << 20
MAX_ANSWER_BYTES = 8 << 20
"""Size limit of an answer that is not streamed: a list of models, a refusal."""
MAX_QUIET_BYTES = 2 * MAX_EVENT_BYTES
"""Size limit of what comes between two tokens: comments, and events without any."""
MAX_RETRY_AFTER_S = 600.0

SHORT = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
FAILURES = (aiohttp.ClientError, OSError)


class Description(msgspec.Struct, frozen=True):
    """Facts reported by a server. ``max_model_len`` is 0 if it reports none. ``adapter``: the model's name, if the
    server has it as an adapter (LoRA) of another model."""

    model: str
    max_model_len: int
    tells_token_ids: bool
    adapter: str = ""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class UpstreamServer:
    """One server. Make, use and close it in one event loop.

    ``upstream_timeout_s`` bounds the wait for an answer's head, for its body if it is not streamed, and for progress:
    bytes that bring no token, such as comments, extend no deadline.
    """

    def __init__(self, config: UpstreamConfig) -> None:
        address = address_of(config)
        self._config = config
        self.url = address.url
        # Compressed events would be held back until a block is full.
        headers = {"Accept-Encoding": "identity"}
        if address.authorization:
            headers["Authorization"] = address.authorization
        self._client = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=HEALTH_TIMEOUT_S, sock_read=config.upstream_timeout_s or None
            ),
            connector=aiohttp.TCPConnector(limit=0, ssl=_trusted(config), keepalive_timeout=KEPT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Not trust_env: that reads ~/.netrc before each request, for a password in the place of our key.
            proxy=address.proxy,
        )

    async def close(self) -> None:
        """End its streams before: no error reaches one that still waits."""
        await self._client.close()

    async def describe(self, probe_token_id: int, probe_fields: dict[str, Any] | None = None) -> Description:
        """Wait until the server answers, for ``upstream_start_timeout_s``; then request its model, and one token to
        find out whether it returns token ids. ``probe_fields`` are added to that request.

        Raises ConfigError for a server that has another model or refuses the key; EngineDeadError after the timeout.
        """
        deadline_s = time.monotonic() + self._config.upstream_start_timeout_s
        is_notified = False
        while True:
            try:
                model = self._choose(await self._get_models())
                tells_token_ids = await self._probe(model.id, probe_token_id, probe_fields or {})
                return Description(
                    model.id, model.max_model_len or 0, tells_token_ids, model.id if model.parent else ""
                )
            except (*FAILURES, BackendRefusedError, AnswerError) as exc:
                if isinstance(exc, BackendRefusedError) and exc.status in (400, 401, 403, 404, 422):
                    raise ConfigError(
                        f"the server {self.url} refuses us: status {exc.status}, {exc.detail}", param="upstream"
                    ) from exc
                if time.monotonic() > deadline_s:
                    raise EngineDeadError(f"the server {self.url} is not ready: {one_line(exc)}") from exc
                if not is_notified:
                    _log.info("waiting for the server %s: %s", self.url, one_line(exc))
                    is_notified = True
                await asyncio.sleep(START_INTERVAL_S)

    async def is_healthy(self) -> bool:
        """Whether it answers ``/health`` with less than 500; a server without that path is healthy as well."""
        try:
            async with self._get("/health") as response:
                return response.status < 500
        except FAILURES:
            return False

    async def stream(self, body: dict[str, Any], traceparent: str = "") -> AsyncGenerator[TextPiece, None]:
        """The pieces of one completion. Close the iterator to abort it.

        Raises BackendRefusedError before the first piece, AnswerError for a broken or incomplete answer.
        """
        timeout_s = self._config.upstream_timeout_s
        num_quiet_bytes, progress_s = 0, time.monotonic()
        try:
            async with await self._post(body, traceparent) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async with aclosing(_events(response)) as received:
                    async for num_bytes, events in received:
                        num_quiet_bytes += num_bytes
                        for data in events:
                            piece = parse_event(data)
                            if piece.token_ids or (piece.token_ids is None and piece.text):
                                num_quiet_bytes, progress_s = 0, time.monotonic()
                            yield piece
                            if piece.finish is not None:
                                await _read_end(response)
                                return
                        if num_quiet_bytes > MAX_QUIET_BYTES or time.monotonic() - progress_s > timeout_s:
                            raise AnswerError(
                                f"{self.url} sends, but no token in {timeout_s:g} s or {num_quiet_bytes} bytes"
                            )
        except FAILURES as exc:
            raise AnswerError("the connection to the server failed", detail=f"{self.url}: {one_line(exc)}") from exc
        raise AnswerError("the server ended its stream in the middle of an answer", detail=self.url)

    async def complete(self, body: dict[str, Any], traceparent: str = "") -> bytes:
        """One completion in one piece: the answer's JSON. Cancel the call to abort it.

        Raises BackendRefusedError, and AnswerError for a broken or too long answer.
        """
        try:
            async with await self._post(body, traceparent) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async with asyncio.timeout(self._config.upstream_timeout_s):
                    answer, is_whole = await _read(response)
        except FAILURES as exc:
            raise AnswerError("the connection to the server failed", detail=f"{self.url}: {one_line(exc)}") from exc
        if not is_whole:
            raise AnswerError(f"an answer of the server has more than {MAX_ANSWER_BYTES} bytes")
        return answer

    async def _post(self, body: dict[str, Any], traceparent: str) -> aiohttp.ClientResponse:
        text = msgspec.json.encode(body)
        # From a file a large body is sent in parts, so that other answers go on meanwhile.
        data = text if len(text) <= MAX_BODY_PART_BYTES else io.BytesIO(text)
        async with asyncio.timeout(self._config.upstream_timeout_s):
            url = f"{self.url}/v1/completions"
            headers = {**JSON, HEADER: traceparent} if followed(traceparent) else JSON
            return await self._client.post(url, data=data, headers=headers, allow_redirects=False)

    def _get(self, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._client.get(f"{self.url}{path}", timeout=SHORT, allow_redirects=False)

    async def _get_models(self) -> list[_Model]:
        async with self._get("/v1/models") as response:
            if response.status != 200:
                raise await _refusal(response)
            text, _ = await _read(response)
        try:
            return msgspec.json.decode(text, type=_Models).data
        except UNREADABLE as exc:
            raise AnswerError(f"/v1/models is no list of models: {exc}") from exc

    def _choose(self, models: list[_Model]) -> _Model:
        wanted = self._config.upstream_model
        names = ", ".join(model.id for model in models[:20]) or "none"
        found = [model for model in models if not wanted or model.id == wanted]
        if wanted and not found:
            raise ConfigError(
                f"the server {self.url} does not have the model {wanted}; it has {names}", param="upstream_model"
            )
        if len(found) != 1:
            raise ConfigError(
                f"the server {self.url} has {len(found)} models ({names}); choose one with --upstream-model",
                param="upstream_model",
            )
        return found[0]

    async def _probe(self, model: str, token_id: int, fields: dict[str, Any]) -> bool:
        body = {
            "model": model,
            "prompt": [token_id],
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
            **fields,
        }
        return any([bool(piece.token_ids) async for piece in self.stream(body)])


def _trusted(config: UpstreamConfig) -> ssl.SSLContext | bool:
    if not config.upstream_ca:
        return True
    try:
        return ssl.create_default_context(cafile=config.upstream_ca)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"cannot read {config.upstream_ca}: {exc}", param="upstream_ca") from exc


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[tuple[int, list[bytes]], None]:
    """As bytes come: how many, and the data of the server-sent events that end in them, up to ``[DONE]``. Raises
    AnswerError for an event that does not end."""
    parser = EventParser(MAX_EVENT_BYTES)
    async for received in response.content.iter_any():
        try:
            events = parser.feed(received)
        except EventTooLongError as exc:
            raise AnswerError(exc.message) from exc
        if DONE in events:
            yield len(received), events[: events.index(DONE)]
            return
        yield len(received), events
    yield 0, [data for data in parser.end() if data != DONE]


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """Wait for the end of the answer, which most servers send by itself: before it the connection cannot be kept."""
    with suppress(*FAILURES):
        async with asyncio.timeout(END_TIMEOUT_S):
            while await response.content.readany():
                pass


async def _read(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """The answer's first MAX_ANSWER_BYTES, and whether these are all."""
    answer = bytearray()
    async for received in response.content.iter_any():
        answer += received
        if len(answer) > MAX_ANSWER_BYTES:
            return bytes(answer[:MAX_ANSWER_BYTES]), False
    return bytes(answer), True


async def _refusal(response: aiohttp.ClientResponse) -> BackendRefusedError:
    text = b""
    with suppress(*FAILURES):
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            text, _ = await _read(response)
    said = " ".join(text[:500].decode(errors="replace").split())
    if "location" in response.headers:
        said = f"redirects are not followed; this one is to {response.headers['location'][:200]!r}"
    try:
        retry_after_s = float(response.headers.get("retry-after", "1"))
    except ValueError:
        retry_after_s = 1.0
    retry_after_s = 1.0 if math.isnan(retry_after_s) else min(max(retry_after_s, 0.1), MAX_RETRY_AFTER_S)
    message = f"the server refused the request with status {response.status}"
    return BackendRefusedError(
        message, response.status, retry_after_s, detail=f"{response.url.with_user(None)}: {said}"
    )
