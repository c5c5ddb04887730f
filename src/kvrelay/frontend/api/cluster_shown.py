"""``GET /debug/cluster``: the cluster at this moment as one JSON object, which the page and ``kvrelay top`` read every
second. Looks that come together share one round of questions to the other frontends and the prefill queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from urllib.parse import parse_qs

import msgspec

from kvrelay.config import DisaggConfig
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.cluster.figures import COARSE_S, HISTORY_S
from kvrelay.frontend.cluster.frontends import Frontends, KnownFrontend
from kvrelay.frontend.cluster.snapshot import (
    FlowView,
    FrontendView,
    History,
    TimesView,
    Totals,
    WorkerView,
    all_rows,
    flow_views,
    flows_of,
    frontend_view,
    history,
    hour_rows,
    times_views,
    totals,
    worker_views,
)
from kvrelay.frontend.cluster.view import ClusterView
from kvrelay.frontend.cluster.wrong_now import Wrong, wrong_now
from kvrelay.http import Exchange, HttpRequest, Response
from kvrelay.planner.report import PlannerReport
from kvrelay.version import __version__

CLUSTER_PATH = "/debug/cluster"
FRESH_S = 0.5


class NotPermittedError(InvalidInputError):
    """The key is valid and does not open this."""

    status = 403


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """``frontend`` is the id of the one that answers. Of the planners the first one decides."""

    now_unix: float
    frontend: str
    release: str
    wrong_now: list[Wrong]
    total: Totals
    workers: list[WorkerView]
    times: list[TimesView]
    flows: list[FlowView]
    frontends: list[FrontendView]
    planners: list[PlannerReport]
    history: History


class ShownCluster:
    """The handler that ``FrontendApp`` expects."""

    def __init__(
        self,
        cluster: ClusterView,
        frontends: Frontends,
        objectives: DisaggConfig,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._objectives = objectives
        self._frontends = frontends
        self._now_unix_s = now_unix_s
        self._looking = asyncio.Lock()
        self._looked_s = -FRESH_S
        self._known: Sequence[KnownFrontend] = ()
        self._queue: int | None = None
        self._queued_since_s: float | None = None

    async def show(self, exchange: Exchange, request_id: str) -> None:
        """``?since=N``: the history after second N (default: five minutes). ``?hour=1``: the last hour's instead, in
        steps of 15 s. Raises InvalidInputError.

        Not for one of several clients: it names workers and shows everyone's load."""
        if exchange.request.client:
            raise NotPermittedError("this key sees its own requests; the cluster is for keys of --metrics-keys-file")
        since, is_hour = _number(exchange.request, "since"), bool(_number(exchange.request, "hour"))
        await self._look()
        exchange.respond(Response(200, msgspec.json.encode(self._snapshot(since, is_hour)), headers=[NO_STORE]))

    async def _look(self) -> None:
        async with self._looking:
            if time.monotonic() - self._looked_s < FRESH_S:
                return
            self._known, self._queue = await asyncio.gather(
                self._frontends.gather(), self._cluster.prefill_queue_size()
            )
            self._looked_s = time.monotonic()
            if not self._queue:
                self._queued_since_s = None
            elif self._queued_since_s is None:
                self._queued_since_s = self._looked_s

    def _snapshot(self, since: int, is_hour: bool) -> ClusterSnapshot:
        now_s, now_unix_s = time.monotonic(), self._now_unix_s()
        second = int(now_unix_s)
        members = self._cluster.members()
        workers, flows = worker_views(members, now_s), flows_of(members)
        own, planners = self._frontends.frontend_id, self._cluster.planners()
        frontends = [frontend_view(known, known.frontend_id == own, now_s, second) for known in self._known]
        rows = all_rows(self._known, second, since)
        queued_s = 0.0 if self._queued_since_s is None else now_s - self._queued_since_s
        whole = totals(rows, second, workers, frontends, flows, self._queue, queued_s, self._objectives)
        return ClusterSnapshot(
            now_unix=now_unix_s,
            frontend=own,
            release=__version__,
            wrong_now=wrong_now(
                workers,
                frontends,
                whole,
                has_control=self._cluster.has_control,
                has_discovery=self._cluster.has_discovery,
                is_started_on_demand=self._cluster.cold_start.wait_s > 0.0,
                planners=planners,
                crashed=self._cluster.crashed(),
            ),
            total=whole,
            workers=workers,
            times=times_views(self._known),
            flows=flow_views(flows),
            frontends=frontends,
            planners=planners,
            history=(
                history(hour_rows(self._known, second), since, COARSE_S)
                if is_hour
                else history(rows, max(since, second - HISTORY_S))
            ),
        )


NO_STORE = (b"cache-control", b"no-store")
EXPECTED = {"since": "seconds since 1970", "hour": "0 or 1"}


def _number(request: HttpRequest, name: str) -> int:
    """Of the query; 0 if it is not there. Raises InvalidInputError."""
    values = parse_qs(request.query, keep_blank_values=True).get(name, ["0"])
    if (
        len(values) != 1
        or not values[0].isascii()
        or not values[0].isdigit()
        or len(values[0]) > 12
        or (name == "hour" and values[0] not in "01")
    ):
        raise InvalidInputError(f"{name} must be a whole number ({EXPECTED[name]})", param=name)
    return int(values[0])
