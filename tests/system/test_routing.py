"""Routing on real processes: two frontends on one port, workers and a frontend killed under load.

What each frontend believes of the caches has to be what the caches hold, once everything has come to rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, kvrelay_here

from kvrelay.config import ControlConfig
from kvrelay.control.base import Keys
from kvrelay.core.workers import WorkerInfo
from kvrelay.data import bundled_checkpoint_path
from kvrelay.executors.mock import mock_generate
from kvrelay.launch.request_plane import connected
from kvrelay.launch.worker_calls import list_workers, worker_calls

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

CONFIG = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))
EOS = CONFIG["eos_token_id"]
EOS_IDS = tuple(EOS) if isinstance(EOS, list) else (EOS,)
NUM_WORKERS = 3
NUM_CLIENTS = 6
NUM_GROUPS = 24
NUM_TOKENS = 8
THINK_S = 0.05
"""Between an answer and the same client's next request: processes that start again need the CPU, too."""
# All pools together hold fewer than all groups, so that blocks are evicted all the time, on every worker.
FLAGS = ["--num-blocks", "160", "--lease-ttl-s", "2", "--decode-base-s", "0.003"]


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    shape = ("--engine", "mock", "--prefill", "0", "--decode", str(NUM_WORKERS), "--frontends", "2", "--router", "kv")
    with Serve((*shape, *FLAGS)) as running:
        yield running
    assert running.process.returncode == 0, running.output


class Load:
    """Clients with prompts that share prefixes. A request is sent again, as a user would, if its frontend dies, or
    knows no worker: one that has just started, or all leases have run out on a busy machine."""

    def __init__(self, server: Serve) -> None:
        self._server = server
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self.num_answers = 0

    def __enter__(self) -> Load:
        self._clients = [self._pool.submit(self._run, number) for number in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def wait(self, count: int) -> None:
        """Until so many more answers have come."""
        target = self.num_answers + count
        until(lambda: self.num_answers >= target or any(client.done() for client in self._clients))

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            group = rng.randrange(NUM_GROUPS)
            prefix = random.Random(group).choices(range(16, CONFIG["vocab_size"]), k=400)
            prompt = prefix + rng.choices(range(16, CONFIG["vocab_size"]), k=40)
            known = mock_generate(prompt, NUM_TOKENS, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)
            assert self._ask(prompt) == known
            self.num_answers += 1
            self._stop.wait(THINK_S)

    def _ask(self, prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                answer = httpx.post(f"{self._server.url}/v1/completions", json=body, timeout=PATIENCE_S)
            except httpx.TransportError:
                answer = None
            if answer is None or answer.status_code == 503:
                time.sleep(0.05)
                continue
            assert answer.status_code == 200, answer.text
            tokens: list[int] = answer.json()["choices"][0]["token_ids"]
            return tokens
        raise AssertionError("no frontend answers, or none knows a worker")


def frontends(server: Serve) -> set[int]:
    """Pids of the frontends that live."""
    found = set()
    for child in psutil.Process(server.process.pid).children():
        try:
            if "frontend" in child.cmdline()[:4]:
                found.add(child.pid)
        except psutil.NoSuchProcess:  # a zombie, too
            continue
    return found


def answers(server: Serve, path: str) -> list[dict[str, Any]]:
    """Every frontend's answer. They share a port, and each connection goes to either."""
    found: dict[int, dict[str, Any]] = {}

    def ask() -> bool:
        try:
            answer = httpx.get(f"{server.url}{path}", timeout=PATIENCE_S).json()
        except httpx.TransportError:
            return False
        found[answer["pid"]] = answer
        return len(frontends(server) & found.keys()) == 2

    until(ask)
    return [found[pid] for pid in frontends(server)]


def indexes(server: Serve) -> list[dict[str, list[str]]]:
    """What each frontend thinks that each worker holds."""
    found = []
    for answer in answers(server, "/v1/kvrelay/router?blocks=1"):
        (model,) = answer["models"]
        found.append({worker["state"]["worker_id"]: sorted(worker["blocks"]) for worker in model["workers"]})
    return found


def control_of(server: Serve) -> ControlConfig:
    return ControlConfig(control=server.control, connect_timeout_s=PATIENCE_S)


async def registered(server: Serve) -> list[WorkerInfo]:
    async with connected(control_of(server)) as control:
        return await list_workers(control, Keys("default"))


def caches(server: Serve) -> dict[str, list[str]]:
    """What each worker holds, by its own block pool."""

    async def ask() -> dict[str, list[str]]:
        config = control_of(server)
        async with connected(config) as control, worker_calls(control, config) as calls:
            workers = [info.worker_id for info in await calls.look()]
            held = await asyncio.gather(*(calls.ask(worker_id, "cache") for worker_id in workers))
        return {worker_id: sorted(answer["blocks"]) for worker_id, answer in zip(workers, held, strict=True)}

    return asyncio.run(ask())


def workers(server: Serve) -> dict[str, int]:
    """Pids by id, as discovery has them."""
    return {info.worker_id: info.pid for info in asyncio.run(registered(server))}


def kill_a_worker(server: Serve) -> None:
    """And wait until another one has taken its place."""
    before = workers(server)
    victim = sorted(before)[0]
    os.kill(before[victim], signal.SIGKILL)

    def replaced() -> bool:
        now = workers(server)
        return victim not in now and len(now) == NUM_WORKERS

    until(replaced)


def kill_a_frontend(server: Serve) -> int:
    """And wait until another one has taken its place; returns that one's pid."""
    before = frontends(server)
    os.kill(min(before), signal.SIGKILL)
    until(lambda: len(frontends(server) - before) == 1)
    (pid,) = frontends(server) - before
    assert pid in {answer["pid"] for answer in answers(server, "/v1/kvrelay/router")}
    return pid


def test_indexes_are_true_after_workers_and_a_frontend_were_killed_under_load(server: Serve) -> None:
    with Load(server) as load:
        load.wait(30)
        kill_a_worker(server)
        load.wait(30)
        kill_a_frontend(server)
        load.wait(30)
        kill_a_worker(server)
        load.wait(60)
        # The frontends of a busy machine may connect to the last worker after all of these.
        until(lambda: all(caches(server).values()))
    held = caches(server)
    assert len(held) == NUM_WORKERS
    assert len({block for blocks in held.values() for block in blocks}) > max(map(len, held.values()))
    # The last events may still be on their way; what is lost on the way is asked for again.
    until(lambda: indexes(server) == [held, held])
    assert caches(server) == held


def test_settings_reach_every_frontend_and_those_that_start_later(server: Serve) -> None:
    def settings() -> list[dict[str, object]]:
        return [answer["models"][0]["settings"] for answer in answers(server, "/v1/kvrelay/router")]

    assert [shown["router"] for shown in settings()] == ["kv", "kv"]
    for key, value in (("router.overlap_weight", "0.5"), ("router.router", "least-loaded")):
        done = kvrelay_here("config", "set", key, value, "--control", server.control)
        assert done.returncode == 0, done.stderr
    wanted = {"router": "least-loaded", "overlap_weight": 0.5, "decode_weight": 0.1, "temperature": 0.0}
    until(lambda: settings() == [wanted, wanted])
    pid = kill_a_frontend(server)
    until(lambda: settings() == [wanted, wanted])
    assert pid in frontends(server)
    done = kvrelay_here("config", "set", "router.router", "kv", "--control", server.control)
    assert done.returncode == 0, done.stderr
    until(lambda: [shown["router"] for shown in settings()] == ["kv", "kv"])
    # Switched on again, the index asks the workers for what they hold.
    held = caches(server)
    until(lambda: indexes(server) == [held, held])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("router.router", "kw", "must be one of kv"),
        ("router.temperature", "nan", "finite"),
        ("router.overlap", "1", "did you mean router.overlap_weight"),
    ],
)
def test_settings_that_cannot_be_are_refused(server: Serve, key: str, value: str, message: str) -> None:
    done = kvrelay_here("config", "set", key, value, "--control", server.control)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_decision_is_explained_on_the_command_line(server: Serve) -> None:
    done = kvrelay_here("status", "--explain", "Once upon a time", "--json", "--url", server.url)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    candidates = {candidate["worker_id"] for candidate in answer["decision"]["candidates"]}
    assert candidates == set(workers(server))
    assert answer["decision"]["worker_id"] in candidates
    done = kvrelay_here("status", "--explain-tokens", "500", "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert all(worker_id in done.stdout for worker_id in candidates)
    for flags, code in (
        (("--explain", "a", "--url", "http://127.0.0.1:9"), 1),
        (("--explain", "a", "--url", "nonsense"), 2),
        (("--explain", "a", "--model", "nope", "--url", server.url), 1),
        (("--explain", "a", "--check"), 2),
    ):
        refused = kvrelay_here("status", *flags)
        assert refused.returncode == code
        assert refused.stderr.startswith("kvrelay: ")
        assert refused.stderr.count("\n") == 1
