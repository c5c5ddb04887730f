"""The whole cluster at one moment, as ``GET /debug/cluster`` tells it: workers, flows of KV, frontends, sums, history.

Pure: from what the frontend knows to values that become JSON. Times are in seconds or, with ``_ms``, milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from heapq import nlargest
from itertools import accumulate
from operator import sub

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.events import STALE_AFTER_S, Flow
from kvrelay.core.histogram import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, quantile_s
from kvrelay.core.workers import WorkerInfo
from kvrelay.frontend.cluster.figures import HISTORY_S, Second, added, added_up, total_of
from kvrelay.frontend.cluster.frontends import KnownFrontend
from kvrelay.frontend.cluster.view import Member

RATE_S = 10
"""Rates are means over the last so many seconds."""
MINUTE_S = 60
SETTLED_S = 2
"""A second is shown when every frontend has surely counted it."""
MAX_FLOWS = 256
"""Of 240 workers there may be thousands, which no one reads."""


class WorkerCondition(StrEnum):
    """``unreached``: in discovery, and this frontend has no connection. ``leaving``: it has left discovery and finishes
    its requests. ``silent``: connected, and it has not reported for a while."""

    READY = "ready"
    SILENT = "silent"
    UNREACHED = "unreached"
    LEAVING = "leaving"


class WorkerView(msgspec.Struct, frozen=True):
    """A worker. Load is as published last, ``age_s`` ago; None: it has not reported to this frontend. Blocks of KV."""

    id: str
    role: WorkerRole
    model: str
    state: WorkerCondition
    host: str
    engine: str
    release: str
    lease_ttl_s: float
    age_s: float | None = None
    running: int | None = None
    slots: int | None = None
    waiting: int | None = None
    waiting_for_s: float = 0.0
    """For how long requests have waited there without a break."""
    prefill_tokens_queued: int | None = None
    prefill_s_queued: float | None = None
    """What they take, by the worker's own fitted costs."""
    kv_used: int | None = None
    kv_total: int | None = None
    kv_demand: float | None = None
    prefix_hit_rate: float | None = None
    step_age_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    tokens_per_s: float | None = None


class FlowView(msgspec.Struct, frozen=True):
    """KV that has moved from one worker to another since their start, as the workers count it."""

    source: str
    target: str
    transfers: int
    bytes: int
    mean_ms: float


class FrontendView(msgspec.Struct, frozen=True):
    """A frontend process. ``is_self``: it gives this answer. ``is_silent``: it does not answer; ``age_s``: since
    when."""

    id: str
    host: str
    pid: int
    release: str
    is_self: bool
    is_silent: bool
    age_s: float | None
    in_flight: int
    requests_per_s: float
    tokens_per_s: float
    requests_last_minute: int
    failed_last_minute: int


class Quantiles(msgspec.Struct, frozen=True):
    """In milliseconds; None: there was nothing to measure."""

    p50: float | None
    p95: float | None
    p99: float | None


class Totals(msgspec.Struct, frozen=True):
    """The whole cluster. Rates over the last ten seconds, quantiles over the last minute. ``prefill_queue``: entries
    that no prefill worker has pulled; None: the control server does not tell."""

    requests_per_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    requests_last_minute: int
    failed_last_minute: int
    in_flight: int
    running: int
    waiting: int
    prefill_queue: int | None
    prefill_queue_for_s: float
    """For how long the queue was not empty, as far as this frontend knows."""
    kv_used: int
    kv_total: int
    num_flows: int
    flow_bytes: int
    """Of all flows; ``ClusterSnapshot.flows`` has the largest."""
    ttft_ms: Quantiles
    itl_ms: Quantiles


class History(msgspec.Struct, frozen=True):
    """A column per figure, a row per second, the oldest first. Quantiles are of that second and the nine before."""

    unix_s: list[int]
    requests: list[int]
    failed: list[int]
    tokens: list[int]
    prompt_tokens: list[int]
    running: list[int]
    waiting: list[int]
    kv_used: list[int]
    kv_total: list[int]
    ttft_p50_ms: list[float | None]
    ttft_p95_ms: list[float | None]
    itl_p50_ms: list[float | None]
    itl_p95_ms: list[float | None]


def worker_views(members: Iterable[Member], now_s: float) -> list[WorkerView]:
    """Of all workers, in the same order. ``now_s`` is monotonic."""
    return [_worker_view(member, now_s) for member in members]


def _worker_view(member: Member, now_s: float) -> WorkerView:
    info, link = member.info, member.link
    report = None if link is None else link.report
    age_s = None if report is None or report.heard_s is None else now_s - report.heard_s
    if not member.is_listed:
        state = WorkerCondition.LEAVING
    elif link is None:
        state = WorkerCondition.UNREACHED
    else:
        state = WorkerCondition.SILENT if (age_s or 0.0) > STALE_AFTER_S else WorkerCondition.READY
    view = WorkerView(
        info.worker_id, info.role, info.model, state, info.host, info.engine, info.release, info.lease_ttl_s
    )
    if report is None or report.load is None or age_s is None:
        return view
    load, cost = report.load, report.load.step_cost
    return msgspec.structs.replace(
        view,
        age_s=age_s,
        running=load.request_active_slots,
        slots=load.request_total_slots,
        waiting=load.num_requests_waiting,
        waiting_for_s=0.0 if report.waiting_since_s is None else now_s - report.waiting_since_s,
        prefill_tokens_queued=load.num_prefill_tokens,
        prefill_s_queued=None if cost is None else cost.prefill_seconds(load.num_prefill_tokens),
        kv_used=load.kv_active_blocks,
        kv_total=load.kv_total_blocks,
        kv_demand=load.kv_demand_perc,
        prefix_hit_rate=load.gpu_prefix_cache_hit_rate,
        # The age goes on while the worker says nothing.
        step_age_s=load.step_age_s + age_s if load.step_age_s else 0.0,
        prefill_tokens_per_s=report.prefilled_per_s,
        tokens_per_s=report.generated_per_s,
    )


def flows_of(members: Iterable[Member]) -> list[tuple[WorkerInfo, Flow]]:
    """What each worker publishes of both directions."""
    loads = ((member.info, member.link.load) for member in members if member.link is not None)
    return [(info, flow) for info, load in loads if load is not None for flow in load.flows]


def flow_views(flows: Sequence[tuple[WorkerInfo, Flow]]) -> list[FlowView]:
    """The largest, at most MAX_FLOWS."""
    return [
        FlowView(
            flow.worker_id if flow.is_read else info.worker_id,
            info.worker_id if flow.is_read else flow.worker_id,
            flow.num_transfers,
            flow.num_bytes,
            1e3 * flow.seconds / max(flow.num_transfers, 1),
        )
        for info, flow in nlargest(MAX_FLOWS, flows, key=lambda pair: pair[1].num_bytes)
    ]


def frontend_view(known: KnownFrontend, is_self: bool, now_s: float, now_unix_s: int) -> FrontendView:
    """Rates and counts of one frontend."""
    last, minute = (total_of(_last(known.rows, now_unix_s, seconds)) for seconds in (RATE_S, MINUTE_S))
    return FrontendView(
        known.frontend_id,
        known.host,
        known.pid,
        known.release,
        is_self,
        known.is_silent,
        None if known.heard_s is None else now_s - known.heard_s,
        0 if known.is_silent else known.num_in_flight,
        last.num_requests / RATE_S,
        last.num_output_tokens / RATE_S,
        minute.num_requests,
        minute.num_failed,
    )


def totals(
    rows: Sequence[Second],
    now_unix_s: int,
    workers: Sequence[WorkerView],
    frontends: Sequence[FrontendView],
    flows: Sequence[tuple[WorkerInfo, Flow]],
    prefill_queue: int | None,
    prefill_queue_for_s: float,
) -> Totals:
    """``rows``: of all frontends, added up."""
    last, minute = (total_of(_last(rows, now_unix_s, seconds)) for seconds in (RATE_S, MINUTE_S))
    return Totals(
        requests_per_s=last.num_requests / RATE_S,
        tokens_per_s=last.num_output_tokens / RATE_S,
        prompt_tokens_per_s=last.num_prompt_tokens / RATE_S,
        requests_last_minute=minute.num_requests,
        failed_last_minute=minute.num_failed,
        in_flight=sum(frontend.in_flight for frontend in frontends),
        running=sum(worker.running or 0 for worker in workers),
        waiting=sum(worker.waiting or 0 for worker in workers),
        prefill_queue=prefill_queue,
        prefill_queue_for_s=prefill_queue_for_s,
        kv_used=sum(worker.kv_used or 0 for worker in workers),
        kv_total=sum(worker.kv_total or 0 for worker in workers),
        num_flows=len(flows),
        flow_bytes=sum(flow.num_bytes for _, flow in flows),
        ttft_ms=Quantiles(*(_quantile_ms(LATENCY_BUCKETS_S, minute.ttft, share) for share in (0.5, 0.95, 0.99))),
        itl_ms=Quantiles(*(_quantile_ms(TOKEN_BUCKETS_S, minute.itl, share) for share in (0.5, 0.95, 0.99))),
    )


def all_rows(frontends: Iterable[KnownFrontend], now_unix_s: int, since: int) -> list[Second]:
    """The settled rows that sums, rates and a history after ``since`` need, added up over frontends."""
    last = now_unix_s - SETTLED_S
    first = max(now_unix_s - HISTORY_S, min(last - MINUTE_S, since - RATE_S))
    return added_up((known.rows for known in frontends), first, last)


def history(rows: Sequence[Second], since: int) -> History:
    """Of the seconds after ``since``."""
    shown = [row for row in rows if row.unix_s > since]
    ttft = _windows([row.ttft for row in rows], len(LATENCY_BUCKETS_S) + 1, len(shown))
    itl = _windows([row.itl for row in rows], len(TOKEN_BUCKETS_S) + 1, len(shown))
    return History(
        unix_s=[row.unix_s for row in shown],
        requests=[row.num_requests for row in shown],
        failed=[row.num_failed for row in shown],
        tokens=[row.num_output_tokens for row in shown],
        prompt_tokens=[row.num_prompt_tokens for row in shown],
        running=[row.num_running for row in shown],
        waiting=[row.num_waiting for row in shown],
        kv_used=[row.kv_used for row in shown],
        kv_total=[row.kv_total for row in shown],
        ttft_p50_ms=[_quantile_ms(LATENCY_BUCKETS_S, counts, 0.5) for counts in ttft],
        ttft_p95_ms=[_quantile_ms(LATENCY_BUCKETS_S, counts, 0.95) for counts in ttft],
        itl_p50_ms=[_quantile_ms(TOKEN_BUCKETS_S, counts, 0.5) for counts in itl],
        itl_p95_ms=[_quantile_ms(TOKEN_BUCKETS_S, counts, 0.95) for counts in itl],
    )


def _windows(counts: Sequence[tuple[int, ...]], width: int, num_last: int) -> list[tuple[int, ...]]:
    """For each of the last seconds, the sum over it and the nine before."""
    sums = list(accumulate(counts, added, initial=(0,) * width))
    ends = range(len(counts) - num_last + 1, len(counts) + 1)
    return [tuple(map(sub, sums[end], sums[max(end - RATE_S, 0)])) for end in ends]


def _last(rows: Iterable[Second], now_unix_s: int, seconds: int) -> list[Second]:
    """The settled ones of the last ``seconds``."""
    last = now_unix_s - SETTLED_S
    return [row for row in rows if last - seconds < row.unix_s <= last]


def _quantile_ms(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    found_s = quantile_s(bounds_s, counts, share)
    return None if found_s is None else round(1e3 * found_s, 3)
