"""The whole cluster at one moment, as ``GET /debug/cluster`` tells it: workers, flows of KV, frontends, sums, history.

Pure: from what the frontend knows to values that become JSON. Times are in seconds or, with ``_ms``, milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import reduce
from heapq import nlargest
from itertools import accumulate
from operator import sub

import msgspec

from kvrelay.config import DisaggConfig, WorkerRole
from kvrelay.core.activity import Activity, Spent
from kvrelay.core.events import STALE_AFTER_S, Flow, TokenCounts
from kvrelay.core.histogram import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, quantile_s
from kvrelay.core.tier_stats import PEER
from kvrelay.core.workers import WorkerInfo
from kvrelay.frontend.cluster.figures import COARSE_S, HISTORY_S, MINUTE_S, NUM_COARSE, WorkerTimes
from kvrelay.frontend.cluster.frontends import KnownFrontend
from kvrelay.frontend.cluster.seconds import GAUGES, Second, added, added_up, total_of
from kvrelay.frontend.cluster.view import Member
from kvrelay.placement.base import PrefillPlace

RATE_S = 10
"""Rates are means over the last so many seconds."""
SETTLED_S = 2
"""A second is shown when every frontend has surely counted it."""
MAX_FLOWS = 256
"""Of 240 workers there may be thousands, which no one reads."""
PLACES = {
    PrefillPlace.REMOTE: "a prefill worker: cheaper there, or sent there by threshold",
    PrefillPlace.LOCAL_SHORT: "here: short after its prefix hits",
    PrefillPlace.LOCAL_CHEAPER: "here: by cost the first token comes sooner, or other answers suffer less",
    PrefillPlace.LOCAL_QUEUE_FULL: "here: the prefill queue is full",
    PrefillPlace.LOCAL_NO_PREFILL_WORKER: "here: there is no prefill worker",
    PrefillPlace.LOCAL_REQUIRED: "here: the request, or its KV, allows nothing else",
    PrefillPlace.LOCAL_UNPAIRED: "here: prefill-first, and the frontend has chosen no prefill worker",
}
NO_WORK = Activity()
MEDIA = ("host", "disk", PEER)
"""Beyond the pools."""


class WorkerCondition(StrEnum):
    """``unreached``: in discovery, and this frontend has no connection. ``leaving``: it has left discovery and finishes
    its requests. ``silent``: connected, and it has not reported for a while."""

    READY = "ready"
    SILENT = "silent"
    UNREACHED = "unreached"
    LEAVING = "leaving"


SHOWN_AS = {
    "num_admitted": "running",
    "num_slots": "slots",
    "num_waiting": "waiting",
    "num_prefill_tokens": "prefill_tokens_queued",
    "num_blocks_in_use": "kv_used",
    "num_blocks": "kv_total",
}
"""JSON names of what load samples tell, of a worker and of all."""
_OF_LOAD = (*SHOWN_AS, "kv_demand", "prefix_hit_rate")


class WorkerView(msgspec.Struct, frozen=True, rename=SHOWN_AS):
    """A worker. Load is as published last, ``age_s`` ago; None: it has not reported to this frontend. Blocks of KV.
    ``dp_group``: it is rank ``dp_rank`` of that data-parallel group. ``cpu_cores`` and ``rss_bytes``: of its
    processes. Of speculative decoding: tokens drafted and accepted since its start, and what an answer gets from a step
    in the mean. ``problem``: why this frontend has no connection. ``refused_adapters``: ids, each with the reason."""

    id: str
    role: WorkerRole
    model: str
    state: WorkerCondition
    host: str
    engine: str
    release: str
    lease_ttl_s: float
    age_s: float | None = None
    num_admitted: int | None = None
    num_slots: int | None = None
    num_waiting: int | None = None
    waiting_for_s: float = 0.0
    """For how long requests have waited there without a break."""
    num_prefill_tokens: int | None = None
    prefill_s_queued: float | None = None
    """What they take, by the worker's own fitted costs."""
    num_blocks_in_use: int | None = None
    num_blocks: int | None = None
    kv_demand: float | None = None
    prefix_hit_rate: float | None = None
    step_age_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    dp_group: str = ""
    dp_rank: int = 0
    cpu_cores: float | None = None
    rss_bytes: int | None = None
    sessions_paused: int | None = None
    after_crash: str = ""
    """How the process before it ended, if that crashed."""
    adapters: tuple[str, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    tokens_per_step: float = 1.0
    problem: str = ""
    refused_adapters: dict[str, str] = {}


_OF_ENTRY = tuple(
    name for name in WorkerView.__struct_fields__ if name in WorkerInfo.__struct_fields__ and name not in _OF_LOAD
)


class FlowView(msgspec.Struct, frozen=True):
    """KV that has moved from one worker to another since their start, as the workers count it."""

    source: str
    target: str
    transfers: int
    bytes: int
    mean_ms: float


class FrontendView(msgspec.Struct, frozen=True):
    """A frontend process. ``is_self``: it gives this answer. ``is_silent``: it does not answer; ``age_s``: since
    when. Requests as in ``Totals``."""

    id: str
    host: str
    pid: int
    release: str
    is_self: bool
    is_silent: bool
    age_s: float | None
    in_flight: int
    requests_per_s: float
    answered_per_s: float
    tokens_per_s: float
    requests_last_minute: int
    answered_last_minute: int
    refused_last_minute: int
    failed_last_minute: int
    cpu_cores: float = 0.0
    rss_bytes: int = 0


class Quantiles(msgspec.Struct, frozen=True):
    """In milliseconds; None: there was nothing to measure."""

    p50: float | None
    p95: float | None
    p99: float | None


class TimesView(msgspec.Struct, frozen=True):
    """Latencies of the last minute of a worker, or of all workers of one role, model or data-parallel group.
    ``prefill_ms``: from admission to the first token, or to the end of a prefill for another worker, of prefills
    computed there. The others as clients see them, of answers that came from there."""

    kind: str
    """``role``, ``model``, ``group`` or ``worker``."""
    name: str
    prefills: int
    prefill_ms: Quantiles
    answers: int
    ttft_ms: Quantiles
    itl_ms: Quantiles


class PlaceView(msgspec.Struct, frozen=True):
    """Prefills of the last minute that ran at one ``place``, and why (``text``)."""

    place: str
    text: str
    last_minute: int


class HandoffCost(msgspec.Struct, frozen=True):
    """Of the last minute's hand-offs, means in milliseconds: until the grant (of those that were queued; pairs wait for
    none), until the KV is here, and how long KV was still under way after its prefill had ended."""

    arrived: int
    queue_ms: float | None
    whole_ms: float | None
    sending_ms: float | None


class SessionsView(msgspec.Struct, frozen=True):
    """Agents' sessions that returned; ``incomplete``: a pool had lost a part of their KV. ``tokens``: what they
    repeated, by place (pool, host, disk, peer, computed). ``saved_s``: what computing the found ones would have
    taken."""

    returned: int = 0
    incomplete: int = 0
    tokens: dict[str, int] = {}
    saved_s: float = 0.0


class Totals(msgspec.Struct, frozen=True, rename=SHOWN_AS):
    """The whole cluster. Rates over the last ten seconds, quantiles over the last minute. ``prefill_queue``: entries
    that no prefill worker has pulled; None: the control server does not tell. Requests are those that have ended:
    answered, refused (429), failed (5xx or a broken stream), invalid (other 4xx), or left by their clients."""

    requests_per_s: float
    answered_per_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    requests_last_minute: int
    answered_last_minute: int
    refused_last_minute: int
    refused_per_s: float
    limited_last_minute: int
    """Of the refused ones: by the limits of their API key."""
    failed_last_minute: int
    judged_last_minute: int
    """Whole answers, each choice one; the next three are of these. A late one is beyond an objective of the request, or
    of the frontend that answered."""
    in_time_last_minute: int
    late_first_token_last_minute: int
    late_gaps_last_minute: int
    """By the mean time between tokens."""
    slo_ttft_ms: float
    """Of this frontend, for requests that bring no objective."""
    slo_itl_ms: float
    in_flight: int
    num_admitted: int
    num_waiting: int
    prefill_queue: int | None
    prefill_queue_for_s: float
    """For how long the queue was not empty, as far as this frontend knows."""
    num_blocks_in_use: int
    num_blocks: int
    num_flows: int
    flow_bytes: int
    """Of all flows; ``ClusterSnapshot.flows`` has the largest."""
    ttft_ms: Quantiles
    itl_ms: Quantiles
    places: list[PlaceView] = []
    """The most frequent one first."""
    handoffs: HandoffCost = HandoffCost(0, None, None, None)
    prompt_tokens_last_minute: int = 0
    cached_tokens_last_minute: int = 0
    """Of them, as clients are told."""
    loaded_tokens_last_minute: dict[str, int] = {}
    """Prompt tokens whose KV came from beyond the pools, by medium: host, disk, peer (other workers' pools)."""
    sessions_paused: int = 0
    sessions_last_minute: SessionsView = SessionsView()


def _column(name: str) -> str:
    """A column's JSON name."""
    others = {**SHOWN_AS, "num_output_tokens": "tokens", "num_late_first": "late_first_token"}
    return others.get(name, name.removeprefix("num_"))


class History(msgspec.Struct, frozen=True, rename=_column):
    """A column per figure, a row per ``step_s`` seconds, the oldest first. Counts are of the whole row. Quantiles of a
    second, and means of hand-offs, are over it and the nine before."""

    step_s: int
    unix_s: list[int]
    num_requests: list[int]
    num_answered: list[int]
    num_refused: list[int]
    num_failed: list[int]
    num_in_time: list[int]
    num_late_first: list[int]
    num_late_gaps: list[int]
    num_output_tokens: list[int]
    num_prompt_tokens: list[int]
    num_admitted: list[int]
    num_waiting: list[int]
    num_blocks_in_use: list[int]
    num_blocks: list[int]
    ttft_p50_ms: list[float | None]
    ttft_p95_ms: list[float | None]
    itl_p50_ms: list[float | None]
    itl_p95_ms: list[float | None]
    num_cached_tokens: list[int]
    places: dict[str, list[int]]
    loaded_tokens: dict[str, list[int]]
    handoffs: list[int]
    handoff_queue_ms: list[float | None]
    handoff_ms: list[float | None]
    handoff_sending_ms: list[float | None]
    workers_cpu_s: list[float]
    workers_rss_bytes: list[int]
    frontends_cpu_s: list[float]
    frontends_rss_bytes: list[int]


_OF_ROWS = [name for name in History.__struct_fields__ if name in Second.__struct_fields__]
"""Columns that are fields of rows."""


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
    entry = {name: getattr(info, name) for name in _OF_ENTRY}
    view = WorkerView(id=info.worker_id, state=state, problem=member.problem, **entry)
    if report is None or report.load is None or age_s is None:
        return view
    load, cost, tokens = report.load, report.load.step_cost, report.load.tokens or TokenCounts()
    return msgspec.structs.replace(
        view,
        **{name: getattr(load, name) for name in _OF_LOAD},
        age_s=age_s,
        waiting_for_s=0.0 if report.waiting_since_s is None else now_s - report.waiting_since_s,
        prefill_s_queued=None if cost is None else cost.prefill_seconds(load.num_prefill_tokens),
        # The age goes on while the worker says nothing.
        step_age_s=load.step_age_s + age_s if load.step_age_s else 0.0,
        prefill_tokens_per_s=report.prefilled_per_s,
        tokens_per_s=report.generated_per_s,
        cpu_cores=report.cpu_cores,
        rss_bytes=None if load.activity is None else load.activity.rss_bytes,
        sessions_paused=None if load.activity is None else load.activity.sessions.num_paused,
        drafted_tokens=tokens.num_drafted,
        accepted_tokens=tokens.num_accepted,
        tokens_per_step=1.0 if cost is None else cost.tokens_per_step,
    )


def times_views(frontends: Iterable[KnownFrontend]) -> list[TimesView]:
    """Of each role, model, data-parallel group and worker that has done something, in this order. Workers that have
    left since are among them."""
    found: dict[str, WorkerTimes] = {}
    for frontend in frontends:
        for times in frontend.times:
            known = found.setdefault(times.worker_id, times)
            if known is not times:
                # Each frontend counts the answers that it got, and hears of all prefills.
                prefills = max(known.prefills, times.prefills, key=sum)
                found[times.worker_id] = msgspec.structs.replace(known.plus(times), prefills=prefills)
    sums: dict[tuple[str, str], WorkerTimes] = {}
    for name, times in found.items():
        names = ("role", times.role.value), ("model", times.model), ("group", times.dp_group), ("worker", name)
        for key in (key for key in names if key[1]):
            sums[key] = sums[key].plus(times) if key in sums else times
    kinds = ("role", "model", "group", "worker")
    return [_times_view(key, sums[key]) for key in sorted(sums, key=lambda key: (kinds.index(key[0]), key[1]))]


def _times_view(key: tuple[str, str], times: WorkerTimes) -> TimesView:
    return TimesView(
        *key,
        sum(times.prefills),
        _quantiles(LATENCY_BUCKETS_S, times.prefills),
        sum(times.ttft),
        _quantiles(LATENCY_BUCKETS_S, times.ttft),
        _quantiles(TOKEN_BUCKETS_S, times.itl),
    )


def _place_views(counts: Mapping[str, int]) -> list[PlaceView]:
    known = [PlaceView(place.value, text, counts.get(place, 0)) for place, text in PLACES.items()]
    others = [PlaceView(name, name, count) for name, count in counts.items() if name not in list(PLACES)]
    return sorted((*known, *others), key=lambda view: -view.last_minute)


def _handoff_cost(work: Activity) -> HandoffCost:
    return HandoffCost(work.handoffs.num, _mean_ms(work.claims), _mean_ms(work.handoffs), _mean_ms(work.sends))


def _mean_ms(spent: Spent) -> float | None:
    return None if spent.mean_s is None else round(1e3 * spent.mean_s, 3)


def _quantiles(bounds_s: Sequence[float], counts: Sequence[int]) -> Quantiles:
    return Quantiles(*(_quantile_ms(bounds_s, counts, share) for share in (0.5, 0.95, 0.99)))


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
        last.num_answered / RATE_S,
        last.num_output_tokens / RATE_S,
        minute.num_requests,
        minute.num_answered,
        minute.num_refused,
        minute.num_failed,
        last.cpu_s / RATE_S,
        last.rss_bytes,
    )


def totals(
    rows: Sequence[Second],
    now_unix_s: int,
    workers: Sequence[WorkerView],
    frontends: Sequence[FrontendView],
    flows: Sequence[tuple[WorkerInfo, Flow]],
    prefill_queue: int | None,
    prefill_queue_for_s: float,
    objectives: DisaggConfig,
) -> Totals:
    """``rows``: of all frontends, added up."""
    last, minute = (total_of(_last(rows, now_unix_s, seconds)) for seconds in (RATE_S, MINUTE_S))
    work = minute.work or NO_WORK
    return Totals(
        requests_per_s=last.num_requests / RATE_S,
        answered_per_s=last.num_answered / RATE_S,
        tokens_per_s=last.num_output_tokens / RATE_S,
        prompt_tokens_per_s=last.num_prompt_tokens / RATE_S,
        requests_last_minute=minute.num_requests,
        answered_last_minute=minute.num_answered,
        refused_last_minute=minute.num_refused,
        refused_per_s=last.num_refused / RATE_S,
        limited_last_minute=minute.num_limited,
        failed_last_minute=minute.num_failed,
        judged_last_minute=minute.num_judged,
        in_time_last_minute=minute.num_in_time,
        late_first_token_last_minute=minute.num_late_first,
        late_gaps_last_minute=minute.num_late_gaps,
        slo_ttft_ms=objectives.slo_ttft_ms,
        slo_itl_ms=objectives.itl_ms,
        in_flight=sum(frontend.in_flight for frontend in frontends),
        **{name: sum(getattr(worker, name) or 0 for worker in workers) for name in GAUGES},
        prefill_queue=prefill_queue,
        prefill_queue_for_s=prefill_queue_for_s,
        num_flows=len(flows),
        flow_bytes=sum(flow.num_bytes for _, flow in flows),
        ttft_ms=_quantiles(LATENCY_BUCKETS_S, minute.ttft),
        itl_ms=_quantiles(TOKEN_BUCKETS_S, minute.itl),
        places=_place_views(work.places),
        handoffs=_handoff_cost(work),
        prompt_tokens_last_minute=minute.num_prompt_tokens,
        cached_tokens_last_minute=minute.num_cached_tokens,
        loaded_tokens_last_minute=work.loaded,
        sessions_paused=sum(worker.sessions_paused or 0 for worker in workers),
        sessions_last_minute=SessionsView(
            work.sessions.num_returned, work.sessions.num_incomplete, work.sessions.tokens, work.sessions.saved_s
        ),
    )


def all_rows(frontends: Iterable[KnownFrontend], now_unix_s: int, since: int) -> list[Second]:
    """The settled rows that sums, rates and a history after ``since`` need, added up over frontends."""
    last = now_unix_s - SETTLED_S
    first = max(now_unix_s - HISTORY_S, min(last - MINUTE_S, since - RATE_S))
    return added_up((known.rows for known in frontends), first, last)


def hour_rows(frontends: Iterable[KnownFrontend], now_unix_s: int) -> list[Second]:
    """The settled coarse rows, added up over frontends."""
    last = now_unix_s - SETTLED_S - COARSE_S
    return added_up((known.hour for known in frontends), last - COARSE_S * NUM_COARSE, last)


def history(rows: Sequence[Second], since: int, step_s: int = 1) -> History:
    """Of the rows after second ``since``; each has ``step_s`` seconds."""
    shown = [row for row in rows if row.unix_s > since]
    num_rows = max(RATE_S // step_s, 1)
    ttft = _windows([row.ttft for row in rows], len(LATENCY_BUCKETS_S) + 1, len(shown), num_rows)
    itl = _windows([row.itl for row in rows], len(TOKEN_BUCKETS_S) + 1, len(shown), num_rows)
    works = [row.work or NO_WORK for row in rows]
    recent = works[len(works) - len(shown) :]
    means = _windowed_means(works, len(shown), num_rows)
    return History(
        step_s=step_s,
        **{name: [getattr(row, name) for row in shown] for name in _OF_ROWS},
        ttft_p50_ms=[_quantile_ms(LATENCY_BUCKETS_S, counts, 0.5) for counts in ttft],
        ttft_p95_ms=[_quantile_ms(LATENCY_BUCKETS_S, counts, 0.95) for counts in ttft],
        itl_p50_ms=[_quantile_ms(TOKEN_BUCKETS_S, counts, 0.5) for counts in itl],
        itl_p95_ms=[_quantile_ms(TOKEN_BUCKETS_S, counts, 0.95) for counts in itl],
        places=_columns([work.places for work in recent], [place.value for place in PLACES]),
        loaded_tokens=_columns([work.loaded for work in recent], MEDIA),
        handoffs=[work.handoffs.num for work in recent],
        handoff_queue_ms=[_mean_ms(mean.claims) for mean in means],
        handoff_ms=[_mean_ms(mean.handoffs) for mean in means],
        handoff_sending_ms=[_mean_ms(mean.sends) for mean in means],
        workers_cpu_s=[work.cpu_s for work in recent],
        workers_rss_bytes=[work.rss_bytes for work in recent],
        frontends_cpu_s=[row.cpu_s for row in shown],
        frontends_rss_bytes=[row.rss_bytes for row in shown],
    )


def _columns(rows: Sequence[Mapping[str, int]], names: Iterable[str]) -> dict[str, list[int]]:
    """A column for each of the names, and for every other one in the rows."""
    every = dict.fromkeys([*names, *(name for row in rows for name in row)])
    return {name: [row.get(name, 0) for row in rows] for name in every}


def _windowed_means(works: Sequence[Activity], num_last: int, num_rows: int) -> list[Activity]:
    """For each of the last rows, the sum over ``num_rows`` that end with it."""
    ends = range(len(works) - num_last + 1, len(works) + 1)
    return [reduce(Activity.plus, works[max(end - num_rows, 0) : end]) for end in ends]


def _windows(counts: Sequence[tuple[int, ...]], width: int, num_last: int, num_rows: int) -> list[tuple[int, ...]]:
    """For each of the last rows, the sum over ``num_rows`` that end with it."""
    sums = list(accumulate(counts, added, initial=(0,) * width))
    ends = range(len(counts) - num_last + 1, len(counts) + 1)
    return [tuple(map(sub, sums[end], sums[max(end - num_rows, 0)])) for end in ends]


def _last(rows: Iterable[Second], now_unix_s: int, seconds: int) -> list[Second]:
    """The settled ones of the last ``seconds``."""
    last = now_unix_s - SETTLED_S
    return [row for row in rows if last - seconds < row.unix_s <= last]


def _quantile_ms(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    found_s = quantile_s(bounds_s, counts, share)
    return None if found_s is None else round(1e3 * found_s, 3)
