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
from kvrelay.core.process_usage import Usage
from kvrelay.errors import IntegrityError, InvalidInputError, WorkerUnavailableError
from kvrelay.launch import planner_process
from kvrelay.launch.planner_admin import replay_log, reports_text
from kvrelay.launch.planner_process import PlannerConfig, PlannerProcess
from kvrelay.planner import Action, Demand, FleetView, Hold, Measured, Room, Stop, Widen, WorkerView
from kvrelay.planner.log import MAX_BYTES, DecisionLog, read_log
from kvrelay.planner.report import PAUSED, PlannerReport, read_reports

KEYS = Keys("default")
ANSWERS = steady(3, 400, 360)
"""More than one decode worker can carry."""


class Given:
    """An observer whose clock moves by a window at each look."""

    def __init__(self, *fleet: WorkerView) -> None:
        self.fleet, self.now_s, self.demand = fleet, 0.0, ANSWERS
        self.measured: Measured | None = None

    async def look(self) -> tuple[FleetView, Demand]:
        self.now_s += OBJECTIVES.window_s
        fleet = FleetView(now_s=self.now_s, workers=self.fleet, spread=0.03, measured=self.measured)
        return fleet, self.demand


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
    # Seconds of lateness per second, which the planner compares, tell people nothing.
    assert "3 requests/s, each 400 tokens to prefill and 360 to answer; prefill " in text
    assert "lateness" not in text
    await running.plane.close()


async def test_estimates_that_are_wrong_for_a_minute_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """400 tokens take 0.1 s, and a step with one answer 21 ms."""
    running = Running(MemoryBroker(), "suggest")
    running.given.demand = steady(1, 400, 30)
    process = await running.start()

    async def ticks(count: int, ttft_s: tuple[float, float]) -> str:
        running.given.measured = Measured(ttft_s=ttft_s, itl_s=(0.01, 0.025))
        for _ in range(count):
            await process.tick()
        return reports_text(msgspec.to_builtins([process.report]))

    assert "first token (95 %): expected 0.1" in await ticks(20, (0.1, 0.25))
    assert process.report.doubt == ""
    await ticks(12, (5.0, 10.0))
    assert process.report.doubt == ""  # 55 s
    await ticks(20, (0.25, 0.5))
    assert process.report.doubt == ""  # well within the objective of 2 s
    await ticks(13, (5.0, 10.0))
    assert "measured 5 to 10 s; do not rely on this plan" in await ticks(5, (5.0, 10.0))
    assert caplog.text.count("measured 5 to 10 s") == 1
    await ticks(1, (0.1, 0.25))
    assert process.report.doubt == ""


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
    (change,) = process.report.changes
    assert (change.what, change.reason != "") == ("widen p0", True)
    assert not change.reason.startswith("widen")
    assert f"widen p0: {change.reason}" in reports_text(msgspec.to_builtins([process.report]))
    assert change.unix_s == pytest.approx(process.report.unix_s, abs=60.0)
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


@pytest.mark.parametrize("needs_worker", [True, False])
async def test_min_workers_0_does_not_take_the_last_worker_of_a_serve_that_needs_one(needs_worker: bool) -> None:
    running = Running(MemoryBroker(), "act")
    running.config = PlannerConfig("act", msgspec.structs.replace(OBJECTIVES, min_workers=0, quiet_s=30.0))
    running.given.fleet = workers(0, 1)
    running.given.demand = Demand(duration_s=5.0)
    running.notes.given_room = Room(2, 0, frozenset({"d0"}), needs_worker)
    process = await running.start()
    for _ in range(20):
        await process.tick()
    assert any(isinstance(action, Stop) for action in running.notes.actions) is not needs_worker
    await running.plane.close()


async def test_a_planner_tells_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean cores since the report before: 10 s of CPU in an interval of 2 s are 5, whatever the time of this test."""
    used = iter([Usage(1.0, 1), Usage(11.0, 2048), Usage(4.0, 1024)])

    class Scripted:
        def read(self) -> Usage:
            return next(used)

    monkeypatch.setattr(planner_process, "ProcessUsage", Scripted)
    monkeypatch.setattr(planner_process, "REPORT_INTERVAL_S", 0.0)
    running = Running(MemoryBroker(), "suggest")
    process = await running.start()
    for most_cores, rss_bytes in ((5.0, 2048), (0.0, 1024)):
        await process.tick()
        (shown,) = read_reports(await running.plane.discovery.list(KEYS.planners))
        assert 0.0 <= shown.cpu_cores <= most_cores
        assert (shown.cpu_cores > 0.0) is (most_cores > 0.0)
        assert shown.rss_bytes == rss_bytes
    await running.plane.close()


def test_usage_that_no_process_can_have_is_unreadable() -> None:
    good = PlannerReport(planner_id="a", host="h", pid=1, started_unix=2.0, mode="act", cpu_cores=1.0)
    for bad in ({"cpu_cores": -1.0}, {"rss_bytes": -1}, {"cpu_cores": 1e300}):
        assert not read_reports({"a": msgspec.json.encode(msgspec.structs.replace(good, **bad))})
    assert read_reports({"a": msgspec.json.encode(good)}) == [good]


async def test_a_newcomer_whose_clock_is_behind_does_not_take_over() -> None:
    broker = MemoryBroker()
    deciding, newcomer = Running(broker, "act"), Running(broker, "act")
    first = await deciding.start(2.0)
    await first.tick()
    second = await newcomer.start(1.0)
    for _ in range(4):
        await second.tick()
        await first.tick()
    assert first.report.is_leader
    assert second.report.problem == f"planner {first.report.planner_id} decides"
    assert (deciding.notes.widened, newcomer.notes.widened) == (["p0"], [])
    await deciding.plane.close()
    await newcomer.plane.close()


async def test_of_two_planners_that_both_decide_one_resigns() -> None:
    """Each has begun without a sight of the other."""
    broker = MemoryBroker()
    running = [Running(broker, "act"), Running(broker, "act")]
    planners = [await one.start(start) for one, start in zip(running, (1.0, 2.0))]
    for planner in planners:
        planner.report = msgspec.structs.replace(planner.report, is_leader=True)
        await planner.register()
    for planner in planners:
        await planner.tick()
    assert [planner.report.is_leader for planner in planners] == [True, False]
    for one in running:
        await one.plane.close()


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
    running.given.fleet = workers(3, 1, num_blocks=1 << 20)
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
