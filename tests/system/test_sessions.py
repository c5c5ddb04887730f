"""Agents' sessions whose worker is killed while their tools run: the next turns go on elsewhere, and are right.

The mock engine's answer depends on every token of the KV that it reads, so a lost or misdirected block would show.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.chaos.brokers import own_state_directory
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, by_threshold, kvrelay
from tests.system.streams import CONFIG, EOS_IDS

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

NUM_SESSIONS, NUM_TOKENS = 6, 20
FLAGS = ("--engine", "mock", "--num-blocks", "128", "--lease-ttl-s", "2", *by_threshold(64))
"""One worker alone has room for all sessions."""
TWO_DECODE, TWO_BOTH = ("--prefill", "1", "--decode", "2"), ("--prefill", "0", "--decode", "2")


class Session:
    """``history`` grows by the answers and the tools' results."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.history = self._tokens(160)
        self.worker = ""
        """Of the latest turn."""

    def _tokens(self, count: int) -> list[int]:
        return [(7 * at + 31 * self.number) % (CONFIG["vocab_size"] - 20) + 16 for at in range(count)]

    def turn(self, server: Serve) -> int:
        """Its answer must be right. How many tokens of the prompt were cached."""
        body = {"prompt": self.history, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
        hints = {"tool": f"tool {self.number % 2}", "retain_s": 60}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps({**body, "kv_hints": hints}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as reply:
            self.worker = reply.headers["x-kvrelay-worker"]
            told = json.loads(reply.read())
        answer = told["choices"][0]["token_ids"]
        assert answer == mock_generate(self.history, NUM_TOKENS, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)
        self.history = [*self.history, *answer, *self._tokens(10)]
        num_cached: int = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num_cached


@pytest.mark.parametrize(
    ("flags", "role"),
    [
        (TWO_DECODE, "decode"),
        pytest.param(TWO_DECODE, "prefill", marks=pytest.mark.matrix),
        pytest.param(TWO_BOTH, "both", marks=pytest.mark.matrix),
        pytest.param(
            (*TWO_BOTH, "--num-blocks", "48", "--host-kv-cache", "16MiB", "--host-kv-linger-s", "0"),
            "both",
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["decode", "prefill", "both", "both with host memory"],
)
def test_sessions_whose_worker_is_killed_in_the_pause_go_on_elsewhere(flags: tuple[str, ...], role: str) -> None:
    # With too short a pool each may push out the next one, and whether to load is a matter of measured times.
    is_short = "--host-kv-cache" in flags
    sessions = [Session(number) for number in range(NUM_SESSIONS)]
    with own_state_directory(), Serve((*FLAGS, *flags)) as server, ThreadPoolExecutor(NUM_SESSIONS) as clients:

        def turns() -> int:
            return sum(clients.map(lambda session: session.turn(server), sessions))

        turns()
        assert turns() > 0 or is_short, "they return"
        until(server.is_idle)
        before = server.workers(role)
        victim = next((worker for worker in before if worker["worker_id"] == sessions[0].worker), before[0])
        os.kill(victim["pid"], signal.SIGKILL)
        turns()
        if role != "prefill":
            assert victim["worker_id"] not in {session.worker for session in sessions}
        assert turns() > 0 or is_short, "where they went on they return, too"
        until(lambda: len(server.workers(role)) == len(before) and server.is_idle())
        turns()
        server.check_idle()
    assert server.process.returncode == 0, server.output


@pytest.mark.matrix  # reads must come within the seconds for which the worker lends
@pytest.mark.parametrize("how", ["drained", "another role"])
def test_sessions_of_a_worker_that_leaves_are_read_from_it(how: str) -> None:
    """Their tools end while it leaves. Long prompts, and prefills slower than reads, else computing is sooner."""
    flags = ("--engine", "mock", "--num-blocks", "1024", "--prefill-token-s", "0.002", "--disagg-policy", "threshold")
    sessions = [Session(number) for number in range(NUM_SESSIONS)]
    for session in sessions:
        session.history = session.history * 5
    shape = ("--prefill", "0", "--decode", "2") if how == "drained" else ("--prefill", "1", "--decode", "2")
    role = "both" if how == "drained" else "decode"
    with Serve((*flags, *shape, "--max-local-prefill-length", "4096")) as server:
        for session in sessions:
            session.turn(server)
        until(server.is_idle)
        victim = sessions[0].worker
        there = [session for session in sessions if session.worker == victim]
        command = ("drain", victim) if how == "drained" else ("role", victim, "prefill")
        assert kvrelay(*command, "--control", server.control).returncode == 0
        until(lambda: victim not in {worker["worker_id"] for worker in server.workers(role)})
        num_cached = [session.turn(server) for session in there]
        assert victim not in {session.worker for session in there}
        assert max(num_cached) > 700, num_cached
        until(server.is_idle)
        server.check_idle()
    assert server.process.returncode == 0, server.output
