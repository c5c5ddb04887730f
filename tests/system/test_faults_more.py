"""More faults injected into real processes: silence instead of death, a lost frontend, overload, bad input.

A process that is stopped is worse than one that is dead: its connections stay open, and it wakes up with old plans.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import aiohttp
import httpx
import psutil
import pytest
from tests.patience import PATIENCE_S, stop, until
from tests.system.serving import Serve, kvrelay_here
from tests.system.streams import CONFIG, EOS_IDS, NUM_STREAMS, Streams, prompt, wait_until_whole

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

MAX_WAITING = 32
LEASE_TTL_S = 2
TIMING = "--decode-base-s 0.02 --disagg-policy threshold --max-local-prefill-length 64 --remote-prefill-timeout-s 600"
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
        stop(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def child_of(server: Serve, word: str) -> psutil.Process:
    """The one child of ``serve`` that has ``word`` in its command line."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # another one that ends just now
            found += [child] if word in (*child.cmdline(), child.name()) else []
    (only,) = found
    return only


_salts = itertools.count(100)


def ask_something_new(server: Serve) -> None:
    """A long prompt that no cache knows; the answer is checked."""
    salt, vocab_size = next(_salts), CONFIG["vocab_size"]
    tokens = [(salt * position) % (vocab_size - 20) + 16 for position in range(1, 200)]
    body = {"model": server.model, "prompt": tokens, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=2 * PATIENCE_S)
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
    """They end while it still stands."""
    wait_until_whole(server)
    pid = server.workers("decode")[0]["pid"]
    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS * 5)
        with frozen(pid):
            streams.check()
    wait_until_whole(server)
    with Streams(server) as streams:
        streams.check()


@pytest.mark.matrix
def test_a_claim_that_a_sleeping_decode_worker_missed():
    """It is asked for a hand-off while it stands still, and nobody asks again: it has to learn that nobody will.

    With a lease so long that its connections outlive its sleep: else the request had gone elsewhere. It takes as long
    as a claim is waited for; in the suite ``tests/handoff`` loses claims and stops decode workers."""
    with Serve((*FLAGS, "--lease-ttl-s", "60")) as server:
        sleep_through_a_claim(server)
    assert server.process.returncode == 0, server.output


def sleep_through_a_claim(server: Serve) -> None:
    wait_until_whole(server)
    decoders = [worker["pid"] for worker in server.workers("decode")]
    with ThreadPoolExecutor(1) as pool:
        with frozen(*(worker["pid"] for worker in server.workers("prefill"))):
            asked = pool.submit(ask_something_new, server)
            until(lambda: sum(w["decode"]["places"].get("remote", 0) for w in server.workers("decode")) == 1)
            for pid in decoders:
                stop(pid)
        # The prefill worker has waited for the answer to its claim for as long as it ever does.
        until(lambda: sum(w["prefill"]["num_failed"] for w in server.workers("prefill")) == 1)
        for pid in decoders:
            os.kill(pid, signal.SIGCONT)
        asked.result(2 * PATIENCE_S)
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
        assert kvrelay_here("config", "set", key, value, "--control", server.control).returncode == 0
        until(
            lambda value=value: all(
                worker.get("disagg", {}).get("max_prefill_queue_size") == int(value)
                for worker in server.status()["workers"]
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
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        child_of(server, "frontend").kill()
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in lines:
                pass
    wait_until_whole(server)

    def is_back() -> bool:
        try:
            return httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    until(is_back)
    with Streams(server) as streams:
        streams.check()


async def test_overload_is_refused_at_once_and_harms_no_stream(server):
    """All who are refused hear it while everybody who was taken still waits for tokens."""
    wait_until_whole(server)
    body = {"model": server.model, "prompt": prompt(1), "max_tokens": 4000, "stream": True, "temperature": 0}
    taken: list[aiohttp.ClientResponse] = []
    refused: list[int] = []
    all_are_told = asyncio.Event()

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            if response.status == 429:
                assert (await response.json())["error"]["message"]
                refused.append(int(response.headers["Retry-After"]))
            else:
                assert response.status == 200
                taken.append(response)
            if len(taken) + len(refused) == 4 * MAX_WAITING:
                all_are_told.set()
            await all_are_told.wait()
            if response.status == 200:
                assert b"data:" in await response.content.readline()
                assert not response.content.at_eof()

    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(ask(session) for _ in range(4 * MAX_WAITING)))
        streams.check()
    assert 0 < len(taken) <= MAX_WAITING
    assert len(taken) + len(refused) == 4 * MAX_WAITING
    assert all(retry_after >= 1 for retry_after in refused)
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
    with Streams(server) as streams, httpx.Client(timeout=PATIENCE_S) as client:
        for body, status in bad:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            answer = client.post(f"{server.url}/v1/completions", **content)
            assert answer.status_code == status, (body, answer.text[:300])
            assert answer.json()["error"]["message"]
        streams.check()
    wait_until_whole(server)
