"""Several models on one cluster of real processes: each comes with its first worker and goes with its last."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from tests import nursery
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, kvrelay_here

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

FLAGS = ["--engine", "mock", "--lease-ttl-s", "2"]


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Serve((*FLAGS, "--prefill", "0", "--decode", "1"), env={"KVRELAY_LOG_LEVEL": "info"}) as running:
        yield running
    assert running.process.returncode == 0, running.output
    assert " INFO kvrelay.frontend.cluster.view: " in running.output, "the level holds for the processes of serve, too"


@contextmanager
def worker(server: Serve, name: str) -> Iterator[nursery.Process]:
    """A worker of another model, started by hand."""
    command = [sys.executable, "-m", "kvrelay", "worker", "--control", server.control, "--served-model-name", name]
    process = nursery.popen([*command, "--role", "decode", *FLAGS])
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def models(server: Serve) -> list[str]:
    return [model["id"] for model in httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"]]


def complete(server: Serve, model: str) -> httpx.Response:
    body = {"model": model, "prompt": [20, 21, 22], "max_tokens": 3, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)


def registered(server: Serve, name: str) -> bool:
    return any(entry["model"] == name for entry in server.status()["workers"])


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_model_comes_with_its_first_worker_and_goes_with_its_last(server, end):
    assert models(server) == [server.model]
    assert complete(server, "second").status_code in (404, 503)
    with worker(server, "second") as process:
        until(lambda: "second" in models(server))
        assert registered(server, "second")
        answer = complete(server, "second")
        assert (answer.status_code, answer.json()["model"]) == (200, "second")
        assert complete(server, server.model).status_code == 200

        process.send_signal(end)
        until(lambda: models(server) == [server.model])
        process.wait(PATIENCE_S)
    gone = complete(server, "second")
    assert gone.status_code == 503
    assert float(gone.headers["Retry-After"]) >= 1
    assert complete(server, server.model).status_code == 200


def test_two_workers_of_a_second_model_share_its_requests(server):
    with worker(server, "third"), worker(server, "third"):
        until(lambda: sum(entry["model"] == "third" for entry in server.status()["workers"]) == 2)
        until(lambda: len({complete(server, "third").headers.get("x-kvrelay-worker") for _ in range(4)}) == 2)
    assert kvrelay_here("status", "--control", server.control).returncode == 0
