"""Faults injected into real processes: whatever dies, no request is lost and no token is wrong."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import httpx
import psutil
import pytest
from tests.patience import PATIENCE_S, stop, until
from tests.system.serving import Serve, by_threshold, kvrelay_here
from tests.system.streams import NUM_STREAMS, Streams, extra_worker, prompt, wait_until_whole

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    flags = ["--planner", "suggest", "--decode-base-s", "0.02", *by_threshold(64), "--lease-ttl-s", "2"]
    with Serve(("--engine", "mock", "--prefill", "2", "--decode", "2", *flags)) as running:
        yield running
    assert running.process.returncode == 0, running.output


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
    stop(pid)
    try:
        with Streams(server) as streams:
            streams.check()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until_whole(server)
    with Streams(server) as streams:
        streams.check()


@pytest.mark.parametrize(
    ("how", "role"),
    [
        ("SIGTERM", "decode"),
        ("drain", "prefill"),
        pytest.param("SIGTERM", "prefill", marks=pytest.mark.matrix),
        pytest.param("drain", "decode", marks=pytest.mark.matrix),
    ],
)
def test_a_drained_worker_finishes_and_exits(server, role, how):
    wait_until_whole(server)
    with extra_worker(server, role) as process:
        with Streams(server) as streams:
            streams.wait_for_tokens(NUM_STREAMS * 5)
            if how == "SIGTERM":
                process.terminate()
            else:
                (worker_id,) = [w["worker_id"] for w in server.workers(role) if w["pid"] == process.pid]
                assert kvrelay_here("drain", worker_id, "--control", server.control).returncode == 0
            streams.check()
        assert process.wait(PATIENCE_S) == 0
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


def takes(squatter: socket.socket, port: int) -> bool:
    """Whether the port was free. The last threads of a process that was killed keep it for a moment."""
    try:
        squatter.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_a_nats_server_that_cannot_start_again_ends_nothing(server):
    """Its port is taken for a while; a worker that is killed meanwhile comes back when the control plane does."""
    wait_until_whole(server)
    (nats,) = [child for child in psutil.Process(server.process.pid).children() if "nats-server" in child.name()]
    with Streams(server) as streams, socket.socket() as squatter:
        streams.wait_for_tokens(NUM_STREAMS)
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stop(server.process.pid)  # so that it does not take the port first
        try:
            nats.kill()
            until(lambda: nats.status() == psutil.STATUS_ZOMBIE)
            until(lambda: takes(squatter, int(server.control.rpartition(":")[2])))
            squatter.listen()
        finally:
            server.process.send_signal(signal.SIGCONT)
        until(lambda: "the NATS server cannot be started" in server.read())
        streams.check()
    wait_until_whole(server)


def test_clients_that_go_away_free_everything(server):
    wait_until_whole(server)
    body = {"model": server.model, "prompt": prompt(5), "max_tokens": 4000, "stream": True, "temperature": 0}
    for _ in range(8):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            next(answer.iter_lines())
    wait_until_whole(server)


def test_a_role_changes_under_load(server):
    wait_until_whole(server)
    worker_id = server.workers("prefill")[0]["worker_id"]
    with Streams(server) as streams:
        streams.wait_for_tokens(NUM_STREAMS)
        for role in ("decode", "prefill"):
            done = kvrelay_here("role", worker_id, role, "--control", server.control)
            assert done.returncode == 0, done.stderr
        streams.check()
    wait_until_whole(server)


def test_thresholds_change_while_it_runs(server):
    wait_until_whole(server)
    key = "disagg.max_local_prefill_length"

    def threshold_is(value: int) -> bool:
        return all(
            worker.get("disagg", {}).get("max_local_prefill_length") == value for worker in server.status()["workers"]
        )

    assert kvrelay_here("config", "set", key, "100000", "--control", server.control).returncode == 0
    until(lambda: threshold_is(100000))
    assert f"{key} 100000" in kvrelay_here("config", "get", "--control", server.control).stdout
    assert kvrelay_here("config", "unset", key, "--control", server.control).returncode == 0
    until(lambda: threshold_is(64))
    assert kvrelay_here("config", "get", key, "--control", server.control).stdout == ""
