"""What a prefill worker has to say about hand-offs that did not end with HandoffDone, until it has been heard.

    release ──> HandoffReleased ..., Ping ──> decode worker          over the connection that is there, or a new one
                     ^                │
                     │               Pong: everything before it was heard
                     └── connection lost, no answer: again, later; until the decode worker has been gone for a while

A decode worker that stood still for longer than its lease comes back under its old id, with the requests that it had
then, and would wait for hand-offs that nobody computes: that its lease has ended is no reason to stop at once. And a
release that got lost would keep its blocks quarantined for as long as we live. Saying one twice does no harm. It does
not know why hand-offs end.
"""

from __future__ import annotations

import asyncio
import logging
import time

from kvrelay.core.handoff import HandoffReleased
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import KvrelayError
from kvrelay.worker.peers import DecodePeers

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
MIN_DELAY_S = 0.05
MAX_DELAY_S = 2.0
MIN_GONE_FOR_S = 30.0
GONE_FOR_DETECTIONS = 3.0
"""Longer than a connection outlives a silent peer: after that its requests have gone elsewhere, too. Several times as
long, since frontends go by the decode worker's lease, which may be longer than ours."""


class Releases:
    """One queue and one task per decode worker that has not heard everything yet. For the event loop. ``detection_s``
    is how long a connection outlives a silent peer."""

    def __init__(self, peers: DecodePeers, detection_s: float) -> None:
        self._peers = peers
        self._gone_for_s = max(GONE_FOR_DETECTIONS * detection_s, MIN_GONE_FOR_S)
        self._unheard: dict[str, list[HandoffReleased]] = {}
        self._tasks = TaskSet()
        self._is_closed = False

    @property
    def num_unheard(self) -> int:
        return sum(len(messages) for messages in self._unheard.values())

    def say(self, worker_id: str, address: str, message: HandoffReleased) -> None:
        """Tell the decode worker at ``address``, now or as soon as it can be reached."""
        if worker_id in self._unheard:
            self._unheard[worker_id].append(message)
            return
        self._unheard[worker_id] = [message]
        self._tasks.spawn(self._tell(worker_id, address))

    async def close(self) -> None:
        """What is unheard does not matter any more: the end of our lease will say the same."""
        self._is_closed = True
        await self._tasks.close()

    async def _tell(self, worker_id: str, address: str) -> None:
        unheard = self._unheard[worker_id]
        delay_s = MIN_DELAY_S
        gone_since_s: float | None = None
        try:
            while unheard and not self._is_closed:
                num_said = len(unheard)
                try:
                    peer = await self._peers.get(worker_id, address)
                    await peer.tell(tuple(unheard), ANSWER_TIMEOUT_S)
                except KvrelayError as exc:
                    _log.debug("%s has not heard of %d ended hand-offs: %s", worker_id, num_said, exc)
                    now_s = time.monotonic()
                    if not await self._peers.is_gone(worker_id):
                        gone_since_s = None
                    elif gone_since_s is None:
                        gone_since_s = now_s
                    elif now_s - gone_since_s > self._gone_for_s:
                        return
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, MAX_DELAY_S)
                else:
                    del unheard[:num_said]
                    delay_s = MIN_DELAY_S
        finally:
            del self._unheard[worker_id]
