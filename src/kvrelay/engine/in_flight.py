"""The prefills that a decode worker's own queue has sent away, from then until they come back or are lost.

Placement by cost learns from them how long a remote prefill takes. It knows no hand-offs: those of pairs, which the
frontend has placed, are not counted here.
"""

from __future__ import annotations

from typing import NamedTuple

from kvrelay.core.clock import Clock
from kvrelay.engine.request import Request


class _Sent(NamedTuple):
    """A remote prefill: its tokens, the tokens sent before it, and its time."""

    num_tokens: int
    num_ahead: int
    since_s: float


class PrefillsAway:
    """Requests that wait for KV from elsewhere."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sent: dict[Request, _Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute elsewhere."""
        return sum(sent.num_tokens for sent in self._sent.values())

    def send(self, request: Request) -> None:
        """The request's prefill goes to the queue now."""
        self._sent[request] = _Sent(request.num_missing_tokens, self.num_tokens, self._clock.now())

    def came_back(self, request: Request) -> None:
        """Its KV has arrived."""
        sent = self._sent.pop(request, None)
        policy = request.placement.policy if request.placement is not None else None
        if sent is not None and policy is not None:
            seconds = self._clock.now() - sent.since_s
            policy.came_back(request.request_id, sent.num_tokens, sent.num_ahead, seconds)

    def forget(self, request: Request) -> None:
        """No KV will arrive."""
        self._sent.pop(request, None)
