"""What is wrong with the cluster now, in one line each, the worst first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.adapters import adapter_name
from kvrelay.core.workers import WorkerInfo
from kvrelay.frontend.cluster.snapshot import FrontendView, Totals, WorkerCondition, WorkerView
from kvrelay.planner import Hold
from kvrelay.planner.report import PlannerReport

STUCK_AFTER_S = 10.0
"""At one step."""
WAITING_AFTER_S = 10.0
"""Requests have waited without a break, or the prefill queue was not empty."""
KV_FULL = 0.95
"""Share of a worker's pool."""
CONNECTED = (WorkerCondition.READY, WorkerCondition.SILENT)
"""Such a worker gets requests."""
MISSED_SHARE, MIN_MISSED = 0.1, 5
"""Of the answers of a minute, as in goodput (DistServe, OSDI 2024); and at least so many."""
REFUSED_SHARE = 0.1
"""From here on refusals are an error: below they may be a burst."""
CRASH_LOOP = 3
"""Crashes of equal workers on one host, within ``view.CRASHES_S``."""
MAX_NAMES = 4
NO_WORKER = "no-worker"
BY_SAMPLES = {"silent-worker", "stuck-step", "kv-full", "waiting-requests"}
"""What workers' load samples tell; they come by the control plane."""
HEARD_S = 5.0
"""A worker at a step sends a sample each second: an older one tells nothing of the engine."""


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
    has_discovery: bool,
    is_started_on_demand: bool = False,
    planners: Sequence[PlannerReport] = (),
    crashed: Sequence[WorkerInfo] = (),
) -> list[Wrong]:
    """``has_control``, ``has_discovery``: as of ``ClusterView``. ``is_started_on_demand``: requests without a
    worker wait for one that a planner starts. ``crashed``: lately, the latest last. The page colours by these lines, so
    nothing is red without one."""
    found = [
        *_of_cluster(workers, frontends, whole, has_control, has_discovery),
        *_of_load(whole, planners),
        *_of_models(workers),
        *_of_workers(workers),
        *_of_crashes(crashed, workers),
    ]
    unknown = ({NO_WORKER} if is_started_on_demand else set()) | (set() if has_control else BY_SAMPLES)
    found = [wrong for wrong in found if wrong.kind not in unknown]
    return sorted(found, key=lambda wrong: wrong.severity is not Severity.ERROR)


def _of_cluster(
    workers: Sequence[WorkerView],
    frontends: Sequence[FrontendView],
    whole: Totals,
    has_control: bool,
    has_discovery: bool,
) -> Iterator[Wrong]:
    if not has_control:
        yield _error(
            "no-control-plane",
            "this frontend has lost the control plane: it serves with the workers it knows, and hears no load of them",
        )
    elif not has_discovery:
        yield _error(
            "no-control-plane",
            "this frontend has lost the discovery server: it serves with the workers it knows, and hears of no others",
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


def _of_load(whole: Totals, planners: Sequence[PlannerReport]) -> Iterator[Wrong]:
    """More is asked for than is done in time; and whether the planner sees what is."""
    overload = [*_refused(whole), *_missed(whole)]
    yield from overload
    leader = planners[0] if planners else None
    action = leader.actions[0] if leader is not None and leader.actions else None
    # Estimates are of requests that may wait for as long as they have to: of those, refusals leave the lucky ones.
    if leader is not None and leader.doubt and not whole.refused_last_minute:
        yield _warning("planner-doubts", f"the planner's estimates are wrong: {leader.doubt}")
    if not (overload and whole.requests_per_s) or leader is None or leader.is_paused:
        return
    if leader.problem or isinstance(action, Hold):
        reason = leader.problem or (action.reason if action is not None else "")
        yield _warning("planner-holds", f"the planner changes nothing meanwhile: {reason}")


def _refused(whole: Totals) -> Iterator[Wrong]:
    refused, limited = whole.refused_last_minute, whole.limited_last_minute
    if not refused:
        return
    share = refused / whole.requests_last_minute
    rate = f"({share:.0%}; {whole.refused_per_s:.1f}/s now)"
    what = f"{refused} of {whole.requests_last_minute} requests {rate} were refused with 429 in the last minute"
    if refused == limited:
        yield _warning("refused-requests", f"{what}: above the limits of their API keys")
        return
    what += f" ({limited} by the limits of their API keys)" if limited else ""
    is_error = refused - limited >= REFUSED_SHARE * whole.requests_last_minute
    text = f"{what}: queues or KV are full; add workers, or let more wait (--max-num-waiting, --max-waiting-requests)"
    yield (_error if is_error else _warning)("refused-requests", text)


def _missed(whole: Totals) -> Iterator[Wrong]:
    judged = whole.judged_last_minute
    missed = judged - whole.in_time_last_minute
    if missed < MIN_MISSED or missed <= MISSED_SHARE * judged:
        return
    reasons = []
    for count, name, measured, slo_ms in (
        (whole.late_first_token_last_minute, "first token", whole.ttft_ms.p95, whole.slo_ttft_ms),
        (whole.late_gaps_last_minute, "time between tokens", whole.itl_ms.p95, whole.slo_itl_ms),
    ):
        if count:
            p95 = "" if measured is None else f"p95 {_time(measured)}, "
            reasons.append(f"{count} by the {name} ({p95}objective {_time(slo_ms)})")
    what = f"{missed} of {judged} answers of the last minute missed an objective: {', '.join(reasons)}"
    yield _warning("missed-objectives", f"{what}; add workers, or set what is wanted (--slo-ttft-ms, --slo-itl-ms)")


def _time(ms: float) -> str:
    return f"{ms / 1e3:.3g} s" if ms >= 1e3 else f"{ms:.3g} ms"


def _of_crashes(crashed: Sequence[WorkerInfo], workers: Sequence[WorkerView]) -> Iterator[Wrong]:
    """The worker that replaces a crashed one tells how that ended, the present one of the last crash."""
    told = {(info.model, info.host): info.after_crash for info in crashed if info.after_crash}
    told |= {(worker.model, worker.host): worker.after_crash for worker in workers if worker.after_crash}
    counts = Counter((info.role, info.model, info.host) for info in crashed)
    last = {(info.role, info.model, info.host): info for info in crashed}
    for key, count in counts.items():
        if count >= CRASH_LOOP:
            (role, model, host), info = key, last[key]
            what = f"{role} workers of {model} on {host or 'one host'} crashed {count} times in the last 10 minutes"
            reason = told.get((model, host), "its log has the reason")
            text = f"{what}, the last was {info.worker_id} (pid {info.pid}): {reason}"
            yield Wrong(Severity.ERROR, "crash-loop", text)


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
    """One line for all workers with the same fault: of 240, each alone would bury the rest."""
    for kind, severity, is_meant, reason in _OF_WORKERS:
        some = [worker for worker in workers if is_meant(worker)]
        if some:
            names = [worker.id for worker in some]
            yield Wrong(severity, kind, f"{_names(names)}: {reason(some)}", names)


_Meant = Callable[[WorkerView], bool]
_Reason = Callable[[Sequence[WorkerView]], str]
_OF_WORKERS: tuple[tuple[str, Severity, _Meant, _Reason], ...] = (
    (
        "unreached-worker",
        Severity.ERROR,
        lambda worker: worker.state is WorkerCondition.UNREACHED,
        lambda some: ": ".join(["in discovery, but this frontend has no connection", *_problems(some)[:1]]),
    ),
    (
        "silent-worker",
        Severity.ERROR,
        lambda worker: worker.state is WorkerCondition.SILENT,
        lambda some: (
            f"silent for up to {max(worker.age_s or 0.0 for worker in some):.0f} s: "
            f"a lease lasts {min(worker.lease_ttl_s for worker in some):.0f} s and is about to end"
        ),
    ),
    (
        "stuck-step",
        Severity.ERROR,
        lambda worker: worker.step_age_s >= STUCK_AFTER_S,
        lambda some: (
            f"at one step for {max(worker.step_age_s for worker in some):.0f} s: the engine may hang"
            + (", or the worker has lost the control plane" if all(map(_is_unheard, some)) else "")
        ),
    ),
    (
        "refused-adapter",
        Severity.WARNING,
        lambda worker: bool(worker.refused_adapters),
        lambda some: f"without {_refused_adapter(some)}; its requests go to others",
    ),
    (
        "kv-full",
        Severity.WARNING,
        lambda worker: _kv_share(worker) >= KV_FULL,
        lambda some: f"KV {max(_kv_share(worker) for worker in some):.0%} full: preemptions or refusals are near",
    ),
    (
        "waiting-requests",
        Severity.WARNING,
        lambda worker: worker.waiting_for_s >= WAITING_AFTER_S,
        lambda some: (
            f"requests wait for up to {max(worker.waiting_for_s for worker in some):.0f} s without a break "
            f"({sum(worker.num_waiting or 0 for worker in some)} now): more comes than is done"
        ),
    ),
)
"""What may be wrong with workers: its kind, how bad it is, which workers are meant, and what is said of them."""


def _problems(workers: Sequence[WorkerView]) -> list[str]:
    return [worker.problem for worker in workers if worker.problem]


def _refused_adapter(workers: Sequence[WorkerView]) -> str:
    """The first, and how many there are."""
    refused = [each for worker in workers for each in worker.refused_adapters.items()]
    adapter, reason = refused[0]
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    return f"adapter {adapter_name(adapter)}{more}: {reason}"


def _is_unheard(worker: WorkerView) -> bool:
    return (worker.age_s or 0.0) >= HEARD_S


def _kv_share(worker: WorkerView) -> float:
    return (worker.num_blocks_in_use or 0) / (worker.num_blocks or 1)


def _names(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMES
    shown = ", ".join(names[:MAX_NAMES])
    return f"{shown} and {rest} more" if rest > 0 else shown


def _error(kind: str, text: str) -> Wrong:
    return Wrong(Severity.ERROR, kind, text)


def _warning(kind: str, text: str) -> Wrong:
    return Wrong(Severity.WARNING, kind, text)
