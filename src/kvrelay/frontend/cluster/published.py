"""What a model's workers publish, on its way to the model's router: cache events and load samples."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kvrelay.control.base import EventBus, Keys, Subscription
from kvrelay.core.event_codec import decode_events, decode_load
from kvrelay.core.events import KvEventBatch, LoadMetrics
from kvrelay.core.sealing import unseal
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import ControlUnavailableError, ProtocolError, RetryElsewhereError
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.cluster.worker_link import WorkerLink

_log = logging.getLogger(__name__)


REPLAY_TIMEOUT_S = 2.0

_Published = TypeVar("_Published", KvEventBatch, LoadMetrics)


class Served(NamedTuple):
    """A connected worker: the model that it serves, and the connection."""

    model: Model
    link: WorkerLink


class Published:
    """What workers publish, as one frontend hears it, from ``start`` to ``close``: cache events and load samples, and
    the events that it has missed. ``served_by`` returns the connected worker of that id, if there is one.

        subject, sealed frame ──> the connected worker that owns the subject ──> its model's router

    It owns the subscriptions. It does not know how workers come and go: a frame of a worker that is not connected is
    dropped, because the index requests missed events once the worker is connected.
    """

    def __init__(self, events: EventBus, keys: Keys, served_by: Callable[[str], Served | None]) -> None:
        self._events = events
        self._keys = keys
        self._served_by = served_by
        self._subscriptions: list[Subscription] = []
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Subscribe. Raises ControlUnavailableError."""
        self._subscriptions = [
            await self._events.subscribe(self._keys.kv_events, self._on_events),
            await self._events.subscribe(self._keys.load_metrics, self._on_load),
        ]

    async def close(self) -> None:
        await self._tasks.close()
        for subscription in self._subscriptions:
            try:
                await subscription.unsubscribe()
            except ControlUnavailableError as exc:
                _log.debug("a subscription ended with the connection: %s", exc)

    def _on_events(self, subject: str, data: bytes) -> None:
        heard = self._heard(subject, data, decode_events, self._keys.worker_kv_events)
        if heard is not None:
            served, batch = heard
            served.model.router_of(batch.worker_id).apply_events(batch)

    def _on_load(self, subject: str, data: bytes) -> None:
        heard = self._heard(subject, data, decode_load, self._keys.worker_load)
        if heard is not None:
            served, metrics = heard
            served.link.report.heard(metrics, time.monotonic())
            served.model.router_of(metrics.worker_id).apply_metrics(metrics)

    def _heard(
        self, subject: str, data: bytes, decode: Callable[[bytes], _Published], subject_of: Callable[[str], str]
    ) -> tuple[Served, _Published] | None:
        """The publisher and its message; None for a frame that must be dropped. ``subject_of`` names the subject on
        which a worker may publish such messages: the server's permissions are per subject, not per worker."""
        served = self._served_by(_publisher_of(subject))
        if served is None:
            return None
        try:
            message = decode(unseal(served.link.publish_secret, subject, data))
            if subject_of(message.worker_id) != subject:
                raise ProtocolError(f"this worker publishes on {subject_of(message.worker_id)}")
        except ProtocolError as exc:
            _log.warning("dropped a message of a worker on %s: %s", subject, exc)
            return None
        return served, message

    def request_replay(self, worker_id: str, request: bytes) -> None:
        """Ask a worker for the events that were missed; the answer goes to its model."""
        self._tasks.spawn(self._replay(worker_id, request))

    async def _replay(self, worker_id: str, request: bytes) -> None:
        try:
            subject = self._keys.worker_replay(worker_id)
            reply = await self._events.request(subject, request, REPLAY_TIMEOUT_S)
        except RetryElsewhereError as exc:
            _log.debug("no replay from %s: %s", worker_id, exc)
            return
        served = self._served_by(worker_id)
        if served is None:
            return
        try:
            frame = unseal(served.link.publish_secret, subject, reply)
        except ProtocolError as exc:
            _log.warning("replay on %s dropped: %s", subject, exc)
            return
        served.model.router_of(worker_id).apply_replay(worker_id, frame)


def _publisher_of(subject: str) -> str:
    """The worker that owns the subject."""
    return subject.rpartition(".")[2]
