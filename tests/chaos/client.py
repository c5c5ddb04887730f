"""Clients of a chaos run: they send known prompts, compare every answer, and note the time of each chunk.

They know the OpenAI API with vLLM's token ids, and not the cluster behind it. No connection is used twice, so that a
broken connection is always the failure of its own request.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
from tests.chaos.answers import KnownPrompt, Verdict, judge
from tests.chaos.report import AskedPrompt

from kvrelay.bench.client.connection import ConnectionPool, parse_target
from kvrelay.bench.client.stream import DONE, MAX_EVENT_BYTES, Chunk, StreamEndpoint, decode_chunk, events_in
from kvrelay.bench.errors import BadResponseError, BenchError, ServerDownError
from kvrelay.core.decoding import error_text
from kvrelay.core.event_stream import EventParser
from kvrelay.core.handoff import OrderPolicy
from kvrelay.errors import RetryElsewhereError

DrawPrompt = Callable[[random.Random], KnownPrompt]
"""The next prompt to ask."""
SILENCE_LIMIT_S = 30.0
"""A request without a byte for this long has hung."""
REFUSED_STATUSES = (429, 503)
MAX_REFUSALS = 60
RECONNECT_INTERVAL_S = 0.1


class RequestRefusedError(RetryElsewhereError):
    """429 or 503 with Retry-After, in seconds."""

    def __init__(self, status: int, retry_after_s: float) -> None:
        super().__init__(f"refused with {status}", retry_after_s=retry_after_s)


class _LeftError(BadResponseError):
    """The client leaves before the end of the answer."""


class ChaosClient:
    """Sends prompts to one server and keeps a record of every request. An async context manager."""

    def __init__(self, url: str, model: str, order: OrderPolicy | None = None, *, api_key: str | None = None) -> None:
        self._pool = ConnectionPool(parse_target(url, api_key, order), connect_timeout_s=5.0, reuse=False)
        self._model = model
        self.records: list[AskedPrompt] = []
        self.num_refused = 0
        self.refusal_max_s = 0.0
        self.num_output_tokens = 0
        self.num_cancelled = 0
        self.num_reconnected = 0
        self._may_break = False

    async def __aenter__(self) -> ChaosClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    @contextmanager
    def frontend_away(self) -> Iterator[None]:
        """While a frontend is dead, a request that loses its connection is sent again and does not count as failed."""
        self._may_break = True
        try:
            yield
        finally:
            self._may_break = False

    # -- whole requests -----------------------------------------------------------------------------------------------

    async def keep_asking(self, draw: DrawPrompt, seed: int, stop: asyncio.Event) -> None:
        """Send one request after the other, until ``stop``."""
        rng = random.Random(seed)
        while not stop.is_set():
            await self.ask(draw(rng))

    async def ask(self, prompt: KnownPrompt, *, patient: bool = True) -> AskedPrompt:
        """Send it and judge the answer; a patient client that is refused retries after the given time."""
        for attempt in itertools.count(1):
            record = AskedPrompt(time.monotonic(), prompt.stream)
            record.token_ids, record.answer, record.tenant = prompt.token_ids, prompt.answer, prompt.api_key or ""
            tokens: list[int] = []
            try:
                await self._collect_whole(prompt, tokens, record)
            except RequestRefusedError as exc:
                self.num_refused += 1
                self.refusal_max_s = max(self.refusal_max_s, time.monotonic() - record.begin_s)
                if patient and attempt < MAX_REFUSALS:
                    await asyncio.sleep(exc.retry_after_s)
                    continue
                record.verdict = Verdict.FAILED if patient else Verdict.REFUSED
                record.detail = f"refused {attempt} times"
            except TimeoutError:
                record.verdict = Verdict.HUNG
                record.detail = f"no byte for {SILENCE_LIMIT_S:g} s after {len(tokens)} tokens"
            except BenchError as exc:
                record.verdict, record.detail = Verdict.FAILED, f"after {len(tokens)} tokens: {exc}"
            else:
                record.verdict = judge(prompt.answer, tokens)
                record.detail = _describe(prompt, tokens)
            self.num_output_tokens += len(tokens)
            record.end_s = time.monotonic()
            self.records.append(record)
            return record
        raise AssertionError("the loop ends by return")

    async def answer(self, prompt: KnownPrompt) -> tuple[list[int], AskedPrompt]:
        """The answer's tokens, neither judged nor recorded. Raises BenchError, RequestRefusedError, TimeoutError."""
        record = AskedPrompt(time.monotonic(), prompt.stream)
        tokens: list[int] = []
        await self._collect(prompt, tokens, record)
        record.end_s = time.monotonic()
        return tokens, record

    async def _collect_whole(self, prompt: KnownPrompt, tokens: list[int], record: AskedPrompt) -> None:
        """Like ``_collect``, but a request that loses its frontend is sent again. The record continues, so the pause
        lasts until the new answer's first token."""
        for attempt in itertools.count():
            try:
                return await self._collect(prompt, tokens, record)
            except ServerDownError:
                if not self._may_break:
                    raise
            if attempt == 0:
                self.num_reconnected += 1
            tokens.clear()
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    async def _collect(self, prompt: KnownPrompt, tokens: list[int], record: AskedPrompt) -> None:
        """Append the answer's tokens to ``tokens`` as they arrive."""
        finished = False

        def take(chunk: Chunk) -> None:
            nonlocal finished
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                record.num_cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
            for choice in chunk.choices:
                finished = finished or choice.finish_reason is not None
                if choice.token_ids:
                    record.arrivals_s.append(time.monotonic())
                    tokens.extend(choice.token_ids)

        record.worker = await self._post(prompt, take)
        if not finished:
            raise BadResponseError("the answer ended without a finish reason")

    # -- clients that leave -------------------------------------------------------------------------------------------

    async def leave_after(self, prompt: KnownPrompt, num_chunks: int) -> None:
        """Leave, cutting the connection, after this many chunks of the stream."""
        left = num_chunks

        def take(_: Chunk) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise _LeftError("the client left")

        await self._leave(prompt, take, SILENCE_LIMIT_S)

    async def leave_within(self, prompt: KnownPrompt, seconds: float) -> None:
        """Leave after ``seconds``, whether an answer has begun or not."""
        await self._leave(prompt, lambda _: None, seconds)

    async def _leave(self, prompt: KnownPrompt, take: Callable[[Chunk], None], seconds: float) -> None:
        """A client that is refused, or whose frontend is killed before it leaves, does not count as failed."""
        self.num_cancelled += 1
        try:
            with suppress(_LeftError, RequestRefusedError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._post(prompt, take)
        except ServerDownError:
            if not self._may_break:
                raise

    # -- the protocol -------------------------------------------------------------------------------------------------

    async def _post(self, prompt: KnownPrompt, take: Callable[[Chunk], None]) -> str:
        """Send the prompt; ``take`` gets each chunk of a stream, or the whole answer. The worker that gave it. Raises
        RequestRefusedError, ServerDownError when the connection breaks, BadResponseError, TimeoutError after
        SILENCE_LIMIT_S of silence."""
        body = self._body(prompt)
        splitter = EventParser(MAX_EVENT_BYTES)
        is_done = False
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(SILENCE_LIMIT_S) as silence:

            def feed(_: int, data: bytes) -> None:
                nonlocal is_done
                silence.reschedule(clock() + SILENCE_LIMIT_S)
                for event in events_in(splitter, data):
                    if event == DONE:
                        is_done = True
                    else:
                        take(decode_chunk(event))

            target = self._pool.target
            if prompt.api_key is not None:
                target = msgspec.structs.replace(target, api_key=prompt.api_key)
            head = target.head("POST", StreamEndpoint.COMPLETIONS.value, len(body))
            answer = await self._pool.send(head + body, feed)
        if answer.status in REFUSED_STATUSES and answer.retry_after is not None:
            raise RequestRefusedError(answer.status, float(answer.retry_after))
        if answer.status != 200:
            raise BadResponseError(f"status {answer.status}: {error_text(answer.body)}")
        if not prompt.stream:
            take(decode_chunk(answer.body))
        elif not is_done:
            raise ServerDownError("the stream broke off")
        return answer.worker

    def _body(self, prompt: KnownPrompt) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt.token_ids,
                "max_tokens": prompt.max_tokens,
                "temperature": prompt.temperature,
                "stream": prompt.stream,
                "ignore_eos": True,
                "return_token_ids": True,
                **({} if prompt.seed is None else {"seed": prompt.seed}),
                **({} if prompt.hints is None else {"kv_hints": prompt.hints}),
                **({"stream_options": {"include_usage": True}} if prompt.stream else {}),
            }
        )


def _describe(prompt: KnownPrompt, tokens: Sequence[int]) -> str:
    """The place where an answer differs from the known one."""
    pairs = enumerate(zip(prompt.answer, tokens))
    first = next((i for i, (known, got) in pairs if known != got), min(len(prompt.answer), len(tokens)))
    return (
        f"prompt of {len(prompt.token_ids)} tokens{'' if prompt.seed is None else ', sampled'}: "
        f"{len(tokens)} of {len(prompt.answer)} tokens, equal up to {first}"
    )
