"""Bounds that requests meet in real processes: the KV watermark, and deadlines that end work wherever it is.

Pools are small and prefills slow, so that a few long prompts are more than there is room for.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator

import aiohttp
import httpx
import pytest
from tests.system.serving import Serve, kvrelay
from tests.system.test_faults import CONFIG, EOS_IDS, NUM_STREAMS, Streams, until

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

NUM_BLOCKS, BLOCK_SIZE, WATERMARK = 256, 16, 2
LONG = 100 * BLOCK_SIZE
"""Tokens of a long prompt: of 100 blocks each, five and what is in flight already are above the watermark."""

_salts = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    flags = ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE), "--kv-watermark", str(WATERMARK)]
    flags += ["--max-num-batched-tokens", "64", "--prefill-base-s", "0.03", "--max-local-prefill-length", "400"]
    with Serve(("--engine", "mock", "--prefill", "1", "--decode", "1", *flags)) as running:
        yield running
    assert running.process.returncode == 0, running.output


def new_prompt() -> list[int]:
    """A long one that no cache knows."""
    salt, low = 2 * next(_salts) + 1, 16
    return [(salt * position) % (CONFIG["vocab_size"] - 20) + low for position in range(1, LONG)]


def is_idle(server: Serve) -> bool:
    return kvrelay("status", "--check", "--control", server.control).returncode == 0


async def ask(session: aiohttp.ClientSession, server: Serve) -> tuple[int, int | None, float]:
    """Status, Retry-After and seconds of a long prompt; a wrong answer fails."""
    tokens = new_prompt()
    body = {"prompt": tokens, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    start_s = time.monotonic()
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        answer = await response.json()
        wait_s = time.monotonic() - start_s
        if response.status == 200:
            wanted = mock_generate(tokens, 4, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)
            assert answer["choices"][0]["token_ids"] == wanted
            return 200, None, wait_s
        assert "watermark" in answer["error"]["message"]
        return response.status, int(response.headers["Retry-After"]), wait_s


async def test_long_prompts_above_the_watermark_are_refused_at_once_and_harm_no_stream(server):
    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS)
        async with aiohttp.ClientSession() as session:
            answers = await asyncio.gather(*(ask(session, server) for _ in range(12)))
        streams.check()
    taken = [wait_s for status, _, wait_s in answers if status == 200]
    refused = [(retry_after, wait_s) for status, retry_after, wait_s in answers if status == 429]
    assert len(taken) + len(refused) == len(answers)
    assert 1 <= len(taken) <= 5
    assert all(retry_after >= 1 for retry_after, _ in refused)
    assert max(wait_s for _, wait_s in refused) < min(taken), "a refused one waited for no prefill"
    until(lambda: is_idle(server))
    (decode,) = server.workers("decode")
    assert decode["load"]["kv_demand_perc"] == 0
    async with aiohttp.ClientSession() as session:
        assert (await ask(session, server))[0] == 200


def ask_until_deadline(server: Serve, timeout_s: float) -> None:
    headers = {"x-request-timeout-s": str(timeout_s)}
    body = {"prompt": new_prompt(), "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"


def stats(server: Serve) -> dict[str, int]:
    """Counters of the two workers' hand-offs, and what is queued and open."""
    status = server.status()
    prefill, decode = sorted(status["workers"], key=lambda worker: worker["role"], reverse=True)
    return {
        "prefilled": prefill["prefill"]["num_prefills"],
        "abandoned": prefill["prefill"]["num_abandoned"],
        "refused": prefill["prefill"]["num_refused"],
        "aborted": decode["decode"]["num_aborted"],
        "open": decode["requests"] + prefill["handoffs_out"] + status["prefill_queue_size"],
    }


def test_a_deadline_ends_the_prefill_on_its_worker(server):
    before = stats(server)
    ask_until_deadline(server, 0.3)
    until(lambda: stats(server) == before | {"abandoned": before["abandoned"] + 1, "aborted": before["aborted"] + 1})
    until(lambda: is_idle(server))


def test_a_deadline_reaches_the_prefill_queue(server):
    """Whoever takes the entry of a request that is over is told so, and computes nothing."""
    (prefill,) = server.workers("prefill")
    before = stats(server)
    os.kill(prefill["pid"], signal.SIGSTOP)
    try:
        ask_until_deadline(server, 0.3)
        until(lambda: server.workers("decode")[0]["requests"] == 0)
    finally:
        os.kill(prefill["pid"], signal.SIGCONT)
    until(lambda: stats(server) == before | {"refused": before["refused"] + 1, "aborted": before["aborted"] + 1})
    until(lambda: is_idle(server))
