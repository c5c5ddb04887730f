"""The planner's inputs from a live cluster: the workers in discovery, what frontends have counted and have heard of the
workers' loads, and the prefill queue.

Workers publish their loads on the bus, sealed; frontends check the seals. So the planner asks frontends and no worker.
A worker of which none has heard lately is in the view and not ready. Counts of frontends are differences since the last
look; those of a frontend that has just come count from the next look on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from kvrelay.control.base import ControlPlane, Keys
from kvrelay.core.events import LoadMetrics
from kvrelay.core.histogram import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, quantile_bucket_s
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import RetryElsewhereError
from kvrelay.frontend.cluster.figures import HeardLoad
from kvrelay.frontend.cluster.frontends import FiguresReply, figures_of, other_frontends, planners_question
from kvrelay.frontend.cluster.seconds import Second, total_of
from kvrelay.launch.worker_calls import WorkerCalls
from kvrelay.planner import Demand, FleetView, Measured, Traffic, WorkerView, generated_since
from kvrelay.worker.reporting.publisher import repeat_interval_s

_log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 0.7
NUM_REPEATS, LATE_S = 2, 3.0
"""A worker is silent once two repetitions of its sample are missing, and so late."""
STUCK_S = 10.0
"""No step of a sound engine takes so long."""
MEASURED_S = 60
MIN_MEASURED = 20


class FleetObserver:
    """Looks when it is asked to, and keeps connections and counts in between."""

    def __init__(self, control: ControlPlane, keys: Keys, calls: WorkerCalls) -> None:
        self._control, self._keys, self._calls = control, keys, calls
        self._counted: dict[str, Traffic] = {}
        self._looked_s = time.monotonic()
        self._seen: list[WorkerView] = []
        self._prompt_tokens = 0.0
        """Mean length, for the queue, which tells its entries only."""

    async def look(self) -> tuple[FleetView, Demand]:
        """The fleet now, and the demand since the last look. Raises ControlUnavailableError."""
        infos = await self._workers()
        asked = await self._answers()
        answers = [answer for answer in asked.values() if answer is not None]
        loads = latest_loads(answers)
        views = [self._view(info, loads.get(info.worker_id)) for info in infos]
        traffic, minute = self._traffic(asked), total_of(row for answer in answers for row in answer.rows)
        num_queued = await self._control.prefill_queue.size()
        now_s = time.monotonic()
        demand = traffic.demand(now_s - self._looked_s, generated_since(self._seen, views))
        self._looked_s, self._seen = now_s, views
        if demand.num_requests:
            self._prompt_tokens = demand.num_prompt_tokens / demand.num_requests
        fleet = FleetView(
            now_s=now_s,
            workers=tuple(views),
            num_queued_prefill_tokens=round(num_queued * self._prompt_tokens),
            num_unplaced=sum(answer.num_unplaced for answer in answers),
            measured=measured_in(minute),
        )
        return fleet, demand

    async def _workers(self) -> list[WorkerInfo]:
        """Those of the model that most workers serve: a fleet has one model."""
        found = await self._calls.look(logging.DEBUG)  # again every two seconds
        models = Counter(info.model for info in found).most_common(1)
        return [info for info in found if info.model == models[0][0]]

    def _view(self, info: WorkerInfo, heard: HeardLoad | None) -> WorkerView:
        return WorkerView(
            role=info.role,
            load=LoadMetrics(info.worker_id, 0, 0, 0, 0, 0, 0.0, 0.0) if heard is None else heard.load.sound,
            block_size=info.block_size,
            is_ready=heard is not None and is_ready(heard),
            # A rank of a group lives and ends with the others: its role and number are not the planner's.
            is_held=info.dp_size > 1,
        )

    async def _answers(self) -> dict[str, FiguresReply | None]:
        """Of each frontend; None: it does not answer."""
        names = sorted(await other_frontends(self._control, self._keys, ""))
        return dict(zip(names, await asyncio.gather(*map(self._ask, names)), strict=True))

    def _traffic(self, answers: Mapping[str, FiguresReply | None]) -> Traffic:
        """What has come to all frontends since the last look."""
        new = Traffic()
        before, self._counted = self._counted, {}
        for name, answer in answers.items():
            known, traffic = before.get(name), None if answer is None else answer.traffic
            if known is not None and traffic is not None:
                new = new.plus(traffic.since(known))
            if (latest := traffic or known) is not None:
                self._counted[name] = latest
        return new

    async def _ask(self, name: str) -> FiguresReply | None:
        try:
            subject, question = self._keys.frontend_figures(name), planners_question(MEASURED_S)
            return figures_of(await self._control.events.request(subject, question, ASK_TIMEOUT_S))
        except RetryElsewhereError as exc:
            _log.debug("frontend %s tells no figures: %s", name, exc)
            return None


def latest_loads(answers: Iterable[FiguresReply]) -> dict[str, HeardLoad]:
    """Of each worker, as the frontend tells it that has heard it last."""
    found: dict[str, HeardLoad] = {}
    for heard in (heard for answer in answers for heard in answer.loads):
        known = found.get(heard.load.worker_id)
        if known is None or heard.age_s < known.age_s:
            found[heard.load.worker_id] = heard
    return found


def is_ready(heard: HeardLoad) -> bool:
    """Whether the worker has taken a step, or has had nothing to do; it repeats its sample when it must, and no step
    takes too long."""
    load = heard.load
    is_silent = heard.age_s > NUM_REPEATS * repeat_interval_s(load, load.step_age_s) + LATE_S
    is_stuck = load.step_age_s > 0.0 and load.step_age_s + heard.age_s > STUCK_S
    has_begun = load.tokens is not None and load.tokens.num_steps > 0
    return not is_silent and not is_stuck and (has_begun or not load.num_waiting)


def measured_in(minute: Second) -> Measured | None:
    """None: too few requests for a 95th percentile."""
    if sum(minute.ttft) < MIN_MEASURED or not minute.itl:
        return None
    return Measured(
        ttft_s=quantile_bucket_s(LATENCY_BUCKETS_S, minute.ttft, 0.95),
        itl_s=quantile_bucket_s(TOKEN_BUCKETS_S, minute.itl, 0.5),
    )
