"""Streams with known answers for tests of faults, and clusters of four workers that they are sent to.

The mock engine's answer depends on every token of the KV that it reads, so a lost or misdirected block would show.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests import nursery
from tests.patience import PATIENCE_S, until
from tests.system import recovery
from tests.system.serving import Serve, by_threshold

from kvrelay.data import bundled_checkpoint_path
from kvrelay.executors.mock import mock_generate

CONFIG = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))
EOS = CONFIG["eos_token_id"]
EOS_IDS = tuple(EOS) if isinstance(EOS, list) else (EOS,)
NUM_STREAMS = 6
"""One of each length of ``prompt``."""
NUM_TOKENS = 60


def prompt(number: int) -> list[int]:
    return [(7 * position + number) % (CONFIG["vocab_size"] - 20) + 16 for position in range(20 + 60 * (number % 6))]


def expected(number: int, count: int = NUM_TOKENS) -> list[int]:
    return mock_generate(prompt(number), count, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)


class Streams:
    """Concurrent streams with known answers. ``longest_pause_s`` is the longest silence of one, also before its first
    token."""

    def __init__(self, server: Serve) -> None:
        self._server = server
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._num_tokens = 0
        self.longest_pause_s = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> Streams:
        self._answers: list[Future[list[int]]] = [self._pool.submit(self._run, n) for n in range(NUM_STREAMS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def _run(self, number: int) -> list[int]:
        """By hand: OpenAI's client takes more CPU for a chunk than the whole cluster does."""
        tokens: list[int] = []
        last_s = time.monotonic()
        for chunk in self._chunks(number):
            now_s = time.monotonic()
            new = [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
            tokens += new
            with self._lock:
                self._num_tokens += len(new)
                self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
            last_s = now_s
        return tokens

    def _chunks(self, number: int) -> Iterator[dict[str, Any]]:
        """Fails if the stream has an error in it, or breaks off."""
        body = {"model": self._server.model, "prompt": prompt(number), "max_tokens": NUM_TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"{self._server.url}/v1/completions",
            json.dumps({**body, "stream": True, "return_token_ids": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as answer:
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    chunk = json.loads(data)
                    assert "error" not in chunk, chunk
                    yield chunk
        raise AssertionError("the stream broke off")

    def wait_for_tokens(self, count: int) -> None:
        until(lambda: self._num_tokens >= count)

    def check(self) -> None:
        for number, answer in enumerate(self._answers):
            assert answer.result(2 * PATIENCE_S) == expected(number)
        recovery.pauses_s.append(self.longest_pause_s)


def wait_until_whole(server: Serve) -> None:
    """All four workers are there again, and idle."""

    def whole() -> bool:
        workers = server.status()["workers"]
        return sorted(worker["role"] for worker in workers if "error" not in worker) == ["decode"] * 2 + ["prefill"] * 2

    start_s = time.monotonic()
    until(whole)
    until(server.is_idle)
    recovery.recoveries_s.append(time.monotonic() - start_s)


@contextmanager
def extra_worker(server: Serve, role: str) -> Iterator[nursery.Process]:
    """One more worker, started by hand as on another machine."""
    flags = ["--engine", "mock", "--decode-base-s", "0.02", "--lease-ttl-s", "2", *by_threshold(64)]
    command = [sys.executable, "-m", "kvrelay", "worker", "--role", role, "--control", server.control, *flags]
    before = len(server.workers(role))
    process = nursery.popen(command)
    try:
        until(lambda: len(server.workers(role)) == before + 1)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
