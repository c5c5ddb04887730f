"""The lines that say what is wrong now: each fault alone has its own, and a healthy cluster none."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.config import WorkerRole
from kvrelay.frontend.cluster.snapshot import FrontendView, Quantiles, Totals, WorkerCondition, WorkerView
from kvrelay.frontend.cluster.wrong_now import MAX_NAMES, Severity, Wrong, wrong_now

NONE = Quantiles(None, None, None)
WHOLE = Totals(1.0, 9.0, 9.0, 60, 0, 2, 2, 0, 0, 0.0, 10, 100, 0, 0, NONE, NONE)
FRONTEND = FrontendView("f", "h", 1, "1.0", True, False, 0.0, 2, 1.0, 9.0, 60, 0)


def worker(name: str, role: WorkerRole = WorkerRole.DECODE, **changes: object) -> WorkerView:
    view = WorkerView(name, role, "m", WorkerCondition.READY, "h", "mock", "1.0", 10.0)
    known = {"age_s": 1.0, "running": 1, "slots": 8, "waiting": 0, "kv_used": 5, "kv_total": 100}
    return msgspec.structs.replace(view, **{**known, **changes})


def found(
    *workers: WorkerView, frontends: tuple[FrontendView, ...] = (FRONTEND,), has_control: bool = True, **whole: object
) -> list[Wrong]:
    return wrong_now(workers, frontends, msgspec.structs.replace(WHOLE, **whole), has_control=has_control)


PREFILL = worker("p", WorkerRole.PREFILL)
HEALTHY = (PREFILL, worker("d"))


def test_nothing_is_wrong_with_a_healthy_cluster() -> None:
    assert found(*HEALTHY) == []
    assert found(worker("b", WorkerRole.BOTH)) == []
    # What was queued a moment ago, a step of a second, and a frontend that has left are no faults.
    gone = msgspec.structs.replace(FRONTEND, id="g", release="", age_s=20.0)
    assert found(PREFILL, worker("d", step_age_s=2.0, waiting=3, waiting_for_s=2.0), frontends=(FRONTEND, gone)) == []
    assert found(*HEALTHY, prefill_queue=4, prefill_queue_for_s=3.0) == []
    assert found(*HEALTHY, prefill_queue=None) == []


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"state": WorkerCondition.SILENT, "age_s": 7.2}, "silent-worker", "silent for up to 7 s: a lease lasts 10 s"),
        ({"state": WorkerCondition.UNREACHED, "age_s": None}, "unreached-worker", "this frontend has no connection"),
        ({"step_age_s": 31.0}, "stuck-step", "at one step for 31 s: the engine may hang"),
        ({"kv_used": 96}, "kv-full", "KV 96% full: preemptions or refusals are near"),
        ({"waiting": 5, "waiting_for_s": 40.0}, "waiting-requests", "up to 40 s without a break (5 now)"),
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
    ],
)
def test_a_fault_of_the_whole_has_its_line(whole: dict[str, object], kind: str, text: str) -> None:
    (wrong,) = found(*HEALTHY, **whole)
    assert wrong.kind == kind
    assert text in wrong.text


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
    fleet = [worker(f"d{number}", kv_used=99) for number in range(240)]
    stuck = worker("s", step_age_s=60.0)
    wrong = found(PREFILL, *fleet, stuck)
    assert [each.kind for each in wrong] == ["stuck-step", "kv-full"]
    assert len(wrong[1].workers) == 240
    assert f"and {240 - MAX_NAMES} more: KV 99% full" in wrong[1].text
    assert len(wrong[1].text) < 120
