"""Bounds that requests meet in real processes: the KV watermark, and deadlines that end work wherever it is.

Pools are small and prefills slow, so that a few long prompts are more than there is room for.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator

import aiohttp
import httpx
import pytest
from tests.patience import PATIENCE_S, stop, until
from tests.system.serving import Serve, by_threshold
from tests.system.streams import CONFIG, EOS_IDS, NUM_STREAMS, Streams

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_BLOCKS, BLOCK_SIZE, WATERMARK = 256, 16, 2
LONG = 100 * BLOCK_SIZE
"""Tokens of a long prompt: of 100 blocks each, five and what is in flight already are above the watermark."""

_salts = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    flags = ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE), "--kv-watermark", str(WATERMARK)]
    flags += ["--max-num-batched-tokens", "64", "--prefill-base-s", "0.03", *by_threshold(400)]
    # Order auto sends a prompt to both workers once their costs are known: then none is in the queue.
    flags += ["--order", "decode-first"]
    with Serve(("--engine", "mock", "--prefill", "1", "--decode", "1", *flags)) as running:
        yield running
    assert running.process.returncode == 0, running.output


def new_prompt() -> list[int]:
    """A long one that no cache knows."""
    salt, low = 2 * next(_salts) + 1, 16
    return [(salt * position) % (CONFIG["vocab_size"] - 20) + low for position in range(1, LONG)]


async def ask(session: aiohttp.ClientSession, server: Serve) -> tuple[int, int | None]:
    """Status and Retry-After of a long prompt; a wrong answer fails."""
    tokens = new_prompt()
    body = {"prompt": tokens, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status == 200:
            wanted = mock_generate(tokens, 4, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)
            assert answer["choices"][0]["token_ids"] == wanted
            return 200, None
        assert "watermark" in answer["error"]["message"]
        return response.status, int(response.headers["Retry-After"])


async def test_long_prompts_above_the_watermark_are_refused_at_once_and_harm_no_stream(server):
    """The refused ones are told while nothing is prefilled for anybody."""
    num_asked, max_taken = 12, 5
    (prefill,) = server.workers("prefill")
    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS)
        async with aiohttp.ClientSession() as session:
            stop(prefill["pid"])
            try:
                asked = {asyncio.create_task(ask(session, server)) for _ in range(num_asked)}
                first: list[tuple[int, int | None]] = []
                for answer in asyncio.as_completed(asked):
                    first.append(await answer)
                    if len(first) == num_asked - max_taken:
                        break
            finally:
                os.kill(prefill["pid"], signal.SIGCONT)
            answers = await asyncio.gather(*asked)
        streams.check()
    assert [status for status, _ in first] == [429] * (num_asked - max_taken)
    refused = [retry_after for status, retry_after in answers if status == 429]
    assert 1 <= len(answers) - len(refused) <= max_taken
    assert sorted({status for status, _ in answers}) == [200, 429]
    assert all(retry_after is not None and retry_after >= 1 for retry_after in refused)
    until(server.is_idle)
    (decode,) = server.workers("decode")
    assert decode["load"]["kv_demand_perc"] == 0
    async with aiohttp.ClientSession() as session:
        assert (await ask(session, server))[0] == 200


def ask_until_deadline(server: Serve, timeout_s: float) -> None:
    headers = {"x-request-timeout-s": str(timeout_s)}
    body = {"prompt": new_prompt(), "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"


def stats(server: Serve) -> dict[str, int]:
    """Counters of the two workers' hand-offs, and what is queued and open."""
    (prefill,), (decode,) = server.workers("prefill"), server.workers("decode")
    queued = server.status()["prefill_queue_size"]
    return {
        "prefilled": prefill["prefill"]["num_prefills"],
        "abandoned": prefill["prefill"]["num_abandoned"],
        "refused": prefill["prefill"]["num_refused"],
        "aborted": decode["decode"]["num_aborted"],
        "open": decode["requests"] + prefill["handoffs_out"] + queued,
    }


def settled(server: Serve) -> dict[str, int]:
    """The counters, once nothing is open any more."""
    until(lambda: stats(server)["open"] == 0)
    return stats(server)


def test_a_deadline_ends_the_prefill_on_its_worker(server):
    """Asked again where a busy machine has not begun the prefill before the deadline, or has ended it meanwhile."""
    for attempt in range(20):
        before = settled(server)
        ask_until_deadline(server, 0.3 + attempt / 50)  # of the 0.75 s that the prefill takes
        after = settled(server)
        assert after["aborted"] == before["aborted"] + 1
        if after["abandoned"] == before["abandoned"] + 1:
            break
    assert after == before | {"abandoned": before["abandoned"] + 1, "aborted": before["aborted"] + 1}
    until(server.is_idle)


def test_a_deadline_reaches_the_prefill_queue(server):
    """Whoever takes the entry of a request that is over is told so, and computes nothing."""
    (prefill,) = server.workers("prefill")
    before = stats(server)
    stop(prefill["pid"])
    try:
        ask_until_deadline(server, 0.3)
        until(lambda: server.workers("decode")[0]["requests"] == 0)
    finally:
        os.kill(prefill["pid"], signal.SIGCONT)
    until(lambda: stats(server) == before | {"refused": before["refused"] + 1, "aborted": before["aborted"] + 1})
    until(server.is_idle)
