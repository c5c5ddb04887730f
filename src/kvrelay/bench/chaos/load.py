"""Clients of a chaos run: they send known prompts over HTTP, compare every answer, and note when each chunk came.

Knows the OpenAI API with vLLM's token ids, and nothing of the cluster behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import aiohttp
import msgspec

from kvrelay.bench.chaos.answers import KnownPrompt, Verdict, judge
from kvrelay.bench.chaos.report import RequestRecord
from kvrelay.errors import KvrelayError, RetryElsewhereError

DrawPrompt = Callable[[random.Random], KnownPrompt]
"""The next prompt to ask."""
SILENCE_LIMIT_S = 30.0
"""A request without a byte for so long is hung."""
REFUSED_STATUSES = (429, 503)
MAX_REFUSALS = 60
RECONNECT_INTERVAL_S = 0.1


class RequestRefusedError(RetryElsewhereError):
    """429 or 503 with Retry-After, in seconds."""

    def __init__(self, status: int, retry_after_s: float) -> None:
        super().__init__(f"refused with {status}", retry_after_s=retry_after_s)


class RequestFailedError(KvrelayError):
    """An error status, or an error inside the stream."""


class ConnectionBrokeError(RequestFailedError):
    """A stream ended before the answer was whole."""


class Choice(msgspec.Struct):
    """What is read of a choice, of a chunk as well as of a whole answer."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None


class ErrorText(msgspec.Struct):
    message: str


class Answer(msgspec.Struct):
    """What is read of a chunk or of a whole answer."""

    choices: list[Choice] = []
    error: ErrorText | None = None


@dataclass(slots=True)
class RefusalCount:
    """Refusals so far, and the longest time that one took to arrive."""

    count: int = 0
    max_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.max_s = max(self.max_s, seconds)


class ChaosClient:
    """Sends prompts to one server and keeps a record of every request. An async context manager."""

    def __init__(self, url: str, model: str) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self.records: list[RequestRecord] = []
        self.refusals = RefusalCount()
        self.num_output_tokens = 0
        self.num_cancelled = 0
        self.num_reconnected = 0
        self._may_break = False

    async def __aenter__(self) -> ChaosClient:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENCE_LIMIT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @contextmanager
    def frontend_away(self) -> Iterator[None]:
        """Meanwhile a frontend is dead: whoever loses the connection comes again, and has not failed."""
        self._may_break = True
        try:
            yield
        finally:
            self._may_break = False

    # -- whole requests -----------------------------------------------------------------------------------------------

    async def keep_asking(self, draw: DrawPrompt, seed: int, stop: asyncio.Event) -> None:
        """One request after the other, until ``stop``."""
        rng = random.Random(seed)
        while not stop.is_set():
            await self.ask(draw(rng))

    async def ask(self, prompt: KnownPrompt, *, patient: bool = True) -> RequestRecord:
        """Send it and judge the answer; a patient client that is refused comes again when it was told to."""
        for attempt in itertools.count(1):
            record = RequestRecord(time.monotonic(), prompt.stream)
            tokens: list[int] = []
            try:
                await self._collect_whole(prompt, tokens, record)
            except RequestRefusedError as exc:
                self.refusals.add(time.monotonic() - record.begin_s)
                if patient and attempt < MAX_REFUSALS:
                    await asyncio.sleep(exc.retry_after_s)
                    continue
                record.verdict = Verdict.FAILED if patient else Verdict.REFUSED
                record.detail = f"refused {attempt} times"
            except aiohttp.SocketTimeoutError:
                record.verdict = Verdict.HUNG
                record.detail = f"no byte for {SILENCE_LIMIT_S:g} s after {len(tokens)} tokens"
            except (RequestFailedError, aiohttp.ClientError) as exc:
                record.verdict, record.detail = Verdict.FAILED, f"after {len(tokens)} tokens: {exc or repr(exc)}"
            else:
                record.verdict = judge(prompt.answer, tokens)
                record.detail = _describe(prompt, tokens)
            self.num_output_tokens += len(tokens)
            record.end_s = time.monotonic()
            self.records.append(record)
            return record
        raise AssertionError("the loop ends by return")

    async def answer(self, prompt: KnownPrompt) -> tuple[list[int], RequestRecord]:
        """The tokens, unjudged and unrecorded. Raises what ``_collect`` raises."""
        record = RequestRecord(time.monotonic(), prompt.stream)
        tokens: list[int] = []
        await self._collect(prompt, tokens, record)
        record.end_s = time.monotonic()
        return tokens, record

    # -- clients that leave -------------------------------------------------------------------------------------------

    async def leave_after(self, prompt: KnownPrompt, num_chunks: int) -> None:
        """Go away, cutting the connection, after so many chunks of the stream."""
        self.num_cancelled += 1
        with self._forgiven():
            async with self._session.post(self._url, json=self._body(prompt)) as response:
                if response.status == 200:
                    count = 0
                    async for _ in _chunks(response):
                        count += 1
                        if count >= num_chunks:
                            break
                response.close()

    async def leave_within(self, prompt: KnownPrompt, seconds: float) -> None:
        """Go away after ``seconds``, whether an answer has begun or not."""
        self.num_cancelled += 1
        with self._forgiven(), suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._session.post(self._url, json=self._body(prompt)) as response:
                await response.read()

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        """Who was about to leave does not mind that the frontend was faster."""
        try:
            yield
        except (RequestFailedError, aiohttp.ClientError) as exc:
            if not self._lost_frontend(exc):
                raise

    # -- the protocol -------------------------------------------------------------------------------------------------

    def _body(self, prompt: KnownPrompt) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": list(prompt.token_ids),
            "max_tokens": prompt.max_tokens,
            "temperature": prompt.temperature,
            "stream": prompt.stream,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if prompt.seed is not None:
            body["seed"] = prompt.seed
        return body

    async def _collect_whole(self, prompt: KnownPrompt, tokens: list[int], record: RequestRecord) -> None:
        """As ``_collect``; who loses the frontend sends the request again and begins anew. The record goes on, so the
        pause lasts until the new answer's first token."""
        for attempt in itertools.count():
            try:
                return await self._collect(prompt, tokens, record)
            except (RequestFailedError, aiohttp.ClientError) as exc:
                if not self._lost_frontend(exc):
                    raise
            if attempt == 0:
                self.num_reconnected += 1
            tokens.clear()
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    def _lost_frontend(self, exc: Exception) -> bool:
        """Whether the connection broke while a frontend is dead. One that is silent has not broken."""
        return (
            self._may_break
            and isinstance(exc, ConnectionBrokeError | aiohttp.ClientConnectionError | aiohttp.ClientPayloadError)
            and not isinstance(exc, aiohttp.ServerTimeoutError)
        )

    async def _collect(self, prompt: KnownPrompt, tokens: list[int], record: RequestRecord) -> None:
        """Append the answer's tokens to ``tokens`` as they come."""
        async with self._session.post(self._url, json=self._body(prompt)) as response:
            if response.status != 200:
                await _raise_status(response)
            if not prompt.stream:
                answer = msgspec.json.decode(await response.read(), type=Answer)
                record.arrivals_s.append(time.monotonic())
                tokens += answer.choices[0].token_ids or []
                return
            finish = None
            async for chunk in _chunks(response):
                if chunk.error is not None:
                    raise RequestFailedError(f"error in the stream: {chunk.error.message}")
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    if choice.token_ids:
                        record.arrivals_s.append(time.monotonic())
                        tokens += choice.token_ids
            if finish is None:
                raise RequestFailedError("the stream ended without a finish reason")


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Answer]:
    """The values of a server-sent stream. Raises ConnectionBrokeError when it ends without its end mark."""
    async for line in response.content:
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            yield msgspec.json.decode(line[len(b"data: ") :], type=Answer)
    raise ConnectionBrokeError("the stream broke off")


async def _raise_status(response: aiohttp.ClientResponse) -> None:
    text = (await response.text())[:200]
    retry_after = response.headers.get("Retry-After")
    if response.status in REFUSED_STATUSES and retry_after is not None:
        raise RequestRefusedError(response.status, float(retry_after))
    raise RequestFailedError(f"status {response.status}: {text}")


def _describe(prompt: KnownPrompt, tokens: Sequence[int]) -> str:
    """Where an answer departs from the known one."""
    pairs = enumerate(zip(prompt.answer, tokens))
    first = next((i for i, (known, got) in pairs if known != got), min(len(prompt.answer), len(tokens)))
    return (
        f"prompt of {len(prompt.token_ids)} tokens{'' if prompt.seed is None else ', sampled'}: "
        f"{len(tokens)} of {len(prompt.answer)} tokens, equal up to {first}"
    )
