"""What ``serve`` does about children and a NATS server that end, by the clock's hand."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.launch.test_serve import serve_config

from kvrelay.core.clock import ManualClock
from kvrelay.errors import AddressInUseError, ControlUnavailableError, FatalError
from kvrelay.launch.children import CRASH_LOOP_LIMIT, RESTART_BACKOFF_S, Child, Fate, supervise
from kvrelay.launch.nats_supervisor import STORAGE_BACKOFF_S, STORAGE_INTERVAL_S, NatsSupervisor
from kvrelay.launch.serve import LocalCluster
from kvrelay.launch.worker_host import keep


class Process:
    """Ended with ``code``."""

    pid = 1

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


def child(code: int) -> Child:
    process: Any = Process(code)
    return Child("decode worker 0", ["true"], process)


class Supervised:
    """A cluster of one child that ends again and again; ``restarts`` says when it was started."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.cluster = LocalCluster(serve_config(tmp_path))
        self.child = child(code)
        self.now_s = 0.0
        self.restarts: list[float] = []
        monkeypatch.setattr("kvrelay.launch.children.restart", self._restart)

    def _restart(self, child: Child) -> None:
        child.restart_s = None
        self.restarts.append(self.now_s)

    def run(self, seconds: float) -> None:
        """It is looked at five times a second, as in ``serve``."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.cluster.revive(self.child, self.now_s)
            self.now_s += 0.2


def test_a_worker_without_control_plane_is_started_again_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Supervised(tmp_path, monkeypatch, ControlUnavailableError.exit_code)
    one.run(600.0)
    assert len(one.restarts) > 100
    pauses = [after - before for before, after in itertools.pairwise(one.restarts)]
    assert max(pauses) < 5.0
    # Once the control plane is back, crashes count from none.
    assert one.child.crashes_s == []


def test_a_worker_that_crashes_in_a_loop_ends_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Supervised(tmp_path, monkeypatch, 1)
    with pytest.raises(FatalError, match="crashes in a loop"):
        one.run(60.0)
    assert len(one.restarts) == CRASH_LOOP_LIMIT - 1


@pytest.mark.parametrize(("code", "num_restarts"), [(0, 0), (1, CRASH_LOOP_LIMIT - 1), (-9, CRASH_LOOP_LIMIT - 1)])
def test_an_agent_frees_the_slot_of_a_worker_that_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, num_restarts: int
) -> None:
    one = Supervised(tmp_path, monkeypatch, code)
    while keep(one.child, one.now_s):
        one.now_s += 0.2
        assert one.now_s < 60.0
    assert len(one.restarts) == num_restarts


def test_a_child_that_was_told_to_leave_has_not_crashed() -> None:
    left = child(0)
    assert supervise(left, 0.0) is Fate.HAS_LEFT
    assert (left.crashes_s, left.restart_s) == ([], None)


def test_pauses_before_restarts_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Supervised(tmp_path, monkeypatch, 1)
    with pytest.raises(FatalError):
        one.run(60.0)
    starts = [0.0, *one.restarts]
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    # Two looks more at most: one finds that it has ended, one that the pause is over.
    assert all(due <= pause <= due + 0.5 for due, pause in zip(RESTART_BACKOFF_S, pauses, strict=True)), pauses


@pytest.mark.parametrize(("is_extra", "ends"), [(True, False), (False, True)])
def test_a_cluster_goes_on_without_an_extra_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_extra: bool, ends: bool
) -> None:
    one = Supervised(tmp_path, monkeypatch, 1)
    one.child.is_extra = is_extra
    one.child.crashes_s = [0.0] * CRASH_LOOP_LIMIT
    with pytest.raises(FatalError) if ends else nullcontext():
        one.cluster.revive(one.child, 1.0)
    assert one.restarts == []


def test_crashes_between_absences_of_the_control_plane_still_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Supervised(tmp_path, monkeypatch, 1)
    process: Any = one.child.process

    def end_alternately() -> None:
        for code in (1, 69) * 20:
            process.code = code
            before = len(one.restarts)
            while len(one.restarts) == before:
                one.run(0.2)

    with pytest.raises(FatalError, match="crashes in a loop"):
        end_alternately()


@dataclass
class Server:
    """Cannot be started ``num_refusals`` times. A restart does not mend its storage."""

    num_refusals: int = 0
    is_running: bool = False
    num_attempts: int = 0
    storage: str | None = None
    room: str | None = None

    def end(self) -> None:
        self.is_running = False

    def storage_problem(self) -> str | None:
        return self.storage

    def room_problem(self) -> str | None:
        return self.room

    def start(self) -> str:
        self.num_attempts += 1
        if self.num_attempts <= self.num_refusals:
            raise AddressInUseError("port 4222 of 127.0.0.1 is in use")
        self.is_running = True
        return "nats://127.0.0.1:4222"


async def test_a_nats_server_whose_port_is_taken_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    clock, server = ManualClock(), Server(num_refusals=30)
    supervisor = NatsSupervisor(server, clock)
    attempts_s: list[float] = []
    while not server.is_running:
        before = server.num_attempts
        await supervisor.check()
        if server.num_attempts > before:
            attempts_s.append(clock.now())
        clock.advance(0.25)
    assert server.num_attempts == 31
    pauses = [after - before for before, after in itertools.pairwise(attempts_s)]
    assert max(pauses) <= 5.25
    said = capsys.readouterr().err
    assert "is in use" in said
    assert said.rstrip().endswith("runs again, after 31 attempts")
    # The next time it ends it is started at once.
    server.is_running = False
    await supervisor.check()
    assert server.is_running


async def check_for(supervisor: NatsSupervisor, clock: ManualClock, seconds: float) -> None:
    end_s = clock.now() + seconds
    while clock.now() < end_s:
        await supervisor.check()
        clock.advance(0.25)


async def test_a_nats_server_that_stores_nothing_is_restarted_once_there_is_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, server = ManualClock(), Server(is_running=True)
    supervisor = NatsSupervisor(server, clock)
    await check_for(supervisor, clock, 60.0)
    assert (server.num_attempts, capsys.readouterr().err) == (0, "")

    server.storage, server.room = "write error", "cannot write in /data: No space left on device"
    await check_for(supervisor, clock, 60.0)
    assert server.num_attempts == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "stores nothing (write error)" in said[0]
    assert "/data: No space left on device; free space there" in said[0]

    server.room = None
    await check_for(supervisor, clock, STORAGE_INTERVAL_S + 1.0)
    assert server.is_running
    assert server.num_attempts == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "(write error): restarting it" in said[0]


async def test_a_nats_server_whose_storage_stays_broken_is_restarted_ever_more_rarely() -> None:
    clock, server = ManualClock(), Server(is_running=True, storage="write error")
    supervisor = NatsSupervisor(server, clock)
    await check_for(supervisor, clock, 3600.0)
    assert 10 <= server.num_attempts <= 20
    # A healthy time in between: the next failure counts as the first.
    server.storage = None
    await check_for(supervisor, clock, 600.0)
    server.storage, server.num_attempts = "write error", 0
    await check_for(supervisor, clock, STORAGE_BACKOFF_S[0] + 2 * STORAGE_INTERVAL_S)
    assert server.num_attempts == 2


async def test_a_nats_server_that_cannot_be_started_after_its_storage_failed_is_tried_again() -> None:
    clock, server = ManualClock(), Server(num_refusals=3, is_running=True, storage="write error")
    supervisor = NatsSupervisor(server, clock)
    await check_for(supervisor, clock, 20.0)
    assert server.is_running
    assert server.num_attempts == 4
