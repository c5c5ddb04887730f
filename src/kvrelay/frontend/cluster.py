"""The cluster as one frontend sees it: discovery in, models and connections out.

    discovery ──watch──> worker entries ──> a task per worker: tokenizer, connection, reconnection ──> Model
    events, load samples ──subscriptions──> the model's router
    settings set at run time ──watch──> every model's router

It owns the connections to workers and one Model per model name. While the control plane is away it goes on with the
workers that it knows; what is lost with a connection is noticed by the connection itself. A worker that leaves
discovery gets no new requests, and keeps those that it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvrelay.control.base import ControlPlane, Keys, Subscription, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.control_codec import decode_setting, decode_worker
from kvrelay.core.event_codec import decode_events, decode_load
from kvrelay.core.sealing import unseal
from kvrelay.core.tasks import TaskSet
from kvrelay.core.workers import WorkerInfo
from kvrelay.data.tokenizer_files import tokenizer_fingerprint
from kvrelay.errors import (
    CheckpointError,
    ControlUnavailableError,
    KvrelayError,
    ModelNotFoundError,
    ProtocolError,
    RetryElsewhereError,
    WorkerUnavailableError,
)
from kvrelay.frontend.models import Model
from kvrelay.frontend.tokenizer import Tokenizer, load_tokenizer
from kvrelay.frontend.worker_link import WorkerLink
from kvrelay.router import Router, RuntimeSettings
from kvrelay.router.base import ReplayRequester
from kvrelay.rpc.base import RpcClient

_log = logging.getLogger(__name__)

RpcClientFactory = Callable[[WorkerInfo], RpcClient]
"""A client of that worker, not started yet."""
RouterFactory = Callable[[int, ReplayRequester], Router]
"""A router for blocks of so many tokens, and how it asks for events that it missed."""

RECONNECT_BACKOFF_S = (0.05, 0.1, 0.2, 0.5)
REPLAY_TIMEOUT_S = 2.0
INTRODUCTION_TIMEOUT_S = 5.0
KEEPER_RETRY_S = 1.0
ROUTER_SECTION = "router."


class _Served(NamedTuple):
    """A connected worker, and what it is connected for."""

    model: Model
    link: WorkerLink


class Cluster:
    """Models by name, kept up to date from ``start`` to ``close``."""

    def __init__(
        self,
        control: ControlPlane,
        keys: Keys,
        connect: RpcClientFactory,
        build_router: RouterFactory,
        tokenizer_of: Callable[[Path], Tokenizer] = load_tokenizer,
    ) -> None:
        self._control = control
        self._keys = keys
        self._connect = connect
        self._build_router = build_router
        self._tokenizer_of = tokenizer_of
        self._infos: dict[str, WorkerInfo] = {}
        self._models: dict[str, Model] = {}
        self._served: dict[str, _Served] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._unmet: set[str] = set()
        """Workers that nobody has tried to reach yet."""
        self._all_met = asyncio.Event()
        self._all_met.set()
        self._tasks = TaskSet()
        self._subscriptions: list[Subscription] = []
        self._settings = RuntimeSettings()
        self._workers_listed = asyncio.Event()
        self._settings_listed = asyncio.Event()

    def __repr__(self) -> str:
        return f"Cluster(models={list(self._models.values())}, served={list(self._served.values())})"

    @property
    def models(self) -> list[Model]:
        """Those that a worker serves now."""
        return [model for model in self._models.values() if model.is_available]

    def model(self, name: str | None) -> Model:
        """The model of that name; without a name the first one.

        Raises ModelNotFoundError, and WorkerUnavailableError for a model whose workers are all gone.
        """
        if name is None or name == "":
            available = self.models
            if not available:
                raise WorkerUnavailableError("no worker serves a model")
            return available[0]
        model = self._models.get(name)
        if model is None:
            raise ModelNotFoundError(f"The model `{name}` does not exist.", param="model", code="model_not_found")
        if not model.is_available:
            raise WorkerUnavailableError(f"no worker serves the model `{name}` at the moment")
        return model

    def count_workers(self) -> dict[str, int]:
        return {name: len(model.worker_ids) for name, model in self._models.items()}

    async def start(self) -> None:
        """Subscribe and watch. Raises ControlUnavailableError."""
        events = self._control.events
        self._subscriptions = [
            await events.subscribe(self._keys.kv_events, self._on_events),
            await events.subscribe(self._keys.load_metrics, self._on_load),
        ]
        discovery, settings = self._control.discovery, self._keys.config_value(ROUTER_SECTION)
        self._tasks.spawn(follow(discovery, self._keys.workers, self._on_worker, self._workers_listed.set))
        self._tasks.spawn(follow(discovery, settings, self._on_setting, self._settings_listed.set))

    async def wait_synced(self, timeout_s: float) -> bool:
        """Until the workers that were registered at the start, and the settings of then, are known."""
        return await _happen(timeout_s, self._workers_listed, self._settings_listed)

    async def wait_met(self, timeout_s: float) -> bool:
        """Until every known worker is connected, or was found unreachable."""
        return await _happen(timeout_s, self._all_met)

    async def close(self) -> None:
        tasks = [*self._tasks, *self._keepers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for subscription in self._subscriptions:
            try:
                await subscription.unsubscribe()
            except ControlUnavailableError as exc:
                _log.debug("a subscription ends with the connection: %s", exc)

    # -- discovery ----------------------------------------------------------------------------------------------------

    def _on_setting(self, event: WatchEvent) -> None:
        """``kvrelay config set router.NAME VALUE``, for every model at once."""
        name = event.key.removeprefix(self._keys.config_value(ROUTER_SECTION))
        if event.kind is WatchKind.DELETE:
            self._settings.remove(name)
        else:
            self._settings.put(name, decode_setting(name, event.value))
        for model in self._models.values():
            model.tune(self._settings)

    def _on_worker(self, event: WatchEvent) -> None:
        worker_id = event.key.removeprefix(self._keys.workers)
        if event.kind is WatchKind.DELETE:
            self._forget(worker_id)
        else:
            self._learn(decode_worker(worker_id, event.value))

    def _learn(self, info: WorkerInfo) -> None:
        """A worker registered, or changed."""
        self._infos[info.worker_id] = info
        served = self._served.get(info.worker_id)
        if served is not None and info.role.takes_requests and self._is_for(served.model, info):
            served.link.revive(info)
            served.model.add_worker(info, served.link)
        elif served is not None:
            served.model.remove_worker(info.worker_id)
            served.link.retire()
        if info.role.takes_requests and info.worker_id not in self._keepers:
            self._unmet.add(info.worker_id)
            self._all_met.clear()
            keeper = asyncio.get_running_loop().create_task(self._keep_worker(info.worker_id))
            self._keepers[info.worker_id] = keeper
            keeper.add_done_callback(lambda task: self._keeper_done(info.worker_id, task))

    def _forget(self, worker_id: str) -> None:
        """A worker left discovery: drained or dead. Its connection tells which."""
        info = self._infos.pop(worker_id, None)
        served = self._served.get(worker_id)
        if info is not None and served is not None:
            served.model.remove_worker(worker_id)
            served.link.retire()

    def _wanted(self, worker_id: str) -> WorkerInfo | None:
        """The worker's entry if requests may go there."""
        info = self._infos.get(worker_id)
        return info if info is not None and info.role.takes_requests else None

    def _is_for(self, model: Model, info: WorkerInfo) -> bool:
        """Whether the worker, as its entry says now, serves this model."""
        return self._models.get(info.model) is model and model.is_of(info)

    def _has_been_met(self, worker_id: str) -> None:
        """With or without success."""
        self._unmet.discard(worker_id)
        if not self._unmet:
            self._all_met.set()

    def _keeper_done(self, worker_id: str, task: asyncio.Task[None]) -> None:
        self._keepers.pop(worker_id, None)
        self._has_been_met(worker_id)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log.error("the connection to %s failed", worker_id, exc_info=error)
            self._tasks.spawn(self._keep_again(worker_id))
            return
        # It may have come back while its connection was being closed.
        self._keep_if_wanted(worker_id)

    async def _keep_again(self, worker_id: str) -> None:
        """Behind a defect of ours, or what this machine lacks for a moment: neither is the worker's end."""
        await asyncio.sleep(KEEPER_RETRY_S)
        self._keep_if_wanted(worker_id)

    def _keep_if_wanted(self, worker_id: str) -> None:
        info = self._wanted(worker_id)
        if info is not None:
            self._learn(info)

    async def _keep_worker(self, worker_id: str) -> None:
        """One worker's connection: made, made again when it breaks, until the worker is not wanted any more."""
        num_failures = 0
        while (info := self._wanted(worker_id)) is not None:
            try:
                served = await self._meet(info)
            except KvrelayError as exc:
                level = logging.WARNING if num_failures == 0 else logging.DEBUG
                _log.log(level, "worker %s cannot be used yet: %s", worker_id, exc)
                self._has_been_met(worker_id)
                await asyncio.sleep(RECONNECT_BACKOFF_S[min(num_failures, len(RECONNECT_BACKOFF_S) - 1)])
                num_failures += 1
                continue
            num_failures = 0
            await self._serve(served, worker_id)

    async def _serve(self, served: _Served, worker_id: str) -> None:
        """While the connection lives."""
        model, link = served
        self._served[worker_id] = served
        try:
            info = self._wanted(worker_id)
            if info is None or not self._is_for(model, info):
                return  # it left, or changed while it was connected: to be met again as what it is now
            link.revive(info)
            model.add_worker(info, link)
            _log.info("worker %s serves %s", worker_id, model.name)
            self._has_been_met(worker_id)
            await link.wait_ended()
        finally:
            del self._served[worker_id]
            model.remove_worker(worker_id)
            await link.close()

    async def _meet(self, info: WorkerInfo) -> _Served:
        """Connect, then find the model, so that it cannot be replaced before the worker is added to it."""
        client = self._connect(info)
        await client.start()
        link = WorkerLink(info, client)
        try:
            if info.public_key:
                await link.introduce(INTRODUCTION_TIMEOUT_S)
            return _Served(await self._model_of(info), link)
        except BaseException:
            await link.close()
            raise

    async def _model_of(self, info: WorkerInfo) -> Model:
        """The model that the worker serves; its tokenizer is loaded once.

        Other weights under the same name replace it when its last worker has gone: a request must not be continued, nor
        its prompt tokenized, by another model. Raises CheckpointError, and WorkerUnavailableError until then.
        """
        async with self._loading.setdefault(info.model, asyncio.Lock()):
            model = self._models.get(info.model)
            if model is not None and model.is_of(info):
                return model
            # Before: the one that waits comes again and again. Behind: meanwhile an old worker may have come back.
            _check_is_free(model)
            tokenizer = await asyncio.to_thread(self._load_tokenizer, info)
            _check_is_free(model)
            router = self._build_router(info.block_size, self._request_replay)
            model = self._models[info.model] = Model(info, tokenizer, router)
            model.tune(self._settings)
        return model

    def _load_tokenizer(self, info: WorkerInfo) -> Tokenizer:
        """This machine's copy. Raises CheckpointError, also when the worker's copy is another one: its answers would
        become other text here."""
        path = Path(info.model_path)
        tokenizer = self._tokenizer_of(path)
        if info.tokenizer_fingerprint:
            try:
                found = tokenizer_fingerprint(path)
            except OSError as exc:
                raise CheckpointError(f"cannot read the tokenizer's files in {path}: {exc}") from exc
            if found != info.tokenizer_fingerprint:
                raise CheckpointError(
                    f"the tokenizer, chat template or generation config in {path} differs from the copy that "
                    f"{info.worker_id} has on {info.host or 'its machine'}: bring the same checkpoint to both, then "
                    f"restart what was changed"
                )
        return tokenizer

    # -- what workers publish -----------------------------------------------------------------------------------------

    def _on_events(self, subject: str, data: bytes) -> None:
        served = self._served.get(_publisher_of(subject))
        if served is None:
            return  # the index asks for what it has missed, once the worker is connected
        try:
            batch = decode_events(unseal(served.link.publish_secret, subject, data))
            _check_sender(subject, self._keys.worker_kv_events(batch.worker_id))
        except ProtocolError as exc:
            _log.warning("cache events on %s dropped: %s", subject, exc)
            return
        served.model.router.apply_events(batch)

    def _on_load(self, subject: str, data: bytes) -> None:
        served = self._served.get(_publisher_of(subject))
        if served is None:
            return
        try:
            metrics = decode_load(unseal(served.link.publish_secret, subject, data))
            _check_sender(subject, self._keys.worker_load(metrics.worker_id))
        except ProtocolError as exc:
            _log.warning("load sample on %s dropped: %s", subject, exc)
            return
        served.model.router.apply_metrics(metrics)

    def _request_replay(self, worker_id: str, request: bytes) -> None:
        self._tasks.spawn(self._replay(worker_id, request))

    async def _replay(self, worker_id: str, request: bytes) -> None:
        try:
            subject = self._keys.worker_replay(worker_id)
            reply = await self._control.events.request(subject, request, REPLAY_TIMEOUT_S)
        except RetryElsewhereError as exc:
            _log.debug("no replay from %s: %s", worker_id, exc)
            return
        served = self._served.get(worker_id)
        if served is None:
            return
        try:
            frame = unseal(served.link.publish_secret, subject, reply)
        except ProtocolError as exc:
            _log.warning("replay on %s dropped: %s", subject, exc)
            return
        served.model.router.apply_replay(worker_id, frame)


def _publisher_of(subject: str) -> str:
    """The worker whose subject it is."""
    return subject.rpartition(".")[2]


def _check_sender(subject: str, own_subject: str) -> None:
    """A worker publishes under its own name; the server's permissions are by subject. Raises ProtocolError."""
    if subject != own_subject:
        raise ProtocolError(f"its place is {own_subject}")


def _check_is_free(old: Model | None) -> None:
    """Raises WorkerUnavailableError while workers still serve the model that has the name."""
    if old is not None and old.is_available:
        raise WorkerUnavailableError(f"workers with other weights or another tokenizer serve the name {old.name}")


async def _happen(timeout_s: float, *events: asyncio.Event) -> bool:
    """Whether all of them are set within ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            for event in events:
                await event.wait()
    except TimeoutError:
        return False
    return True
