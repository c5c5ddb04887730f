"""The lines that say what is wrong now: each fault alone has its own, and a healthy cluster none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.frontend.doubles import FakeWorker, Script

from kvrelay.config import WorkerRole
from kvrelay.core.workers import WorkerInfo
from kvrelay.frontend.cluster.snapshot import FrontendView, Quantiles, Totals, WorkerCondition, WorkerView
from kvrelay.frontend.cluster.wrong_now import MAX_NAMES, Severity, Wrong, wrong_now
from kvrelay.planner import Hold, Numbers, Start
from kvrelay.planner.report import PlannerReport
from kvrelay.rpc.loopback import LoopbackNetwork

NONE = Quantiles(None, None, None)
WHOLE = Totals(
    1.0, 1.0, 9.0, 9.0, 60, 60, 0, 0.0, 0, 0, 60, 60, 0, 0, 500.0, 25.0, 2, 2, 0, 0, 0.0, 10, 100, 0, 0, NONE, NONE
)
FRONTEND = FrontendView("f", "h", 1, "1.0", True, False, 0.0, 2, 1.0, 1.0, 9.0, 60, 60, 0, 0)


def worker(name: str, role: WorkerRole = WorkerRole.DECODE, **changes: object) -> WorkerView:
    view = WorkerView(name, role, "m", WorkerCondition.READY, "h", "mock", "1.0", 10.0)
    known = {
        "age_s": 1.0,
        "num_admitted": 1,
        "num_slots": 8,
        "num_waiting": 0,
        "num_blocks_in_use": 5,
        "num_blocks": 100,
    }
    return msgspec.structs.replace(view, **{**known, **changes})


def found(
    *workers: WorkerView,
    frontends: tuple[FrontendView, ...] = (FRONTEND,),
    has_control: bool = True,
    has_discovery: bool = True,
    planners: tuple[PlannerReport, ...] = (),
    crashed: tuple[WorkerInfo, ...] = (),
    **whole: object,
) -> list[Wrong]:
    total = msgspec.structs.replace(WHOLE, **whole)
    return wrong_now(
        workers,
        frontends,
        total,
        has_control=has_control,
        has_discovery=has_discovery,
        planners=planners,
        crashed=crashed,
    )


PREFILL = worker("p", WorkerRole.PREFILL)
HEALTHY = (PREFILL, worker("d"))


def test_nothing_is_wrong_with_a_healthy_cluster() -> None:
    assert found(*HEALTHY) == []
    assert found(worker("b", WorkerRole.BOTH)) == []
    # What was queued a moment ago, a step of a second, and a frontend that has left are no faults.
    gone = msgspec.structs.replace(FRONTEND, id="g", release="", age_s=20.0)
    assert (
        found(PREFILL, worker("d", step_age_s=2.0, num_waiting=3, waiting_for_s=2.0), frontends=(FRONTEND, gone)) == []
    )
    assert found(*HEALTHY, prefill_queue=4, prefill_queue_for_s=3.0) == []
    assert found(*HEALTHY, prefill_queue=None) == []


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"state": WorkerCondition.SILENT, "age_s": 7.2}, "silent-worker", "silent for up to 7 s: a lease lasts 10 s"),
        (
            {"state": WorkerCondition.UNREACHED, "age_s": None, "problem": "workers with other weights serve m"},
            "unreached-worker",
            "this frontend has no connection: workers with other weights serve m",
        ),
        (
            {"refused_adapters": {"org/sql@12": "rank 64 is above --max-lora-rank 16", "chat@34": "full"}},
            "refused-adapter",
            "without adapter org/sql (and 1 more): rank 64 is above --max-lora-rank 16; its requests go to others",
        ),
        ({"step_age_s": 31.0}, "stuck-step", "at one step for 31 s: the engine may hang"),
        ({"num_blocks_in_use": 96}, "kv-full", "KV 96% full: preemptions or refusals are near"),
        ({"num_waiting": 5, "waiting_for_s": 40.0}, "waiting-requests", "up to 40 s without a break (5 now)"),
    ],
)
def test_a_worker_with_a_fault_is_named_with_the_reason(changes: dict[str, object], kind: str, text: str) -> None:
    (wrong,) = found(*HEALTHY, worker("x", **changes))
    assert (wrong.kind, wrong.workers) == (kind, ["x"])
    assert wrong.text.startswith("x: ")
    assert text in wrong.text
    assert "\n" not in wrong.text


@pytest.mark.parametrize(
    ("whole", "kind", "text"),
    [
        ({"failed_last_minute": 3}, "failed-requests", "3 of 60 requests failed in the last minute"),
        ({"prefill_queue": 5, "prefill_queue_for_s": 12.0}, "prefill-queue", "5 prefills queued"),
        ({"has_control": False}, "no-control-plane", "has lost the control plane"),
        ({"has_control": False, "has_discovery": False}, "no-control-plane", "has lost the control plane"),
        ({"has_discovery": False}, "no-control-plane", "has lost the discovery server"),
    ],
)
def test_a_fault_of_the_whole_has_its_line(whole: dict[str, object], kind: str, text: str) -> None:
    (wrong,) = found(*HEALTHY, **whole)
    assert wrong.kind == kind
    assert text in wrong.text


def test_without_the_control_plane_nothing_is_said_of_what_samples_would_tell() -> None:
    """Samples come by it: with a paused NATS server every busy worker was said to hang."""
    old = {"age_s": 20.0, "step_age_s": 20.0, "waiting_for_s": 20.0, "num_blocks_in_use": 100, "num_blocks": 100}
    busy = [msgspec.structs.replace(one, state=WorkerCondition.SILENT, **old) for one in HEALTHY]
    assert {wrong.kind for wrong in found(*busy)} == {"silent-worker", "stuck-step", "kv-full", "waiting-requests"}
    (wrong,) = found(*busy, has_control=False)
    assert wrong.kind == "no-control-plane"


@pytest.mark.parametrize(("age_s", "is_heard"), [(1.0, True), (11.0, False)])
def test_a_step_that_no_sample_tells_of_may_be_the_connection(age_s: float, *, is_heard: bool) -> None:
    (wrong,) = found(HEALTHY[0], msgspec.structs.replace(HEALTHY[1], age_s=age_s, step_age_s=11.0))
    assert wrong.kind == "stuck-step"
    assert ("lost the control plane" not in wrong.text) == is_heard


REFUSED = {"requests_last_minute": 732, "refused_last_minute": 612, "refused_per_s": 25.9}
LATE = {"judged_last_minute": 60, "in_time_last_minute": 12, "late_first_token_last_minute": 48}


@pytest.mark.parametrize(
    ("whole", "severity", "kind", "text"),
    [
        (
            REFUSED,
            Severity.ERROR,
            "refused-requests",
            "612 of 732 requests (84%; 25.9/s now) were refused with 429 in the last minute: queues or KV are full; "
            "add workers, or let more wait (--max-num-waiting, --max-waiting-requests)",
        ),
        (
            {"refused_last_minute": 5},
            Severity.WARNING,
            "refused-requests",
            "5 of 60 requests (8%; 0.0/s now) were refused with 429 in the last minute: queues or KV are full; "
            "add workers, or let more wait (--max-num-waiting, --max-waiting-requests)",
        ),
        (
            {"refused_last_minute": 30, "limited_last_minute": 30},
            Severity.WARNING,
            "refused-requests",
            "30 of 60 requests (50%; 0.0/s now) were refused with 429 in the last minute: above the limits of their "
            "API keys",
        ),
        (
            LATE | {"ttft_ms": Quantiles(6000.0, 8700.0, None)},
            Severity.WARNING,
            "missed-objectives",
            "48 of 60 answers of the last minute missed an objective: 48 by the first token (p95 8.7 s, objective "
            "500 ms); add workers, or set what is wanted (--slo-ttft-ms, --slo-itl-ms)",
        ),
        (
            {"judged_last_minute": 60, "in_time_last_minute": 50, "late_gaps_last_minute": 10},
            Severity.WARNING,
            "missed-objectives",
            "10 of 60 answers of the last minute missed an objective: 10 by the time between tokens (objective 25 ms); "
            "add workers, or set what is wanted (--slo-ttft-ms, --slo-itl-ms)",
        ),
    ],
)
def test_overload_is_told_with_what_helps(whole: dict[str, object], severity: Severity, kind: str, text: str) -> None:
    (wrong,) = found(*HEALTHY, **whole)
    assert (wrong.severity, wrong.kind, wrong.text) == (severity, kind, text)


def test_a_few_late_answers_are_no_overload() -> None:
    assert found(*HEALTHY, judged_last_minute=4, in_time_last_minute=0) == []
    assert found(*HEALTHY, judged_last_minute=60, in_time_last_minute=54) == []


def test_a_planner_that_changes_nothing_is_told_while_there_is_overload() -> None:
    hold = Hold("no single change is worth its cost", Numbers())
    report = PlannerReport(planner_id="x", host="h", pid=1, started_unix=0.0, mode="act", actions=(hold,))
    assert found(*HEALTHY, planners=(report,)) == []
    late, holds = found(*HEALTHY, planners=(report,), **LATE)
    assert (late.kind, holds.kind) == ("missed-objectives", "planner-holds")
    assert holds.text == "the planner changes nothing meanwhile: no single change is worth its cost"
    stuck = msgspec.structs.replace(report, problem="no worker tells its costs")
    assert found(*HEALTHY, planners=(stuck,), **LATE)[1].text.endswith(": no worker tells its costs")
    paused = msgspec.structs.replace(report, is_paused=True)
    start = msgspec.structs.replace(report, actions=(Start(WorkerRole.DECODE, "late", Numbers()),))
    assert len(found(*HEALTHY, planners=(report,), requests_per_s=0.0, **LATE)) == 1  # the load is over
    for quiet in (paused, start):
        assert len(found(*HEALTHY, planners=(quiet,), **LATE)) == 1


def test_a_planner_whose_estimates_are_wrong_is_told() -> None:
    doubt = "first token: expected 10.7 s, measured 0.1 to 0.25 s"
    report = PlannerReport(planner_id="x", host="h", pid=1, started_unix=0.0, mode="suggest", doubt=doubt)
    standby = msgspec.structs.replace(report, planner_id="y", doubt="")
    (wrong,) = found(*HEALTHY, planners=(report, standby))
    assert (wrong.kind, wrong.severity) == ("planner-doubts", Severity.WARNING)
    assert wrong.text == f"the planner's estimates are wrong: {doubt}"
    assert found(*HEALTHY, planners=(standby, report)) == []
    assert [each.kind for each in found(*HEALTHY, planners=(report,), refused_last_minute=1)] == ["refused-requests"]


def test_workers_that_crash_again_and_again_are_one_line(tmp_path: Path) -> None:
    infos = [FakeWorker(LoopbackNetwork(), Script(), f"d{n}").info(tmp_path, host="box", pid=n) for n in range(4)]
    elsewhere = msgspec.structs.replace(infos[0], host="other")
    assert found(*HEALTHY, crashed=(infos[0], infos[1], elsewhere)) == []
    (wrong,) = found(*HEALTHY, crashed=(*infos, elsewhere))
    assert (wrong.kind, wrong.severity) == ("crash-loop", Severity.ERROR)
    assert wrong.text == (
        "decode workers of tiny on box crashed 4 times in the last 10 minutes, the last was d3 (pid 3): its log has "
        "the reason"
    )
    # The one that replaces a crashed one knows how that ended; the present one knows it of the last.
    infos[2] = msgspec.structs.replace(infos[2], after_crash="killed by SIGKILL")
    (wrong,) = found(*HEALTHY, crashed=tuple(infos))
    assert wrong.text.endswith("the last was d3 (pid 3): killed by SIGKILL")
    present = msgspec.structs.replace(worker("d4"), model="tiny", host="box", after_crash="exit code 70: it hung")
    (wrong,) = (each for each in found(present, crashed=tuple(infos)) if each.kind == "crash-loop")
    assert wrong.text.endswith("the last was d3 (pid 3): exit code 70: it hung")


def test_models_without_a_worker_that_can() -> None:
    (wrong,) = found()
    assert (wrong.kind, wrong.severity) == ("no-worker", Severity.ERROR)
    (wrong,) = found(PREFILL)
    assert (wrong.kind, wrong.text) == (
        "no-decode-worker",
        "no decode worker serves m (none is in discovery): its requests get 503",
    )
    leaving = worker("d", state=WorkerCondition.LEAVING)
    (wrong,) = found(PREFILL, leaving)
    assert "1 known, none connected" in wrong.text
    (wrong,) = found(worker("d"))
    assert (wrong.kind, wrong.severity) == ("no-prefill-worker", Severity.WARNING)


def test_a_silent_frontend_and_a_mix_of_releases() -> None:
    silent = msgspec.structs.replace(FRONTEND, id="g", is_silent=True, release="")
    (wrong,) = found(*HEALTHY, frontends=(FRONTEND, silent))
    assert wrong.text == "1 of 2 frontends do not answer (g): their figures are missing from the sums"
    (wrong,) = found(*HEALTHY, worker("x", release="2.0"), worker("y", release=""))
    assert wrong.text == "processes of several releases run together: 1.0, 2.0, an earlier one"


def test_many_workers_with_one_fault_are_one_line_and_the_worst_is_first() -> None:
    fleet = [worker(f"d{number}", num_blocks_in_use=99) for number in range(240)]
    stuck = worker("s", step_age_s=60.0)
    wrong = found(PREFILL, *fleet, stuck)
    assert [each.kind for each in wrong] == ["stuck-step", "kv-full"]
    assert len(wrong[1].workers) == 240
    assert f"and {240 - MAX_NAMES} more: KV 99% full" in wrong[1].text
    assert len(wrong[1].text) < 120
