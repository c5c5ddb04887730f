"""Admission control on the event loop: refuses a request at once, independent of the engine's step.

The engine reads its inbox between two steps, and a step may take seconds. So the event loop checks the engine's limits
before it posts a request. The limits take into account the requests that were posted and not yet received. The engine
checks its limits again when it receives the request.
"""

from __future__ import annotations

from kvrelay.core.messages import GenerateRequest
from kvrelay.engine.contract import EngineHost
from kvrelay.engine.limits import PendingArrivals


class AdmissionControl:
    """Counts the requests between the event loop and the engine. Each number has one writing thread: no lock."""

    def __init__(self, engine: EngineHost) -> None:
        self._engine = engine
        self._num_admitted = self._num_tokens_admitted = 0
        self._num_received = self._num_tokens_received = 0

    def admit(self, message: GenerateRequest) -> None:
        """On the event loop, before the request is posted to the engine. Raises OverloadedError."""
        num_tokens = message.num_tokens
        ahead = PendingArrivals(
            self._num_admitted - self._num_received, self._num_tokens_admitted - self._num_tokens_received
        )
        is_new = not message.output_token_ids
        self._engine.peek(lambda core: core.check_room(num_tokens, is_new=is_new, ahead=ahead, tenant=message.tenant))
        self._num_admitted += 1
        self._num_tokens_admitted += num_tokens

    def received(self, message: GenerateRequest) -> None:
        """On the engine's thread, before the request is added."""
        self._num_received += 1
        self._num_tokens_received += message.num_tokens
