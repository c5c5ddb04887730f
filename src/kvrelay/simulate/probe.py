"""The small load of ``kvrelay simulate calibrate``: streams one after another, in phases by length of the prompt, and
then many at once, since cores, caches and memory that workers share are slower when all of them work.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from kvrelay.errors import InvalidInputError, WorkerUnavailableError
from kvrelay.simulate.calibrate import Counters, Phase, Stream

ANSWER_TOKENS = 32
TIMEOUT_S = 120.0
AT_ONCE = 6
FIRST_TOKEN, NUM_TOKENS = 32, 200
"""Ids that every vocabulary has."""

Send = Callable[[list[int]], Awaitable[tuple[float, ...]]]
"""``send(prompt)``: the times of the answer's tokens after the sending."""


async def probe(
    send: Send, count: Callable[[], Awaitable[Counters]], lengths: Sequence[int], num_streams: int, seed: int
) -> list[Phase]:
    """``num_streams`` fresh prompts of each length, and one more before them that is not counted: it connects peers and
    warms up. ``count`` reads the workers' counters."""
    rng = random.Random(seed)

    async def stream(length: int) -> Stream:
        return Stream(length, await send(rng.choices(range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS), k=length)))

    phases = []
    for length in lengths:
        await stream(length)
        before = await count()
        streams = [await stream(length) for _ in range(num_streams)]
        phases.append(Phase(tuple(streams), (await count()).since(before)))
    return phases


async def keep_busy(send: Send, lengths: Sequence[int], num_workers: int, num_streams: int, seed: int) -> None:
    """``AT_ONCE`` clients for each worker, with ``num_streams`` prompts each: long ones run beside answers."""
    rng = random.Random(seed + 1)
    prompts = [
        [rng.choices(range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS), k=length) for length in lengths * num_streams]
        for _ in range(AT_ONCE * num_workers)
    ]

    async def client(own: list[list[int]]) -> None:
        for prompt in own[:num_streams]:
            await send(prompt)

    await asyncio.gather(*(client(own[number % len(lengths) :]) for number, own in enumerate(prompts)))


def http_sender(url: str, model: str, api_key: str | None) -> Send:
    """Sends to a frontend's ``/v1/completions``. Raises InvalidInputError for a bad URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInputError(f"{url!r} is not an http URL", param="url")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    host, port = parts.hostname, parts.port
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def call(prompt: list[int]) -> tuple[float, ...]:
        body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
        connection = kind(host, port, timeout=TIMEOUT_S)
        try:
            connection.connect()
            sent_s = time.monotonic()
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise InvalidInputError(
                    f"{url} answers {response.status}: {response.read(300).decode(errors='replace')}"
                )
            return tuple(
                time.monotonic() - sent_s
                for line in response
                if line.startswith(b"data: {") and b'"choices":[{' in line
            )
        except (OSError, http.client.HTTPException) as exc:
            raise WorkerUnavailableError(f"no frontend answers at {url}: {exc or type(exc).__name__}") from exc
        finally:
            connection.close()

    async def send(prompt: list[int]) -> tuple[float, ...]:
        return await asyncio.to_thread(call, prompt)

    return send
