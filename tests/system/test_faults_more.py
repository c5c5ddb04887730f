"""More faults injected into real processes: silence instead of death, a lost frontend, overload, bad input.

A process that is stopped is worse than one that is dead: its connections stay open, and it wakes up with old plans.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import aiohttp
import httpx
import psutil
import pytest
from tests.system.serving import Serve, kvrelay
from tests.system.test_faults import CONFIG, EOS_IDS, NUM_STREAMS, Streams, prompt, until, wait_until_whole

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

MAX_WAITING = 32
LEASE_TTL_S = 2
TIMING = "--decode-base-s 0.02 --max-local-prefill-length 64 --remote-prefill-timeout-s 600"
FLAGS = f"--engine mock --prefill 2 --decode 2 {TIMING}".split()
"""A prefill that is lost must not be rescued by its deadline: it would look like a slow one."""


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    flags = ("--max-waiting-requests", str(MAX_WAITING), "--lease-ttl-s", str(LEASE_TTL_S))
    with Serve((*FLAGS, *flags)) as running:
        yield running
    assert running.process.returncode == 0, running.output


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """The processes stand still; within, no answer of theirs can come."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def child_of(server: Serve, word: str) -> psutil.Process:
    """The one child of ``serve`` that has ``word`` in its command line."""
    (child,) = [c for c in psutil.Process(server.process.pid).children() if word in c.cmdline() or word in c.name()]
    return child


_salts = itertools.count(100)


def ask_something_new(server: Serve) -> None:
    """A long prompt that no cache knows; the answer is checked."""
    salt, vocab_size = next(_salts), CONFIG["vocab_size"]
    tokens = [(salt * position) % (vocab_size - 20) + 16 for position in range(1, 200)]
    body = {"model": server.model, "prompt": tokens, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    known = mock_generate(tokens, 5, vocab_size=vocab_size, eos_token_ids=EOS_IDS)
    assert answer.json()["choices"][0]["token_ids"] == known


def num_prefilled_remotely(server: Serve, num_prompts: int = 6) -> int:
    """Ask so many new prompts; gives how many were prefilled by a prefill worker."""

    def num_done() -> int:
        return sum(worker["decode"]["num_remote_done"] for worker in server.workers("decode"))

    before = num_done()
    for _ in range(num_prompts):
        ask_something_new(server)
    return num_done() - before


def test_streams_leave_a_decode_worker_that_stands_still(server):
    """Within a lease and what it takes to go on elsewhere, here on a busy machine; not after a fixed time."""
    wait_until_whole(server)
    pid = server.workers("decode")[0]["pid"]
    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS * 5)
        with frozen(pid):
            streams.check()
    assert streams.longest_pause_s < 3 * LEASE_TTL_S
    wait_until_whole(server)
    with Streams(server) as streams:
        streams.check()


def test_a_claim_that_a_sleeping_decode_worker_missed():
    """It is asked for a hand-off while it stands still, and nobody asks again: it has to learn that nobody will.

    With a lease so long that its connections outlive its sleep: else the request had gone elsewhere."""
    with Serve((*FLAGS, "--lease-ttl-s", "20")) as server:
        sleep_through_a_claim(server)
    assert server.process.returncode == 0, server.output


def sleep_through_a_claim(server: Serve) -> None:
    wait_until_whole(server)
    decoders = [worker["pid"] for worker in server.workers("decode")]
    with ThreadPoolExecutor(1) as pool:
        with frozen(*(worker["pid"] for worker in server.workers("prefill"))):
            asked = pool.submit(ask_something_new, server)
            time.sleep(0.5)
            for pid in decoders:
                os.kill(pid, signal.SIGSTOP)
        time.sleep(5.5)
        for pid in decoders:
            os.kill(pid, signal.SIGCONT)
        asked.result(60)
    wait_until_whole(server)


def test_without_a_prefill_worker_the_decode_workers_prefill(server):
    wait_until_whole(server)
    assert num_prefilled_remotely(server) == 6
    with frozen(*(worker["pid"] for worker in server.workers("prefill"))):
        assert num_prefilled_remotely(server) == 0
    wait_until_whole(server)
    assert num_prefilled_remotely(server) == 6


def test_a_full_prefill_queue_means_local_prefill(server):
    wait_until_whole(server)
    key = "disagg.max_prefill_queue_size"
    for value, expected in (("0", 0), ("16", 6)):
        assert kvrelay("config", "set", key, value, "--control", server.control).returncode == 0
        until(
            lambda value=value: all(
                worker["disagg"]["max_prefill_queue_size"] == int(value) for worker in server.status()["workers"]
            )
        )
        assert num_prefilled_remotely(server) == expected


def test_nats_silent_for_longer_than_a_lease(server):
    """A network cut: the connections stay, nothing comes. Nobody may take the workers for dead."""
    wait_until_whole(server)
    nats = child_of(server, "nats-server")
    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS * 2)
        with frozen(nats.pid):
            streams.check()
            with Streams(server) as more:
                more.check()
    wait_until_whole(server)
    with Streams(server) as streams:
        streams.check()


def test_a_killed_frontend_frees_everything_and_comes_back(server):
    wait_until_whole(server)
    body = {"model": server.model, "prompt": prompt(5), "max_tokens": 4000, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        child_of(server, "frontend").kill()
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in lines:
                pass
    wait_until_whole(server)

    def is_back() -> bool:
        try:
            return httpx.get(f"{server.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    until(is_back)
    with Streams(server) as streams:
        streams.check()


async def test_overload_is_refused_at_once_and_harms_no_stream(server):
    wait_until_whole(server)
    body = {"model": server.model, "prompt": prompt(1), "max_tokens": 60, "temperature": 0, "return_token_ids": True}

    async def ask(session: aiohttp.ClientSession) -> tuple[int, str | None, list[int], float]:
        start_s = time.monotonic()
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            answer = await response.json()
            tokens = answer["choices"][0]["token_ids"] if response.status == 200 else []
            return response.status, response.headers.get("Retry-After"), tokens, time.monotonic() - start_s

    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            answers = await asyncio.gather(*(ask(session) for _ in range(4 * MAX_WAITING)))
        streams.check()
    taken = [tokens for status, _, tokens, _ in answers if status == 200]
    refused = [(retry_after, wait_s) for status, retry_after, _, wait_s in answers if status == 429]
    assert len(taken) + len(refused) == len(answers)
    assert 0 < len(taken) <= MAX_WAITING
    assert all(tokens == taken[0] and not set(tokens) & set(EOS_IDS) for tokens in taken)
    assert all(retry_after is not None and int(retry_after) >= 1 for retry_after, _ in refused)
    # No figure of speed: a refused request did not wait until the first of the others had its 60 tokens.
    assert max(wait_s for _, wait_s in refused) < min(wait_s for status, _, _, wait_s in answers if status == 200)
    wait_until_whole(server)


def test_bad_input_beside_good(server):
    wait_until_whole(server)
    good = {"model": server.model, "prompt": prompt(1), "max_tokens": 4}
    bad: list[tuple[object, int]] = [
        (b"{", 400),
        (b'"text"', 400),
        ({**good, "model": "nobody"}, 404),
        ({**good, "prompt": []}, 400),
        ({**good, "prompt": [-1]}, 400),
        ({**good, "prompt": [10**9]}, 400),
        ({**good, "prompt": [20] * 100_000}, 400),
        ({**good, "max_tokens": "many"}, 400),
        ({**good, "n": 10**9}, 400),
        ({**good, "temperature": -3}, 400),
        (b"\xff\xfe", 400),
    ]
    with Streams(server) as streams, httpx.Client(timeout=30) as client:
        for body, status in bad:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            answer = client.post(f"{server.url}/v1/completions", **content)
            assert answer.status_code == status, (body, answer.text[:300])
            assert answer.json()["error"]["message"]
        streams.check()
    wait_until_whole(server)
