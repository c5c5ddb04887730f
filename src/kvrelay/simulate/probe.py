"""The small load of ``kvrelay simulate calibrate``: streams one after another, in phases by length of the prompt, and
then many at once, since cores, caches and memory that workers share are slower when all of them work.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np

from kvrelay.bench.client.connection import ConnectionPool
from kvrelay.bench.client.stream import BodyOptions, StreamEndpoint, StreamRecorder, encode_body, run_stream
from kvrelay.bench.errors import BenchError
from kvrelay.bench.load.request import LoadRequest
from kvrelay.bench.report.metrics import Outcome
from kvrelay.control.base import Discovery
from kvrelay.simulate.calibrate import Counters, Phase, Stream

ANSWER_TOKENS = 32
TIMEOUT_S = 120.0
AT_ONCE = 6
NUM_LOOKS = 60
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


@asynccontextmanager
async def all_remote(
    discovery: Discovery, key: str, policies: Callable[[], Awaitable[set[str]]]
) -> AsyncIterator[None]:
    """Meanwhile every prefill goes to a prefill worker: the run-time setting ``key`` is ``always``, and what it was
    before after that. ``policies``: those that are in force at the workers now. Raises BenchError if they do not
    follow."""
    before = await discovery.get(key)
    try:
        await discovery.put(key, b'"always"')
        for _ in range(NUM_LOOKS):
            if await policies() == {"always"}:
                break
            await asyncio.sleep(TIMEOUT_S / NUM_LOOKS / 10)
        else:
            raise BenchError("the workers do not follow the run-time setting disagg.disagg_policy")
        yield
    finally:
        await (discovery.delete(key) if before is None else discovery.put(key, before))


async def keep_busy(send: Send, lengths: Sequence[int], num_workers: int, num_streams: int, seed: int) -> None:
    """``AT_ONCE`` clients for each worker, with ``num_streams`` prompts each: long ones run beside answers."""
    rng = random.Random(seed + 1)
    prompts = [
        [rng.choices(range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS), k=length) for length in tuple(lengths) * num_streams]
        for _ in range(AT_ONCE * num_workers)
    ]

    async def client(own: list[list[int]]) -> None:
        for prompt in own[:num_streams]:
            await send(prompt)

    await asyncio.gather(*(client(own[number % len(lengths) :]) for number, own in enumerate(prompts)))


def frontend_sender(pool: ConnectionPool, model: str) -> Send:
    """Sends to a frontend's ``/v1/completions``. What it returns raises BenchError for a request that fails."""
    options = BodyOptions(model)

    async def send(prompt: list[int]) -> tuple[float, ...]:
        body = encode_body(LoadRequest(tuple(prompt), ANSWER_TOKENS), options)
        recorder = StreamRecorder("probe", len(prompt))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                record = await run_stream(pool, StreamEndpoint.COMPLETIONS, body, recorder)
        except TimeoutError as exc:
            raise BenchError(f"{pool.target.url}: no answer within {TIMEOUT_S:g} s") from exc
        if record.outcome is not Outcome.OK:
            raise BenchError(f"{pool.target.url}: {record.error}")
        seconds = (np.asarray(record.stamps_ns, np.int64) - record.written_ns) / 1e9
        return tuple(np.repeat(seconds, record.tokens).tolist())

    return send
