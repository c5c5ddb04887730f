"""The planner's inputs from a live cluster: each worker's status, what frontends have counted, and the prefill queue.

A worker that does not answer is in the view and not ready. Counts of frontends are differences since the last look;
those of a frontend that has just come count from the next look on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.core.control_codec import decode_worker
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.events import LoadMetrics
from kvrelay.core.histogram import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, quantile_bucket_s
from kvrelay.core.step_cost import CostSource
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import KvrelayError, ProtocolError, RetryElsewhereError
from kvrelay.frontend.cluster.figures import Second, total_of
from kvrelay.frontend.cluster.frontends import other_frontends, traffic_of, traffic_question
from kvrelay.launch.worker_calls import WorkerCalls
from kvrelay.planner import Demand, FleetView, Measured, Traffic, WorkerView, generated_since

_log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 1.5
ASK_TIMEOUT_S = 0.7
MEASURED_S = 60.0
MIN_MEASURED = 20


class _Status(msgspec.Struct):
    """The part of a worker's status that the planner reads."""

    worker_id: str
    role: WorkerRole
    load: LoadMetrics
    num_steps: int = 0
    num_generated_tokens: int = 0
    step_age_s: float = 0.0


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
        views, (traffic, num_unplaced, measured) = await asyncio.gather(
            asyncio.gather(*map(self._view, infos)), self._traffic()
        )
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
            num_unplaced=num_unplaced,
            measured=measured,
        )
        return fleet, demand

    async def _workers(self) -> list[WorkerInfo]:
        """Those of the model that most workers serve: a fleet has one model."""
        found: dict[str, WorkerInfo] = {}
        for key, value in sorted((await self._control.discovery.list(self._keys.workers)).items()):
            try:
                info = decode_worker(key.removeprefix(self._keys.workers), value)
                found[info.worker_id] = info
            except ProtocolError as exc:
                _log.debug("ignored the discovery entry %s: %s", key, exc)
        self._calls.known = found
        await self._calls.forget_others()
        models = Counter(info.model for info in found.values()).most_common(1)
        return [info for info in found.values() if info.model == models[0][0]]

    async def _view(self, info: WorkerInfo) -> WorkerView:
        # A rank of a group lives and ends with the others: its role and number are not the planner's.
        view = WorkerView(worker_id=info.worker_id, role=info.role, is_ready=False, is_held=info.dp_size > 1)
        try:
            answer = await self._calls.ask(info.worker_id, "status", timeout_s=STATUS_TIMEOUT_S)
            status = msgspec.convert(answer, _Status)
        except (KvrelayError, *UNREADABLE) as exc:
            _log.debug("no status of %s: %s", info.worker_id, exc)
            return view
        load = status.load.sound
        return msgspec.structs.replace(
            view,
            # Ready: it has taken a step, or has had nothing to do.
            is_ready=status.worker_id == info.worker_id
            and status.role is info.role
            and bool(status.num_steps or not load.num_requests_waiting),
            num_steps=status.num_steps,
            num_generated_tokens=status.num_generated_tokens,
            num_running=load.num_decoding,
            num_admitted=load.request_active_slots,
            num_waiting=load.num_requests_waiting,
            num_slots=load.request_total_slots,
            num_prefill_tokens=load.num_prefill_tokens,
            kv_tokens=load.kv_total_blocks * info.block_size,
            kv_used_tokens=load.kv_active_blocks * info.block_size,
            prefix_hit_rate=load.gpu_prefix_cache_hit_rate,
            step_cost=load.step_cost,
            is_cost_estimated=load.step_cost_source is CostSource.ESTIMATED,
        )

    async def _traffic(self) -> tuple[Traffic, int, Measured | None]:
        """What has come to all frontends since the last look, the requests that wait there for a first worker, and what
        clients got."""
        frontends = sorted(await other_frontends(self._control, self._keys, ""))
        answers = dict(zip(frontends, await asyncio.gather(*map(self._ask, frontends))))
        new = Traffic()
        for name, (traffic, *_) in answers.items():
            if traffic is not None and (before := self._counted.get(name)) is not None:
                new = new.plus(traffic.since(before))
        known = {name: self._counted[name] for name in frontends if name in self._counted}
        self._counted = known | {name: traffic for name, (traffic, *_) in answers.items() if traffic is not None}
        minute = total_of(row for _, _, rows in answers.values() for row in rows)
        return new, sum(num_unplaced for _, num_unplaced, _ in answers.values()), measured_in(minute)

    async def _ask(self, name: str) -> tuple[Traffic | None, int, tuple[Second, ...]]:
        try:
            subject, since = self._keys.frontend_figures(name), int(time.time() - MEASURED_S)
            return traffic_of(await self._control.events.request(subject, traffic_question(since), ASK_TIMEOUT_S))
        except RetryElsewhereError as exc:
            _log.debug("frontend %s tells no counts: %s", name, exc)
            return None, 0, ()


def measured_in(minute: Second) -> Measured | None:
    """None: too few requests for a 95th percentile."""
    if sum(minute.ttft) < MIN_MEASURED or not minute.itl:
        return None
    return Measured(
        ttft_s=quantile_bucket_s(LATENCY_BUCKETS_S, minute.ttft, 0.95),
        itl_s=quantile_bucket_s(TOKEN_BUCKETS_S, minute.itl, 0.5),
    )
