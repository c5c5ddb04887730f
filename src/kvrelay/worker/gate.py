"""Refuses what is too much at once, however long the engine's step takes.

The engine looks at arrivals between two steps, and a step may take seconds. So the event loop asks its bounds before it
posts a request, and adds what it has posted and the engine has not looked at. The engine checks again when it does.
"""

from __future__ import annotations

from kvrelay.core.messages import GenerateRequest
from kvrelay.engine.contract import EngineHost
from kvrelay.engine.overload import OnTheWay


class Gate:
    """Counts requests on their way to the engine. Each number is written by one thread only, so none needs a lock."""

    def __init__(self, engine: EngineHost) -> None:
        self._engine = engine
        self._num_entered = self._num_tokens_entered = 0
        self._num_arrived = self._num_tokens_arrived = 0

    def enter(self, message: GenerateRequest) -> None:
        """On the event loop: let it pass towards the engine. Raises OverloadedError."""
        num_tokens = _num_tokens(message)
        ahead = OnTheWay(self._num_entered - self._num_arrived, self._num_tokens_entered - self._num_tokens_arrived)
        is_new = not message.output_token_ids
        self._engine.peek(lambda core: core.check_room(num_tokens, is_new=is_new, ahead=ahead))
        self._num_entered += 1
        self._num_tokens_entered += num_tokens

    def arrived(self, message: GenerateRequest) -> None:
        """On the engine's thread: the engine looks at it now."""
        self._num_arrived += 1
        self._num_tokens_arrived += _num_tokens(message)


def _num_tokens(message: GenerateRequest) -> int:
    return len(message.prompt_token_ids) + len(message.output_token_ids)
