"""Carries a prefill worker's messages to decode workers, over a new connection if necessary.

    reach      connect, also to the worker's memory; the side claims then
    tell       HandoffProgress, HandoffDone, HandoffReady
    release    HandoffReleased ..., Ping ──> decode worker
                                    Pong ──> heard: everything before it

It tries once. The hand-off ledger repeats a message until it is acknowledged, and decides when to give up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrelay.core.handoff import HandoffId
from kvrelay.core.tasks import TaskSet, failure_of
from kvrelay.errors import KvrelayError
from kvrelay.handoff.messages import HandoffReleased, HandoffReport
from kvrelay.worker.cluster.memory import PeerMemory
from kvrelay.worker.prefill.connections import DecodePeers
from kvrelay.worker.sides.ports import Link

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0


class DecodeLinks:
    """``sides.ports.DecodeWorkerPort``. ``memory``: None if the engines move the KV. For the event loop; ``heard`` runs
    there."""

    def __init__(self, peers: DecodePeers, memory: PeerMemory | None) -> None:
        self.remember = peers.remember
        self._peers = peers
        self._memory = memory
        self._telling: set[HandoffId] = set()
        self._unsent: dict[str, dict[HandoffId, tuple[HandoffReleased, Callable[[], None]]]] = {}
        """By decode worker with pending releases: each has one task."""
        self._tasks = TaskSet()

    async def close(self) -> None:
        """Claim and release nothing more: the end of our lease has the same effect."""
        await self._tasks.close()

    def reach(self, worker_id: str, then: Callable[[Link | None, KvrelayError | None], None]) -> None:
        """Connect to the worker and its memory if need be, then ``then(link, None)`` or ``then(None, error)``."""
        self._tasks.spawn(self._reach(worker_id, then))

    async def _reach(self, worker_id: str, then: Callable[[Link | None, KvrelayError | None], None]) -> None:
        link: Link | None = None

        async def connect() -> None:
            nonlocal link
            peer = await self._peers.get(worker_id)
            if self._memory is not None:
                await self._memory.connect(worker_id)
            link = peer.client

        error = await failure_of(connect(), f"connecting to {worker_id}")
        then(link, error)

    def tell(self, worker_id: str, message: HandoffReport) -> None:
        """Send it, unless the last message of its hand-off still waits for a connection: the ledger says it again."""
        if message.handoff_id not in self._telling:
            self._telling.add(message.handoff_id)
            self._tasks.spawn(self._tell(worker_id, message))

    async def _tell(self, worker_id: str, message: HandoffReport) -> None:
        try:
            (await self._peers.get(worker_id)).client.send(message)
        except KvrelayError as exc:
            _log.debug("%s does not hear of hand-off %s: %s", worker_id, message.handoff_id, exc)
        finally:
            self._telling.discard(message.handoff_id)

    def release(self, worker_id: str, message: HandoffReleased, heard: Callable[[], None]) -> None:
        """Send a release, together with other pending releases for the same decode worker."""
        is_first = worker_id not in self._unsent
        self._unsent.setdefault(worker_id, {})[message.handoff_id] = (message, heard)
        if is_first:
            self._tasks.spawn(self._release(worker_id))

    async def _release(self, worker_id: str) -> None:
        try:
            while unsent := self._unsent[worker_id]:
                self._unsent[worker_id] = {}
                try:
                    peer = await self._peers.get(worker_id)
                    await peer.tell([message for message, _ in unsent.values()], ANSWER_TIMEOUT_S)
                except KvrelayError as exc:
                    _log.debug("%s has not heard of %d ended hand-offs: %s", worker_id, len(unsent), exc)
                else:
                    for _, heard in unsent.values():
                        heard()
        finally:
            del self._unsent[worker_id]
