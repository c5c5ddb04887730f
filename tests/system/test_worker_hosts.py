"""Workers that a planner orders: from ``serve`` and from an agent, as real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests import nursery
from tests.lazily import openai
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, kvrelay_here

from kvrelay.config import ControlConfig, WorkerRole
from kvrelay.control.base import Keys
from kvrelay.errors import KvrelayError
from kvrelay.launch.request_plane import connected
from kvrelay.launch.worker_host import HostReport, Hosts

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

KEYS = Keys("default")
MOCK = ("--engine", "mock", "--speedup-ratio", "0")


def ask(server: Serve, what: Callable[[Hosts, Any], Coroutine[Any, Any, Any]]) -> Any:
    """As a planner that has just come."""

    async def main() -> Any:
        async with connected(ControlConfig(control=server.control)) as plane:
            lease = await plane.discovery.grant(30.0)
            return await what(Hosts(plane, KEYS, lease), plane)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, main()).result()


def hosts(server: Serve) -> list[HostReport]:
    return ask(server, lambda hosts, _: hosts.list())


def order(server: Serve, role: WorkerRole, num_free_after: int) -> None:
    """Stay until the host has taken it: an order goes with its planner's lease."""

    async def main(found: Hosts, _: Any) -> None:
        await found.order(role)
        while sum(host.num_free for host in await found.list()) > num_free_after:
            await asyncio.sleep(0.05)

    ask(server, main)


def roles(server: Serve) -> list[str]:
    return sorted(worker["role"] for worker in server.status()["workers"])


def test_serve_starts_what_is_ordered_as_far_as_it_has_slots() -> None:
    with Serve((*MOCK, "--planner", "off", "--max-workers", "3")) as server:
        until(lambda: len(hosts(server)) == 1 and len(hosts(server)[0].pids) == 2)
        order(server, WorkerRole.PREFILL, 0)
        until(lambda: roles(server) == ["decode", "prefill", "prefill"])
        with pytest.raises(KvrelayError, match="no host has a free slot"):
            ask(server, lambda found, _: found.order(WorkerRole.DECODE))

        async def force(_: Hosts, plane: Any) -> None:
            prefix = KEYS.orders(hosts_now[0].host_id)
            lease = await plane.discovery.grant(30.0)
            for number, value in enumerate([b"decode", b"root", b"\xff"]):
                await plane.discovery.put(f"{prefix}{number}", value, lease)
            while await plane.discovery.list(prefix):
                await asyncio.sleep(0.05)

        hosts_now = hosts(server)
        ask(server, force)
        assert len(hosts(server)[0].pids) == 3, "orders beyond the slots, and nonsense, start nothing"
        extra = max(psutil.Process(pid).create_time() for pid in hosts_now[0].pids)
        (pid,) = [pid for pid in hosts_now[0].pids if psutil.Process(pid).create_time() == extra]
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in hosts(server)[0].pids and len(hosts(server)[0].pids) == 3)
        until(lambda: roles(server) == ["decode", "prefill", "prefill"])
        name = server.workers("prefill")[0]["worker_id"]  # once the killed one has left discovery
        assert kvrelay_here("drain", name, "--control", server.control).returncode == 0
        until(lambda: len(hosts(server)[0].pids) == 2)
        assert sum(host.num_free for host in hosts(server)) == 1


def test_an_agent_offers_slots_and_its_workers_end_with_it(tmp_path: Path) -> None:
    with Serve((*MOCK, "--planner", "off", "--lease-ttl-s", "2")) as server:
        command = [sys.executable, "-m", "kvrelay", "agent", "--slots", "2", *MOCK, "--control", server.control]
        agent = nursery.popen(command)
        try:
            until(lambda: len(hosts(server)) == 1)
            order(server, WorkerRole.DECODE, 1)
            until(lambda: roles(server) == ["decode", "decode", "prefill"])
            workers = hosts(server)[0].pids
            agent.kill()
            agent.wait()
            until(lambda: not any(psutil.pid_exists(pid) for pid in workers))
            until(lambda: not hosts(server))
            until(lambda: roles(server) == ["decode", "prefill"])
        finally:
            agent.kill()
            agent.wait()


def test_scale_to_zero_and_back_with_an_answer_for_the_request_that_waited(tmp_path: Path) -> None:
    """The planner stops all workers of ``serve``; the next request starts one and waits for it."""
    flags = (*MOCK, "--planner", "off", "--max-workers", "2", "--min-workers", "0", "--lease-ttl-s", "2")
    with Serve(flags) as server:
        command = [sys.executable, "-m", "kvrelay", "planner", "--mode", "act", "--control", server.control]
        command += ["--min-workers", "0", "--quiet-s", "1", "--interval", "0.2", "--log-file", str(tmp_path / "log")]
        planner = nursery.popen(command)
        try:
            until(lambda: roles(server) == [] and not hosts(server)[0].pids)
            assert server.process.poll() is None
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
                assert [model.id for model in client.models.list()] == [server.model]
                answer = client.completions.create(model=server.model, prompt="Hi", max_tokens=4, timeout=PATIENCE_S)
                assert answer.choices[0].finish_reason in ("length", "stop")
            until(lambda: roles(server) == [] and not hosts(server)[0].pids)
        finally:
            planner.terminate()
            planner.wait()
