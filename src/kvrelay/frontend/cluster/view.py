"""The cluster as one frontend sees it: discovery in, models and connections out.

    discovery ──watch──> worker entries ──> a task per worker: tokenizer, connection, reconnection ──> Model
    events, load samples ──> the model's router (``Published``)
    run-time settings ──watch──> every model's router

It owns the connections to workers and one Model per model name. While the control plane is away it uses the workers
that it knows; each connection notices its own loss. A worker that leaves discovery gets no new requests, and keeps
those that it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvrelay.config import DisaggConfig
from kvrelay.control.base import ControlPlane, Keys, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.control_codec import decode_setting, decode_worker
from kvrelay.core.events import LoadMetrics
from kvrelay.core.tasks import TaskSet, end_tasks, happen
from kvrelay.core.workers import WorkerInfo
from kvrelay.data.tokenizer_files import tokenizer_fingerprint
from kvrelay.errors import (
    CheckpointError,
    ControlUnavailableError,
    KvrelayError,
    ModelNotFoundError,
    WorkerUnavailableError,
)
from kvrelay.frontend.cluster.adapters import RunTimeAdapters
from kvrelay.frontend.cluster.cold_start import ColdStart
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.cluster.published import Published, Served
from kvrelay.frontend.cluster.worker_link import WorkerLink
from kvrelay.frontend.tokens.tokenizer import Tokenizer, load_tokenizer
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.planner.report import PlannerReport, read_reports
from kvrelay.router import PairRouter, Router, RouterStage, RuntimeSettings
from kvrelay.router.base import ReplayRequester
from kvrelay.rpc.base import RpcClient

_log = logging.getLogger(__name__)

RpcClientFactory = Callable[[WorkerInfo], RpcClient]
"""Makes a client of a worker, not started yet."""
RouterFactory = Callable[[int, ReplayRequester, RouterStage], Router]
"""Makes a router from the block size in tokens, a function that requests missed events, and the half that it is for."""

RECONNECT_BACKOFF_S = (0.05, 0.1, 0.2, 0.5)
INTRODUCTION_TIMEOUT_S = 5.0
CONNECTOR_RETRY_S = 1.0
QUEUE_TIMEOUT_S = 0.7
ROUTER_SECTION = "router."
DISAGG_SECTION = "disagg."
CRASHES_S = 600.0
MAX_CRASHES = 1000
LEFT_SHARE = 0.1
"""Of a lease: a worker that ends in order has left discovery so long after its connection broke at the latest."""
MAX_PLANNERS = 16
"""One decides; the others stand by."""


class Member(NamedTuple):
    """A worker: its entry, or its last one if it has left discovery, and the connection, if there is one. ``problem``:
    why there is none."""

    info: WorkerInfo
    link: WorkerLink | None
    is_listed: bool
    problem: str = ""


class ClusterView:
    """Models by name, kept up to date from ``start`` to ``close``."""

    def __init__(
        self,
        control: ControlPlane,
        keys: Keys,
        connect: RpcClientFactory,
        build_router: RouterFactory,
        tokenizer_of: Callable[[Path], Tokenizer] = load_tokenizer,
        disagg: DisaggConfig | None = None,
        cold_start_wait_s: float = 0.0,
    ) -> None:
        self._control = control
        self._keys = keys
        self._connect = connect
        self._build_router = build_router
        self.tokenizer_of = tokenizer_of
        self._infos: dict[str, WorkerInfo] = {}
        self._models: dict[str, Model] = {}
        self._served: dict[str, Served] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self._connectors: dict[str, asyncio.Task[None]] = {}
        self._broken: dict[str, float] = {}
        """Workers in discovery whose connection broke, and when."""
        self._problems: dict[str, str] = {}
        """Why workers in discovery cannot be connected to, or cannot serve here."""
        self._crashes: deque[tuple[float, WorkerInfo]] = deque(maxlen=MAX_CRASHES)
        self._pending: set[str] = set()
        """Workers whose first connection attempt has not ended."""
        self._none_pending = asyncio.Event()
        self._none_pending.set()
        self._tasks = TaskSet()
        self._published = Published(control.events, keys, self._served_by)
        self._settings = RuntimeSettings()
        self._disagg = DisaggPolicy(disagg or DisaggConfig())
        """Prefill-first: whether a request gets a prefill worker."""
        self._workers_listed = asyncio.Event()
        self._settings_listed = asyncio.Event()
        self._planners: dict[str, bytes] = {}
        self.cold_start = ColdStart(cold_start_wait_s)
        self.adapters = RunTimeAdapters(control.discovery, keys, self._infos.values, self._adapters_changed)

    def __repr__(self) -> str:
        return f"Cluster(models={list(self._models.values())}, served={list(self._served.values())})"

    @property
    def models(self) -> list[Model]:
        """Models that a worker serves now, or whose workers' connections have just broken. While there is none, and a
        planner can start a worker: all known models."""
        served = [model for model in self._models.values() if model.is_available or model.reconnect_s]
        return served or (list(self._models.values()) if self.cold_start.wait_s else [])

    def listed_models(self) -> list[Model]:
        """The same. Raises WorkerUnavailableError before discovery has listed the workers: none would be wrong."""
        if not self._workers_listed.is_set():
            raise WorkerUnavailableError("discovery has not listed the workers yet")
        return self.models

    def model(self, name: str | None) -> Model:
        """The model of that name; without a name the first one.

        Raises ModelNotFoundError, and WorkerUnavailableError for a model whose workers are all gone, or may yet come.
        """
        if not self._models:
            self.cold_start.asked()
        if name is None or name == "":
            available = self.models
            if not available:
                raise WorkerUnavailableError("no worker serves a model")
            return available[0]
        model = self._known(name)
        if model is None and self._may_come(name):
            raise WorkerUnavailableError(f"this frontend has reached no worker of the model `{name[:200]}` yet")
        if model is None:
            raise ModelNotFoundError(f"The model `{name[:200]}` does not exist.", param="model", code="model_not_found")
        if model not in self.models:
            raise WorkerUnavailableError(f"no worker serves the model `{name}` at the moment")
        if model.called(name) != name:
            raise WorkerUnavailableError(f"no worker has the adapter `{name}` at the moment")
        return model

    def counted_as(self, name: str | None) -> str:
        """The model or adapter under which a request for ``name`` is counted: also one that has lost its workers. Empty
        if it was never served, since names that clients choose must not become series."""
        model = self._known(name) if name else next(iter(self._models.values()), None)
        return "" if model is None else model.called(name)

    def _known(self, name: str) -> Model | None:
        """The model, or that of the adapter, of this name, served or not."""
        return self._models.get(name) or self._with_adapter(name) or self._of_known_adapter(name)

    def _with_adapter(self, name: str) -> Model | None:
        """A model of which ``name`` is an adapter, rather one that is served now."""
        found = [model for model in self._models.values() if name in model.adapters]
        return max(found, key=lambda model: model.is_available, default=None)

    def _of_known_adapter(self, name: str) -> Model | None:
        """The model of an adapter that was loaded at run time, and that no worker has now."""
        entry = self.adapters.entries.get(name)
        return None if entry is None else self._models.get(entry.model)

    def _adapters_changed(self) -> None:
        for model in self._models.values():
            model.refresh()

    def _may_come(self, name: str) -> bool:
        """Whether a model that is unknown here may have workers."""
        is_known = self._workers_listed.is_set() and bool(self._models)
        return not is_known or self.adapters.may_come(name) or any(name == info.model for info in self._infos.values())

    def count_workers(self) -> dict[str, int]:
        return {name: len(model.worker_ids) for name, model in self._models.items()}

    def count_fallbacks(self) -> dict[str, int]:
        """Per model, the requests that were placed without the workers' costs."""
        return {name: model.router.num_fallbacks for name, model in self._models.items()}

    def count_places(self) -> dict[tuple[str, ...], int]:
        """Prefill-first requests by model and place of the prefill."""
        models = self._models.items()
        return {(name, place.value): count for name, model in models for place, count in model.pairs.places.items()}

    def loads(self) -> list[tuple[str, LoadMetrics]]:
        """The last sample of its load of each connected worker that takes requests, with its model's name."""
        return [
            (model.name, link.load)
            for model, link in self._served.values()
            if link.load is not None and link.info.role.takes_requests
        ]

    def links(self) -> list[WorkerLink]:
        """The connections to workers that serve."""
        return [served.link for served in self._served.values()]

    @property
    def has_control(self) -> bool:
        """Whether NATS is connected, by which load comes."""
        return self._control.is_connected

    @property
    def has_discovery(self) -> bool:
        """Whether NATS or etcd, whichever has discovery, is connected."""
        return self._control.discovery.is_connected

    async def prefill_queue_size(self) -> int | None:
        """Prefills that no worker has pulled yet; None if the control server does not tell, or not in time."""
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                return await self._control.prefill_queue.size()
        except (ControlUnavailableError, TimeoutError) as exc:
            _log.debug("the size of the prefill queue is unknown: %s", exc)
            return None

    def members(self) -> list[Member]:
        """All workers in discovery, and those that have left it and still serve requests here; by id."""
        links = {worker_id: served.link for worker_id, served in self._served.items()}
        left = {worker_id: link.info for worker_id, link in links.items() if worker_id not in self._infos}
        return [
            Member(info, links.get(worker_id), worker_id in self._infos, self._problems.get(worker_id, ""))
            for worker_id, info in sorted((self._infos | left).items())
        ]

    def crashed(self) -> list[WorkerInfo]:
        """The workers that have crashed in the last ``CRASHES_S``, the latest last."""
        return [info for at_s, info in self._crashes if at_s > time.monotonic() - CRASHES_S]

    async def start(self) -> None:
        """Subscribe and watch. Raises ControlUnavailableError."""
        await self._published.start()
        discovery, settings = self._control.discovery, self._keys.config_value(ROUTER_SECTION)
        self._tasks.spawn(follow(discovery, self._keys.workers, self._on_worker, self._workers_listed.set))
        self._tasks.spawn(follow(discovery, settings, self._on_setting, self._settings_listed.set))
        self._tasks.spawn(follow(discovery, self._keys.config_value(DISAGG_SECTION), self._on_threshold))
        self._tasks.spawn(follow(discovery, self._keys.planners, self._on_planner))
        self._tasks.spawn(self.adapters.follow())

    def _served_by(self, worker_id: str) -> Served | None:
        return self._served.get(worker_id)

    async def wait_synced(self, timeout_s: float) -> bool:
        """Wait until the initial listing of workers, settings and adapters is known."""
        return await happen(timeout_s, self._workers_listed, self._settings_listed, self.adapters.listed)

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait until every known worker is connected, or its first connection attempt has failed."""
        return await happen(timeout_s, self._none_pending)

    async def close(self) -> None:
        await end_tasks([*self._tasks, *self._connectors.values()])
        await self._published.close()

    # -- discovery ----------------------------------------------------------------------------------------------------

    def _on_setting(self, event: WatchEvent) -> None:
        """Apply ``kvrelay config set router.NAME VALUE`` to every model at once."""
        name = event.key.removeprefix(self._keys.config_value(ROUTER_SECTION))
        if event.kind is WatchKind.DELETE:
            self._settings.remove(name)
        else:
            self._settings.put(name, decode_setting(name, event.value))
        for model in self._models.values():
            model.tune(self._settings)

    def _on_threshold(self, event: WatchEvent) -> None:
        """Apply ``kvrelay config set disagg.NAME VALUE``, as workers do for decode-first."""
        name = event.key.removeprefix(self._keys.config_value(DISAGG_SECTION))
        if event.kind is WatchKind.DELETE:
            self._disagg.unset(name)
        else:
            self._disagg.set(name, decode_setting(name, event.value))

    def _on_planner(self, event: WatchEvent) -> None:
        """A planner has said something, or is gone."""
        if event.kind is WatchKind.DELETE:
            self._planners.pop(event.key, None)
        elif event.key in self._planners or len(self._planners) < MAX_PLANNERS:
            self._planners[event.key] = event.value
        self.cold_start.can_start = any(report.is_leader and report.can_start for report in self.planners())

    def planners(self) -> list[PlannerReport]:
        """What the planners have said last, the one that decides first."""
        return read_reports(self._planners)

    def _on_worker(self, event: WatchEvent) -> None:
        worker_id = event.key.removeprefix(self._keys.workers)
        if event.kind is WatchKind.DELETE:
            self._forget(worker_id)
        else:
            self._learn(decode_worker(worker_id, event.value))
        self.adapters.workers_changed()

    def _learn(self, info: WorkerInfo) -> None:
        """A worker has registered, or its entry has changed."""
        self._infos[info.worker_id] = info
        served = self._served.get(info.worker_id)
        if served is not None and self._is_for(served.model, info):
            served.link.revive(info)
            served.model.add_worker(info, served.link)
        elif served is not None:
            served.model.remove_worker(info.worker_id)
            served.link.retire()
        if self._is_wanted(info) and info.worker_id not in self._connectors:
            self._pending.add(info.worker_id)
            self._none_pending.clear()
            connector = asyncio.get_running_loop().create_task(self._stay_connected(info.worker_id))
            self._connectors[info.worker_id] = connector
            connector.add_done_callback(lambda task: self._connector_done(info.worker_id, task))

    def _forget(self, worker_id: str) -> None:
        """A worker left discovery, drained or dead. Its connection tells which."""
        info = self._infos.pop(worker_id, None)
        served = self._served.get(worker_id)
        broken_s = self._broken.pop(worker_id, None)
        self._problems.pop(worker_id, None)
        # One that ends in order leaves discovery first; the entry of one that crashed stays until its lease ends.
        if info is not None and broken_s is not None and time.monotonic() - broken_s > info.lease_ttl_s * LEFT_SHARE:
            self._crashes.append((time.monotonic(), info))
        if info is not None and served is not None:
            served.model.remove_worker(worker_id)
            served.link.retire()

    def _wanted(self, worker_id: str) -> WorkerInfo | None:
        """The worker's entry, if it takes requests, or prefills (halves of pairs) of a model that is served."""
        info = self._infos.get(worker_id)
        return info if info is not None and self._is_wanted(info) else None

    def _is_wanted(self, info: WorkerInfo) -> bool:
        return info.role.takes_requests or info.model in self._models

    def _is_for(self, model: Model, info: WorkerInfo) -> bool:
        """Whether the worker's current entry is for this model."""
        return self._models.get(info.model) is model and model.is_of(info)

    def _attempt_ended(self, worker_id: str) -> None:
        """The first connection attempt to the worker has ended, with or without success."""
        self._pending.discard(worker_id)
        if not self._pending:
            self._none_pending.set()

    def _connector_done(self, worker_id: str, task: asyncio.Task[None]) -> None:
        self._connectors.pop(worker_id, None)
        self._attempt_ended(worker_id)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log.error("the connection to %s failed", worker_id, exc_info=error)
            self._tasks.spawn(self._reconnect_later(worker_id))
            return
        # The worker may have come back while its connection was being closed.
        self._connect_if_wanted(worker_id)

    async def _reconnect_later(self, worker_id: str) -> None:
        """Retry after an internal error or a temporary shortage on this machine; the worker may be healthy."""
        await asyncio.sleep(CONNECTOR_RETRY_S)
        self._connect_if_wanted(worker_id)

    def _connect_if_wanted(self, worker_id: str) -> None:
        info = self._wanted(worker_id)
        if info is not None:
            self._learn(info)

    async def _stay_connected(self, worker_id: str) -> None:
        """Connect to one worker, and reconnect when the connection breaks, while the worker is in discovery."""
        num_failures = 0
        while (info := self._wanted(worker_id)) is not None:
            try:
                served = await self._connect_to(info)
            except KvrelayError as exc:
                level = logging.WARNING if num_failures == 0 else logging.DEBUG
                _log.log(level, "connecting to worker %s failed (%s); retrying", worker_id, exc)
                if worker_id in self._infos:
                    self._problems[worker_id] = exc.message
                self._attempt_ended(worker_id)
                await asyncio.sleep(RECONNECT_BACKOFF_S[min(num_failures, len(RECONNECT_BACKOFF_S) - 1)])
                num_failures += 1
                continue
            num_failures = 0
            await self._serve(served, worker_id)

    async def _serve(self, served: Served, worker_id: str) -> None:
        """Let the worker serve requests while the connection lives."""
        model, link = served
        self._served[worker_id] = served
        self._broken.pop(worker_id, None)
        self._problems.pop(worker_id, None)
        try:
            info = self._wanted(worker_id)
            if info is None or not self._is_for(model, info):
                return  # the worker left, or changed during the connect: connect again with its current entry
            link.revive(info)
            model.add_worker(info, link)
            _log.info("worker %s serves %s", worker_id, model.name)
            self._attempt_ended(worker_id)
            await link.wait_ended()
        finally:
            del self._served[worker_id]
            if worker_id in self._infos:
                self._broken[worker_id] = time.monotonic()
                model.connection_broke()
            model.remove_worker(worker_id)
            await link.close()

    async def _connect_to(self, info: WorkerInfo) -> Served:
        """Connect first, then find the model, so that the model cannot be replaced before the worker is added to it."""
        client = self._connect(info)
        await client.start()
        link = WorkerLink(info, client)
        try:
            await link.introduce(INTRODUCTION_TIMEOUT_S)
            return Served(await self._model_of(info), link)
        except BaseException:
            await link.close()
            raise

    async def _model_of(self, info: WorkerInfo) -> Model:
        """The model that the worker serves; its tokenizer is loaded once.

        Other weights under the same name replace the model after its last worker has gone: another model must not
        continue a request or tokenize its prompt. Until then this raises WorkerUnavailableError. Raises
        CheckpointError, too.
        """
        async with self._loading.setdefault(info.model, asyncio.Lock()):
            model = self._models.get(info.model)
            if model is not None and model.is_of(info):
                return model
            # Check before loading: a waiting worker retries again and again. Check after: an old worker may have come
            # back meanwhile.
            _check_is_free(model)
            tokenizer = await asyncio.to_thread(self._load_tokenizer, info)
            _check_is_free(model)
            decodes, prefills = (
                self._build_router(info.block_size, self._published.request_replay, stage)
                for stage in (RouterStage.REQUEST, RouterStage.PREFILL)
            )
            pairs = PairRouter(decodes, prefills, self._disagg)
            model = self._models[info.model] = Model(info, tokenizer, pairs, self.adapters, self.cold_start)
            model.tune(self._settings)
        for other in list(self._infos.values()):
            if other.model == info.model and not other.role.takes_requests:
                self._learn(other)
        return model

    def _load_tokenizer(self, info: WorkerInfo) -> Tokenizer:
        """This machine's copy. Raises CheckpointError, also if it differs from the worker's copy: the worker's tokens
        would become other text here."""
        path = Path(info.model_path)
        tokenizer = self.tokenizer_of(path)
        if info.tokenizer_fingerprint:
            try:
                found = tokenizer_fingerprint(path)
            except OSError as exc:
                raise CheckpointError(f"cannot read the tokenizer's files in {path}: {exc}") from exc
            if found != info.tokenizer_fingerprint:
                raise CheckpointError(
                    f"the tokenizer, chat template or generation config in {path} differs from the copy that "
                    f"{info.worker_id} has on {info.host or 'its machine'}: bring the same checkpoint to both, then "
                    f"restart the changed side"
                )
        return tokenizer


def _check_is_free(old: Model | None) -> None:
    """Raises WorkerUnavailableError while workers still serve the model that holds the name."""
    if old is not None and old.is_available:
        raise WorkerUnavailableError(f"workers with other weights or another tokenizer serve the name {old.name}")
