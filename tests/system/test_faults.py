"""Faults injected into real processes: whatever dies, no request is lost and no token is wrong.

The mock engine's answer depends on every token of the KV that it reads, so a lost or misdirected block would show.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import psutil
import pytest
from tests.system import recovery
from tests.system.serving import Serve, kvrelay

from kvrelay.data import bundled_checkpoint_path
from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

CONFIG = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))
EOS = CONFIG["eos_token_id"]
EOS_IDS = tuple(EOS) if isinstance(EOS, list) else (EOS,)
NUM_STREAMS = 12
NUM_TOKENS = 60


def prompt(number: int) -> list[int]:
    return [(7 * position + number) % (CONFIG["vocab_size"] - 20) + 16 for position in range(20 + 60 * (number % 6))]


def expected(number: int, count: int = NUM_TOKENS) -> list[int]:
    return mock_generate(prompt(number), count, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    flags = ["--decode-base-s", "0.02", "--max-local-prefill-length", "64", "--lease-ttl-s", "2"]
    with Serve(("--engine", "mock", "--prefill", "2", "--decode", "2", *flags)) as running:
        yield running
    assert running.process.returncode == 0, running.output


class Streams:
    """Concurrent streams with known answers. ``longest_pause_s`` is the longest silence of one, also before its first
    token."""

    def __init__(self, server: Serve) -> None:
        self._server = server
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._num_tokens = 0
        self.longest_pause_s = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> Streams:
        self._answers: list[Future[list[int]]] = [self._pool.submit(self._run, n) for n in range(NUM_STREAMS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._client.close()

    def _run(self, number: int) -> list[int]:
        tokens: list[int] = []
        last_s = time.monotonic()
        for chunk in self._client.completions.create(
            model=self._server.model,
            prompt=prompt(number),
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
        ):
            now_s = time.monotonic()
            for choice in chunk.choices:
                tokens += choice.token_ids or []
                with self._lock:
                    self._num_tokens += len(choice.token_ids or [])
                    self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
            last_s = now_s
        return tokens

    def wait_for_tokens(self, count: int) -> None:
        until(lambda: self._num_tokens >= count)

    def check(self) -> None:
        for number, answer in enumerate(self._answers):
            assert answer.result(60) == expected(number)
        recovery.pauses_s.append(self.longest_pause_s)


def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def wait_until_whole(server: Serve) -> None:
    """All four workers are there again, and idle."""

    def whole() -> bool:
        workers = server.status()["workers"]
        return sorted(worker["role"] for worker in workers if "error" not in worker) == ["decode"] * 2 + ["prefill"] * 2

    start_s = time.monotonic()
    until(whole)
    until(lambda: kvrelay("status", "--check", "--control", server.control).returncode == 0)
    recovery.recoveries_s.append(time.monotonic() - start_s)


@contextmanager
def extra_worker(server: Serve, role: str) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker, started by hand as on another machine."""
    flags = ["--engine", "mock", "--decode-base-s", "0.02", "--lease-ttl-s", "2", "--max-local-prefill-length", "64"]
    command = [sys.executable, "-m", "kvrelay", "worker", "--role", role, "--control", server.control, *flags]
    before = len(server.workers(role))
    process = subprocess.Popen(command)
    try:
        until(lambda: len(server.workers(role)) == before + 1)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_worker_loses_nothing(server, role):
    wait_until_whole(server)
    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS * 5)
        os.kill(server.workers(role)[0]["pid"], signal.SIGKILL)
        streams.check()
    wait_until_whole(server)


def test_a_stopped_prefill_worker_is_fenced_and_comes_back(server):
    """SIGSTOP for longer than its lease: its prefills are computed elsewhere; woken up, it may write nowhere."""
    wait_until_whole(server)
    pid = server.workers("prefill")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with Streams(server) as streams:
            streams.check()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until_whole(server)
    with Streams(server) as streams:
        streams.check()


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("how", ["SIGTERM", "drain"])
def test_a_drained_worker_finishes_and_exits(server, role, how):
    wait_until_whole(server)
    with extra_worker(server, role) as process:
        with Streams(server) as streams:
            streams.wait_for_tokens(NUM_STREAMS * 5)
            if how == "SIGTERM":
                process.terminate()
            else:
                (worker_id,) = [w["worker_id"] for w in server.workers(role) if w["pid"] == process.pid]
                assert kvrelay("drain", worker_id, "--control", server.control).returncode == 0
            streams.check()
        assert process.wait(20) == 0
    wait_until_whole(server)


def test_nats_killed_and_started_again(server):
    wait_until_whole(server)
    (nats,) = [child for child in psutil.Process(server.process.pid).children() if "nats-server" in child.name()]
    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS * 2)
        nats.kill()
        streams.check()
    wait_until_whole(server)
    with Streams(server) as streams:
        streams.check()


def test_clients_that_go_away_free_everything(server):
    wait_until_whole(server)
    body = {"model": server.model, "prompt": prompt(5), "max_tokens": 4000, "stream": True, "temperature": 0}
    for _ in range(8):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            next(answer.iter_lines())
    wait_until_whole(server)


def test_a_role_changes_under_load(server):
    wait_until_whole(server)
    worker_id = server.workers("prefill")[0]["worker_id"]
    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS)
        for role in ("decode", "prefill"):
            done = kvrelay("role", worker_id, role, "--control", server.control)
            assert done.returncode == 0, done.stderr
        streams.check()
    wait_until_whole(server)


def test_thresholds_change_while_it_runs(server):
    wait_until_whole(server)
    key = "disagg.max_local_prefill_length"

    def threshold_is(value: int) -> bool:
        return all(worker["disagg"]["max_local_prefill_length"] == value for worker in server.status()["workers"])

    assert kvrelay("config", "set", key, "100000", "--control", server.control).returncode == 0
    until(lambda: threshold_is(100000))
    assert f"{key} 100000" in kvrelay("config", "get", "--control", server.control).stdout
    assert kvrelay("config", "unset", key, "--control", server.control).returncode == 0
    until(lambda: threshold_is(64))
    assert kvrelay("config", "get", "--control", server.control).stdout == ""
