"""What a planner decides is carried out: by orders to hosts of workers, by commands to workers, and by a hook."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from tests.contracts.waiting import eventually
from tests.patience import PATIENCE_S

from kvrelay.config import ControlConfig, WorkerRole
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.tasks import end_tasks
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import KvrelayError
from kvrelay.launch.actuators import ClusterActuator, HookActuator
from kvrelay.launch.children import Child
from kvrelay.launch.worker_host import READY_LIMIT_S, HostReport, Hosts, WorkerHost, keep, read_hosts
from kvrelay.planner import Narrow, Numbers, Room, Start, Stop, Widen

KEYS = Keys("default")
NO = Numbers()


class Calls:
    """Keeps the commands that workers would get."""

    def __init__(self, *workers: WorkerInfo) -> None:
        self.known = {worker.worker_id: worker for worker in workers}
        self.asked: list[tuple[str, ...]] = []

    async def ask(self, worker_id: str, command: str, argument: str = "", *, timeout_s: float) -> Any:
        self.asked.append((worker_id, command, argument))
        return {}


def worker(worker_id: str, role: WorkerRole, pid: int) -> WorkerInfo:
    return WorkerInfo(worker_id, 0, role, "m", "/m", "tcp://127.0.0.1:1", 1000, 16, 100, 500, "x", host="here", pid=pid)


async def report(hosts: dict[str, tuple[int, tuple[int, ...]]]) -> Any:
    """A control plane in which these hosts report: slots, and the processes of their workers."""
    plane = MemoryBroker().plane()
    lease = await plane.discovery.grant(60.0)
    for host_id, (slots, pids) in hosts.items():
        entry = HostReport(host_id, "here", "m", slots, pids)
        await plane.discovery.put(KEYS.host(host_id), msgspec.json.encode(entry), lease)
    return plane


async def actuator_of(plane: Any, calls: Calls) -> ClusterActuator:
    return ClusterActuator(calls, Hosts(plane, KEYS, await plane.discovery.grant(10.0)))  # type: ignore[arg-type]


async def test_a_host_tells_that_it_ends_without_a_worker() -> None:
    plane = await report({"a": (2, (1,))})
    assert not (await (await actuator_of(plane, Calls())).room()).needs_worker
    entry = msgspec.json.encode(HostReport("b", "here", "m", 2, (2,), needs_worker=True))
    await plane.discovery.put(KEYS.host("b"), entry, await plane.discovery.grant(60.0))
    assert (await (await actuator_of(plane, Calls())).room()).needs_worker
    await plane.close()


async def orders(plane: Any) -> dict[str, str]:
    """The roles that were ordered, by host."""
    prefix = f"{KEYS.root}orders/"
    found = await plane.discovery.list(prefix)
    return {key.removeprefix(prefix).partition("/")[0]: value.decode() for key, value in found.items()}


async def test_a_start_is_ordered_from_the_host_with_the_most_free_slots() -> None:
    plane = await report({"full": (1, (1,)), "some": (4, (2, 3)), "most": (3, ())})
    actuator = await actuator_of(plane, Calls())
    await actuator.apply(Start(WorkerRole.DECODE, "", NO))
    assert await orders(plane) == {"most": "decode"}


async def test_a_host_that_lies_about_its_slots_delays_the_others_by_one_turn() -> None:
    plane = await report({"liar": (4096, ()), "honest": (2, ())})
    actuator = await actuator_of(plane, Calls())
    for expected in ({"liar"}, {"liar", "honest"}):
        await actuator.apply(Start(WorkerRole.DECODE, "", NO))
        assert set(await orders(plane)) == expected


async def test_without_a_free_slot_nothing_is_started() -> None:
    for hosts in ({}, {"full": (1, (1,))}):
        plane = await report(hosts)
        actuator = await actuator_of(plane, Calls())
        with pytest.raises(KvrelayError, match="free slot"):
            await actuator.apply(Start(WorkerRole.DECODE, "", NO))
        assert await orders(plane) == {}


async def test_slots_of_hosts_and_workers_elsewhere_may_run_at_once() -> None:
    calls = Calls(worker("a", WorkerRole.DECODE, 1), worker("by-hand", WorkerRole.PREFILL, 77))
    actuator = await actuator_of(await report({"h": (3, (1, 2))}), calls)
    assert await actuator.room() == Room(4, 1, frozenset({"a"})), "process 2 is not in discovery yet"
    without_hosts = await actuator_of(await report({}), calls)
    assert await without_hosts.room() == Room()


async def test_only_workers_of_hosts_are_stopped() -> None:
    calls = Calls(worker("a", WorkerRole.DECODE, 1), worker("by-hand", WorkerRole.PREFILL, 77))
    actuator = await actuator_of(await report({"h": (3, (1,))}), calls)
    await actuator.apply(Stop("a", "", NO))
    assert calls.asked == [("a", "drain", "")]
    for other in ("by-hand", "unknown"):
        with pytest.raises(KvrelayError, match="was not started by a host"):
            await actuator.apply(Stop(other, "", NO))


async def test_a_host_that_reports_another_s_processes_stops_none_of_them() -> None:
    calls = Calls(worker("a", WorkerRole.DECODE, 1), worker("b", WorkerRole.DECODE, 2))
    actuator = await actuator_of(await report({"honest": (2, (1, 2)), "liar": (1, (2, 3, 3, 99))}), calls)
    assert (await actuator.room()).may_stop == {"a"}
    with pytest.raises(KvrelayError, match="was not started by a host"):
        await actuator.apply(Stop("b", "", NO))
    assert calls.asked == []


async def test_processes_that_a_host_makes_up_leave_no_room_for_more_workers() -> None:
    calls = Calls(worker("a", WorkerRole.DECODE, 1))
    actuator = await actuator_of(await report({"honest": (2, (1,)), "liar": (0, tuple(range(100, 200)))}), calls)
    room = await actuator.room()
    assert room.max_workers - room.num_starting == 2


async def test_roles_are_commands() -> None:
    calls = Calls(worker("a", WorkerRole.DECODE, 1))
    actuator = await actuator_of(await report({}), calls)
    await actuator.apply(Widen("a", "", NO))
    await actuator.apply(Narrow("a", WorkerRole.PREFILL, "", NO))
    await eventually(lambda: len(calls.asked) == 2)
    assert calls.asked == [("a", "role", "both from decode"), ("a", "role", "prefill from decode")]
    await actuator.close()


def test_hosts_that_report_nonsense_are_left_out() -> None:
    good = msgspec.json.encode(HostReport("h", "here", "m", 2))
    lies = [
        b"",
        b"{}",
        b'{"host_id":"x","host":"h","model":"m","slots":-1}',
        good.replace(b'"slots":2', b'"slots":99999'),
    ]
    assert [host.host_id for host in read_hosts({str(n): value for n, value in enumerate([*lies, good])})] == ["h"]


HOOK = """
import json, sys
wanted = json.load(sys.stdin)
with open(sys.argv[1], "a") as file:
    print(json.dumps(wanted), file=file)
if wanted["decode"] > 2:
    sys.exit("no quota")
"""


async def test_a_hook_gets_the_wanted_counts_and_its_failure_holds(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(HOOK)
    told = tmp_path / "told"
    calls = Calls(worker("p", WorkerRole.PREFILL, 1), worker("d", WorkerRole.DECODE, 2))
    plane = await report({})
    hosts = Hosts(plane, KEYS, await plane.discovery.grant(10.0))
    command = f"{sys.executable} {tmp_path / 'hook.py'} {told}"
    actuator = HookActuator(calls, hosts, command, 5)  # type: ignore[arg-type]
    await actuator.apply(Start(WorkerRole.DECODE, "", NO))
    await actuator.apply(Stop("p", "", NO))
    assert [json.loads(line) for line in told.read_text().splitlines()] == [
        {"prefill": 1, "decode": 2, "both": 0, "stop": None},
        {"prefill": 0, "decode": 1, "both": 0, "stop": "p"},
    ]
    calls.known["d2"] = worker("d2", WorkerRole.DECODE, 3)
    with pytest.raises(KvrelayError, match="exit code 1: no quota"):
        await actuator.apply(Start(WorkerRole.DECODE, "", NO))
    missing = HookActuator(calls, hosts, "/no/such/command", 5)  # type: ignore[arg-type]
    with pytest.raises(KvrelayError, match="cannot be run"):
        await missing.apply(Start(WorkerRole.DECODE, "", NO))


async def test_a_host_that_is_told_to_end_while_the_control_plane_is_away_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = MemoryBroker()
    monkeypatch.setattr("kvrelay.launch.request_plane.connect_control", AsyncMock(return_value=broker.plane()))
    host = WorkerHost(ControlConfig(), "m", 1, lambda: [], lambda _: None)
    hosting = asyncio.create_task(host.run_forever())
    await eventually(lambda: bool(broker.visible(KEYS.hosts)))
    broker.is_online = False
    hosting.cancel()
    await asyncio.wait({hosting}, timeout=PATIENCE_S)
    assert hosting.cancelled()


def test_a_worker_that_never_becomes_ready_gives_its_slot_back() -> None:
    """Those that registered, and those that serve began with, are left alone."""
    children = []
    for name, is_extra in (("stuck", True), ("registered", True), ("first", False)):
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        children.append(Child(name, [], process, is_extra=is_extra))
    host = WorkerHost(ControlConfig(), "m", 3, lambda: children, lambda _: None)
    try:
        host.end_stuck({children[1].pid}, 0.0)
        host.end_stuck({children[1].pid}, READY_LIMIT_S - 1)
        assert [child.exit_code for child in children] == [None, None, None]
        host.end_stuck({children[1].pid}, READY_LIMIT_S)
        children[0].process.wait(PATIENCE_S)
        assert [child.exit_code for child in children[1:]] == [None, None]
        assert not keep(children[0], READY_LIMIT_S), "its slot is free"
    finally:
        for child in children:
            child.process.kill()
            child.process.communicate()


async def test_an_order_counts_although_its_entry_cannot_be_deleted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker, started = MemoryBroker(), list[WorkerRole]()

    @asynccontextmanager
    async def connected(config: ControlConfig) -> AsyncIterator[Any]:
        yield broker.plane()

    def start(role: WorkerRole) -> None:
        started.append(role)
        broker.is_online = False

    monkeypatch.setattr("kvrelay.launch.worker_host.connected", connected)
    host = WorkerHost(ControlConfig(), "m", 1, list, start)
    running = asyncio.create_task(host.run_forever())
    plane = broker.plane()
    await plane.discovery.put(f"{KEYS.orders(host.host_id)}1", b"decode", await plane.discovery.grant(60.0))
    await eventually(lambda: started == [WorkerRole.DECODE])
    await eventually(lambda: "cannot be deleted" in caplog.text or "failed" in caplog.text)
    await end_tasks([running])
    await plane.close()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_machine_that_cannot_start_a_process_now_hears_the_next_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker, started = MemoryBroker(), list[WorkerRole]()

    def start(role: WorkerRole) -> None:
        started.append(role)
        if len(started) == 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("kvrelay.launch.request_plane.connect_control", AsyncMock(return_value=broker.plane()))
    host = WorkerHost(ControlConfig(), "m", 1, list, start)
    running = asyncio.create_task(host.run_forever())
    plane = broker.plane()
    lease = await plane.discovery.grant(60.0)
    for number in (1, 2):
        await plane.discovery.put(f"{KEYS.orders(host.host_id)}{number}", b"decode", lease)
        await eventually(lambda number=number: len(started) == number or running.done())
    await end_tasks([running])
    await plane.close()
    assert len(started) == 2
    assert "decode worker was not carried out: [Errno 11] Resource temporarily unavailable" in caplog.text
