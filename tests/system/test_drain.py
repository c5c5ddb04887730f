"""Workers that are told to leave by their lease, with real NATS and etcd servers, and what ``serve`` makes of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from tests.control.etcd_server import EtcdServer, running_etcd
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, by_threshold, kvrelay_here
from tests.system.streams import NUM_STREAMS, Streams, extra_worker, wait_until_whole

from kvrelay.control.nats.connection import NatsConnection

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

FLAGS = ("--engine", "mock", "--decode-base-s", "0.02", *by_threshold(64), "--lease-ttl-s", "2")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="module", params=["nats", pytest.param("etcd", marks=pytest.mark.matrix)])
def server(request: pytest.FixtureRequest) -> Iterator[Serve]:
    with pytest.MonkeyPatch.context() as environment:
        if request.param == "etcd":
            environment.setenv("KVRELAY_DISCOVERY", request.getfixturevalue("etcd").url)
        with Serve(("--prefill", "2", "--decode", "2", *FLAGS)) as running:
            yield running
    assert running.process.returncode == 0, running.output


def revoke(entry: dict[str, object], server: Serve, request: pytest.FixtureRequest) -> None:
    """With our command for a decode worker, else with the tool of whoever keeps the leases; what ``nats kv del`` sends
    is this message."""
    lease_id = str(entry["lease_id"])
    if entry["role"] == "decode":
        command = "revoke-lease", "--control", server.control, str(entry["worker_id"])
        unknown = kvrelay_here(*command[:-1], f"{entry['worker_id']}x")
        assert unknown.returncode == 1
        assert f"did you mean {entry['worker_id']}?" in unknown.stderr
        assert kvrelay_here(*command).returncode == 0
        return
    if "KVRELAY_DISCOVERY" in os.environ:
        assert request.getfixturevalue("etcd").ctl("lease", "revoke", lease_id).returncode == 0
        return

    async def delete() -> None:
        connection = await NatsConnection.connect(server.control, 5.0)
        subject = f"$KV.kvrelay_default.kvrelay.default.leases.{lease_id}"
        await connection.request(subject, b"", headers={"KV-Operation": "DEL"})
        await connection.close()

    asyncio.run(delete())


def entry_of(process: subprocess.Popen[bytes], server: Serve, role: str) -> dict[str, object]:
    (entry,) = [worker for worker in server.workers(role) if worker["pid"] == process.pid]
    return entry


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.matrix)])
def test_a_worker_whose_lease_is_revoked_finishes_and_exits(server, role, request):
    with extra_worker(server, role) as process:
        entry = entry_of(process, server, role)
        with Streams(server) as streams:
            streams.wait_for_tokens(NUM_STREAMS * 5)
            revoke(entry, server, request)
            until(lambda: all(worker["pid"] != process.pid for worker in server.workers(role)))
            streams.check()
        assert process.wait(PATIENCE_S) == 0
    wait_until_whole(server)


def test_serve_goes_on_without_those_who_were_told_to_leave_while_somebody_takes_requests(monkeypatch):
    monkeypatch.delenv("KVRELAY_DISCOVERY", raising=False)  # where another test's cluster may still be registered
    with Serve(("--prefill", "1", "--decode", "2", *FLAGS)) as server:
        first, second = server.workers("decode")
        assert kvrelay_here("drain", first["worker_id"], "--control", server.control).returncode == 0
        until(lambda: f"(pid {first['pid']}) was told to leave, and has left" in server.read())
        body = {"model": server.model, "prompt": "x", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200
        assert [worker["pid"] for worker in server.workers("decode")] == [second["pid"]]
        os.kill(second["pid"], signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 1
        assert "the last worker that takes requests was told to leave" in server.read()
        assert "Traceback" not in server.read()


def test_a_second_ctrl_c_ends_open_requests_at_once(monkeypatch):
    monkeypatch.delenv("KVRELAY_DISCOVERY", raising=False)
    with Serve(("--prefill", "0", "--decode", "1", "--engine", "mock", "--decode-base-s", "0.05")) as server:
        (worker,) = server.workers("both")
        body = {"model": server.model, "prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGINT)
            wanted = "open request(s); a second Ctrl-C or SIGTERM ends them at once"
            until(lambda: wanted in server.read())
            assert any(line.startswith("data: ") for line in lines)
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.TransportError):
                assert "data: [DONE]" not in list(lines)
        assert server.process.wait(PATIENCE_S) == 128 + signal.SIGINT
        until(lambda: has_ended(worker["pid"]))
        assert "Traceback" not in server.read()


def has_ended(pid: int) -> bool:
    """Gone, or not reaped by its new parent yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
