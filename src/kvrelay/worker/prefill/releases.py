"""Sends releases to decode workers, over a new connection if necessary, and reports which were acknowledged.

    say ──> HandoffReleased ..., Ping ──> decode worker
                                 Pong ──> heard: everything before it

It tries once. The hand-off ledger repeats a release until it is acknowledged, and decides when to give up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrelay.core.handoff import HandoffId
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import KvrelayError
from kvrelay.handoff.messages import HandoffReleased
from kvrelay.worker.prefill.connections import DecodePeers

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0


class Releases:
    """One task per decode worker with pending releases. For the event loop. ``on_acknowledged(handoff_id)`` runs
    there."""

    def __init__(self, peers: DecodePeers, on_acknowledged: Callable[[HandoffId], None]) -> None:
        self._peers = peers
        self._on_acknowledged = on_acknowledged
        self._unsent: dict[str, dict[HandoffId, HandoffReleased]] = {}
        self._tasks = TaskSet()

    def say(self, worker_id: str, message: HandoffReleased) -> None:
        """Send a release, together with other pending releases for the same decode worker."""
        if worker_id in self._unsent:
            self._unsent[worker_id][message.handoff_id] = message
            return
        self._unsent[worker_id] = {message.handoff_id: message}
        self._tasks.spawn(self._tell(worker_id))

    async def close(self) -> None:
        await self._tasks.close()

    async def _tell(self, worker_id: str) -> None:
        try:
            while unsent := self._unsent[worker_id]:
                self._unsent[worker_id] = {}
                try:
                    peer = await self._peers.get(worker_id)
                    await peer.tell(tuple(unsent.values()), ANSWER_TIMEOUT_S)
                except KvrelayError as exc:
                    _log.debug("%s has not heard of %d ended hand-offs: %s", worker_id, len(unsent), exc)
                else:
                    for handoff_id in unsent:
                        self._on_acknowledged(handoff_id)
        finally:
            del self._unsent[worker_id]
