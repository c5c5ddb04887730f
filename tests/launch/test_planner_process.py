"""A planner process without the process: an in-memory control plane, a fleet that is written down, and an actuator that
takes notes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.planner.toy import OBJECTIVES, steady, workers

from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker, MemoryControlPlane
from kvrelay.errors import IntegrityError, InvalidInputError, WorkerUnavailableError
from kvrelay.launch import planner_process
from kvrelay.launch.planner_admin import replay_log, reports_text
from kvrelay.launch.planner_process import PlannerConfig, PlannerProcess
from kvrelay.planner import Action, Demand, FleetView, Hold, Room, Stop, Widen, WorkerView
from kvrelay.planner.log import MAX_BYTES, DecisionLog, read_log
from kvrelay.planner.report import PAUSED, PlannerReport, read_reports

KEYS = Keys("default")
ANSWERS = steady(3, 400, 360)
"""More than one decode worker can carry."""


class Given:
    """An observer whose clock moves by a window at each look."""

    def __init__(self, *fleet: WorkerView) -> None:
        self.fleet, self.now_s, self.demand = fleet, 0.0, ANSWERS

    async def look(self) -> tuple[FleetView, Demand]:
        self.now_s += OBJECTIVES.window_s
        return FleetView(now_s=self.now_s, workers=self.fleet, spread=0.03), self.demand


class Notes:
    """An actuator. ``error``: raised instead of acting."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.error: WorkerUnavailableError | None = None
        self.given_room = Room()

    async def apply(self, action: Action) -> None:
        if self.error is not None:
            raise self.error
        self.actions.append(action)

    async def room(self) -> Room:
        return self.given_room

    @property
    def widened(self) -> list[str]:
        return [action.worker_id for action in self.actions if isinstance(action, Widen)]


class Running:
    """A planner in ``broker``'s cluster."""

    def __init__(self, broker: MemoryBroker, mode: str, log_file: Path | None = None) -> None:
        self.plane: MemoryControlPlane = broker.plane()
        self.config = PlannerConfig(mode, OBJECTIVES, log_file=log_file)
        self.given, self.notes = Given(*workers(3, 1)), Notes()

    async def start(self, started_unix: float = 1.0) -> PlannerProcess:
        lease = await self.plane.discovery.grant(60.0)
        process = PlannerProcess(self.config, self.plane, KEYS, lease, self.given, self.notes)
        process.report = msgspec.structs.replace(process.report, started_unix=started_unix)
        await process.register()
        return process


async def test_a_defect_is_told_and_ends_neither_the_planner_nor_the_cluster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``serve`` gives up after five crashes of a child."""
    running = Running(MemoryBroker(), "act")
    process = await running.start()
    with monkeypatch.context() as patch:
        patch.setattr(planner_process, "plan", lambda *_: 1 / 0)
        await process.tick()
        await process.tick()
    assert process.report.is_leader
    assert "ZeroDivisionError" in process.report.problem
    assert caplog.text.count("Traceback") == 1
    listed = read_reports(await running.plane.discovery.list(KEYS.planners))
    assert "ZeroDivisionError" in listed[0].problem
    await process.tick()
    assert process.report.problem == ""


async def test_a_planner_suggests_and_changes_nothing() -> None:
    broker = MemoryBroker()
    running = Running(broker, "suggest")
    process = await running.start()
    for _ in range(4):
        await process.tick()
    assert isinstance(process.report.actions[0], Widen)
    assert running.notes.actions == []
    (shown,) = read_reports(await running.plane.discovery.list(KEYS.planners))
    assert shown.actions == process.report.actions
    assert shown.shape == "3P1D"
    text = reports_text(msgspec.to_builtins([shown]))
    assert "widen p0: prefill -> both" in text
    assert "suggest, 0 changes" in text
    await running.plane.close()


async def test_it_acts_unless_it_is_paused() -> None:
    broker = MemoryBroker()
    running = Running(broker, "act")
    process = await running.start()
    pause = KEYS.config_value(PAUSED)
    await running.plane.discovery.put(pause, b"true")
    for _ in range(4):
        await process.tick()
    assert running.notes.widened == []
    assert process.report.is_paused
    await running.plane.discovery.delete(pause)
    await process.tick()
    assert running.notes.widened == ["p0"]
    assert process.report.num_changes == 1
    await process.tick()
    assert running.notes.widened == ["p0"]  # it waits for the first change
    assert "waiting for p0" in process.report.actions[0].reason
    await running.plane.close()


async def test_an_action_that_fails_is_told_and_planned_again() -> None:
    running = Running(MemoryBroker(), "act")
    running.notes.error = WorkerUnavailableError("p0 does not answer")
    process = await running.start()
    for _ in range(4):
        await process.tick()
    assert process.report.problem == "widen failed: p0 does not answer"
    running.notes.error = None
    await process.tick()
    assert running.notes.widened == ["p0"]
    assert process.report.problem == ""
    await running.plane.close()


async def test_frontends_learn_whether_it_starts_workers_and_unstoppable_ones_are_left() -> None:
    running = Running(MemoryBroker(), "act")
    process = await running.start()
    await process.tick()
    assert not process.report.can_start, "there is no host"
    running.notes.given_room = Room(9, 0, frozenset({"p1"}))
    running.given.demand = steady(0)
    for _ in range(30):
        await process.tick()
    assert process.report.can_start
    stops = [action.worker_id for action in running.notes.actions if isinstance(action, Stop)]
    assert set(stops) == {"p1"}
    await running.plane.discovery.put(KEYS.config_value(PAUSED), b"true")
    await process.tick()
    assert not process.report.can_start
    await running.plane.close()


async def test_the_oldest_of_two_planners_decides_and_the_other_takes_over() -> None:
    broker = MemoryBroker()
    older, newer = Running(broker, "act"), Running(broker, "act")
    first, second = await older.start(1.0), await newer.start(2.0)
    for _ in range(4):
        await second.tick()
        await first.tick()
    assert older.notes.widened == ["p0"]
    assert newer.notes.actions == []
    assert second.report.problem == f"planner {first.report.planner_id} decides"
    await older.plane.discovery.delete(KEYS.planner(first.report.planner_id))
    for _ in range(3):
        await second.tick()
    assert newer.notes.widened == ["p0"]
    assert second.report.is_leader
    await older.plane.close()
    await newer.plane.close()


async def test_a_role_set_by_hand_is_noted_for_the_next_leader_until_it_is_released() -> None:
    running = Running(MemoryBroker(), "act")
    fleet = running.given.fleet
    running.given.fleet = workers(3, 1, kv_tokens=1 << 24)
    process = await running.start()
    await process.tick()
    by_hand = msgspec.structs.replace(fleet[0], role=fleet[3].role)
    running.given.fleet = (by_hand, *fleet[1:])
    await process.tick()
    await process.tick()
    assert process.report.held == ("p0",)
    held = KEYS.config_value("planner.held.p0")
    assert await running.plane.discovery.get(held) == b"true"
    await running.plane.discovery.delete(held)
    await process.tick()
    assert process.report.held == ()
    await running.plane.close()


async def test_without_a_control_plane_nothing_changes_and_it_says_so() -> None:
    broker = MemoryBroker()
    running = Running(broker, "act")
    process = await running.start()
    await process.tick()
    broker.is_online = False
    for _ in range(4):
        await process.tick()
    assert "the control plane is away" in process.report.problem
    assert running.notes.widened == []
    broker.is_online = True
    for _ in range(4):
        await process.tick()
    assert running.notes.widened == ["p0"]
    assert process.report.problem == ""
    await running.plane.close()


async def test_a_log_is_planned_again_with_the_same_result(tmp_path: Path) -> None:
    log = tmp_path / "state" / "planner.jsonl"
    running = Running(MemoryBroker(), "act", log)
    process = await running.start()
    for _ in range(6):
        await process.tick()
    decisions = list(read_log(log))
    assert [type(decision.actions[0]) for decision in decisions].count(Widen) == 1
    assert sum(decision.is_carried_out for decision in decisions) == len(decisions)
    assert f"{len(decisions)} decisions" in replay_log(log)
    assert os.stat(log).st_mode & 0o777 == 0o600
    wrong = [
        msgspec.structs.replace(decision, actions=(Hold("x", decision.actions[0].numbers),)) for decision in decisions
    ]
    log.write_bytes(b"".join(msgspec.json.encode(decision) + b"\n" for decision in wrong))
    with pytest.raises(IntegrityError, match="decision 1"):
        replay_log(log)
    log.write_text("{}\n")
    with pytest.raises(InvalidInputError, match="line 1"):
        replay_log(log)
    await running.plane.close()


async def test_a_log_is_bounded_and_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    log = tmp_path / "planner.jsonl"
    running = Running(MemoryBroker(), "suggest", log)
    process = await running.start()
    await process.tick()
    (decision,) = read_log(log)
    log.write_bytes(b" " * MAX_BYTES)
    await process.tick()
    DecisionLog(log).add(decision)
    assert (tmp_path / "planner.jsonl.1").stat().st_size == MAX_BYTES
    assert log.stat().st_size < 64 * 1024
    blocked = DecisionLog(tmp_path / "planner.jsonl.1" / "log")
    blocked.add(decision)
    assert "cannot write" in blocked.error
    await running.plane.close()


def test_reports_that_cannot_be_read_are_left_out() -> None:
    report = PlannerReport(planner_id="a", host="h", pid=1, started_unix=2.0, mode="act")
    entries = {"1": b"no JSON", "2": msgspec.json.encode(report), "3": b"{" * 100_000, "4": b"[]"}
    assert read_reports(entries) == [report]
    assert "no planner runs" in reports_text([])
