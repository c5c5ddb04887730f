"""What is wrong with the cluster now, in one line each, the worst first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.frontend.cluster.snapshot import FrontendView, Totals, WorkerCondition, WorkerView

STUCK_AFTER_S = 10.0
"""At one step."""
WAITING_AFTER_S = 10.0
"""Requests have waited without a break, or the prefill queue was not empty."""
KV_FULL = 0.95
"""Share of a worker's pool."""
CONNECTED = (WorkerCondition.READY, WorkerCondition.SILENT)
"""Such a worker gets requests."""
MAX_NAMES = 4
NO_WORKER = "no-worker"


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


class Wrong(msgspec.Struct, frozen=True):
    """``text`` is one line with the reason; ``workers`` are those that are meant, if any."""

    severity: Severity
    kind: str
    text: str
    workers: list[str] = []


def wrong_now(
    workers: Sequence[WorkerView],
    frontends: Sequence[FrontendView],
    whole: Totals,
    *,
    has_control: bool,
    is_started_on_demand: bool = False,
) -> list[Wrong]:
    """``has_control``: this frontend is connected to the control plane. ``is_started_on_demand``: requests without a
    worker wait for one that a planner starts."""
    found = [*_of_cluster(workers, frontends, whole, has_control), *_of_models(workers), *_of_workers(workers)]
    if is_started_on_demand:
        found = [wrong for wrong in found if wrong.kind != NO_WORKER]
    return sorted(found, key=lambda wrong: wrong.severity is not Severity.ERROR)


def _of_cluster(
    workers: Sequence[WorkerView], frontends: Sequence[FrontendView], whole: Totals, has_control: bool
) -> Iterator[Wrong]:
    if not has_control:
        yield _error(
            "no-control-plane", "this frontend has lost the control plane: it serves with the workers it knows"
        )
    if not workers:
        yield _error(NO_WORKER, "no worker is in discovery: every request gets 503")
    if whole.failed_last_minute:
        share = f"{whole.failed_last_minute} of {whole.requests_last_minute} requests"
        yield _error("failed-requests", f"{share} failed in the last minute: 5xx or a stream that broke")
    if whole.prefill_queue and whole.prefill_queue_for_s >= WAITING_AFTER_S:
        what = (
            f"{whole.prefill_queue} prefills queued, and the queue was not empty for {whole.prefill_queue_for_s:.0f} s"
        )
        yield _warning("prefill-queue", f"{what}: prefill workers do not keep up")
    silent = [frontend.id for frontend in frontends if frontend.is_silent]
    if silent:
        what = f"{len(silent)} of {len(frontends)} frontends do not answer ({_names(silent)})"
        yield _warning("silent-frontend", f"{what}: their figures are missing from the sums")
    releases = {worker.release or "an earlier one" for worker in workers}
    releases |= {frontend.release for frontend in frontends if frontend.release}
    if len(releases) > 1:
        yield _warning("release-mix", f"processes of several releases run together: {', '.join(sorted(releases))}")


def _of_models(workers: Sequence[WorkerView]) -> Iterator[Wrong]:
    for model in sorted({worker.model for worker in workers}):
        roles = {worker.role for worker in workers if worker.model == model and worker.state in CONNECTED}
        if not any(role.takes_requests for role in roles):
            known = sum(worker.model == model and worker.role.takes_requests for worker in workers)
            reason = f"{known} known, none connected" if known else "none is in discovery"
            yield _error("no-decode-worker", f"no decode worker serves {model} ({reason}): its requests get 503")
        elif roles == {WorkerRole.DECODE}:
            yield _warning("no-prefill-worker", f"no prefill worker for {model}: decode workers compute every prompt")


def _of_workers(workers: Sequence[WorkerView]) -> Iterator[Wrong]:
    yield from _grouped(
        workers,
        "unreached-worker",
        Severity.ERROR,
        lambda worker: worker.state is WorkerCondition.UNREACHED,
        lambda some: "in discovery, but this frontend has no connection",
    )
    yield from _grouped(
        workers,
        "silent-worker",
        Severity.ERROR,
        lambda worker: worker.state is WorkerCondition.SILENT,
        lambda some: (
            f"silent for up to {max(worker.age_s or 0.0 for worker in some):.0f} s: "
            f"a lease lasts {min(worker.lease_ttl_s for worker in some):.0f} s and is about to end"
        ),
    )
    yield from _grouped(
        workers,
        "stuck-step",
        Severity.ERROR,
        lambda worker: worker.step_age_s >= STUCK_AFTER_S,
        lambda some: f"at one step for {max(worker.step_age_s for worker in some):.0f} s: the engine may hang",
    )
    yield from _grouped(
        workers,
        "kv-full",
        Severity.WARNING,
        lambda worker: bool(worker.kv_total) and (worker.kv_used or 0) >= KV_FULL * (worker.kv_total or 0),
        lambda some: f"KV {max(_kv_share(worker) for worker in some):.0%} full: preemptions or refusals are near",
    )
    yield from _grouped(
        workers,
        "waiting-requests",
        Severity.WARNING,
        lambda worker: worker.waiting_for_s >= WAITING_AFTER_S,
        lambda some: (
            f"requests wait for up to {max(worker.waiting_for_s for worker in some):.0f} s without a break "
            f"({sum(worker.waiting or 0 for worker in some)} now): more comes than is done"
        ),
    )


def _grouped(
    workers: Iterable[WorkerView],
    kind: str,
    severity: Severity,
    is_meant: Callable[[WorkerView], bool],
    reason: Callable[[Sequence[WorkerView]], str],
) -> Iterator[Wrong]:
    """One line for all workers with the same fault: of 240, each alone would bury the rest."""
    some = [worker for worker in workers if is_meant(worker)]
    if some:
        names = [worker.id for worker in some]
        yield Wrong(severity, kind, f"{_names(names)}: {reason(some)}", names)


def _kv_share(worker: WorkerView) -> float:
    return (worker.kv_used or 0) / (worker.kv_total or 1)


def _names(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMES
    shown = ", ".join(names[:MAX_NAMES])
    return f"{shown} and {rest} more" if rest > 0 else shown


def _error(kind: str, text: str) -> Wrong:
    return Wrong(Severity.ERROR, kind, text)


def _warning(kind: str, text: str) -> Wrong:
    return Wrong(Severity.WARNING, kind, text)
