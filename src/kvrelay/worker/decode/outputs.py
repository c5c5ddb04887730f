"""The way of outputs from the engine's thread to the frontends: gathered, and sent to each in one message, or in
several if the transport's limit requires it.

    a step's outputs ──> at once     a first or last one, all of a step after a pause, and what waits by then
                    └──> gathered    others that follow the last delivery within GATHER_S, for as long

A message costs both its ends more than a step of a small model takes, and no client notices a millisecond. Steps that
take longer than that are delivered one by one.

It does not know the requests' owners. If a frontend cannot be reached, the request plane ends its connection.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvrelay.core.messages import OutputBatch, TokenOutput
from kvrelay.errors import PayloadTooLargeError
from kvrelay.rpc.base import Peer, RpcServer

GATHER_S = 0.001


def is_first_or_last(output: TokenOutput) -> bool:
    """Whether a client waits for it, and it has its request's marks."""
    return output.finish_reason is not None or output.num_cached_tokens is not None


class Outbox:
    """``deliver`` runs on the event loop on which this was made, and takes what there is."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._outputs: deque[TokenOutput] = deque()
        self._is_due = self._is_gathering = False
        """Whether a delivery follows soon, or when the timer ends."""
        self._timer: asyncio.TimerHandle | None = None
        self._taken_s = -math.inf

    def add(self, outputs: Sequence[TokenOutput]) -> None:
        """On the engine's thread, once per step."""
        self._outputs.extend(outputs)
        if not self._is_due and not (self._is_gathering and not any(map(is_first_or_last, outputs))):
            self._is_due = True
            self._loop.call_soon_threadsafe(self._deliver)

    def take(self) -> list[TokenOutput]:
        """All, in order. On the event loop."""
        # First: what is added from now on makes another delivery due.
        was_gathering, self._is_due, self._is_gathering = self._is_gathering, False, False
        if self._timer is not None:
            self._timer.cancel()
        taken, now_s = [self._outputs.popleft() for _ in range(len(self._outputs))], time.monotonic()
        if taken and (was_gathering or now_s - self._taken_s < GATHER_S):
            self._is_gathering = True
            self._timer = self._loop.call_later(GATHER_S, self._deliver)
        self._taken_s = now_s
        return taken


def send_outputs(server: RpcServer, peer: Peer, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
    """Send ``outputs`` in order. Returns the outputs that are too large for a message of their own; they were not
    sent."""
    try:
        server.send(peer, OutputBatch(tuple(outputs)))
    except PayloadTooLargeError:
        if len(outputs) == 1:
            return list(outputs)
        half = len(outputs) // 2
        return send_outputs(server, peer, outputs[:half]) + send_outputs(server, peer, outputs[half:])
    return []
