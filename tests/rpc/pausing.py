"""A loopback network whose clients can be paused, like stopped processes: messages to them wait, up to a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.rpc.loopback import LoopbackNetwork, LoopbackRpcClient


class PausingClient(LoopbackRpcClient):
    """While it ``is_paused``, messages wait for ``resume``. ``high_water_mark``: how many may."""

    is_paused = False
    high_water_mark = 10_000

    def __init__(self, network: LoopbackNetwork, address: str, public_key: str) -> None:
        super().__init__(network, address, public_key)
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self.high_water_mark

    def accept(self, event: Callable[[], None]) -> None:
        if self.is_paused:
            self._waiting.append(event)
        else:
            super().accept(event)

    def resume(self) -> None:
        """Deliver the waiting messages, and all later ones."""
        self.is_paused = False
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            asyncio.get_running_loop().call_soon(event)


class PausingNetwork(LoopbackNetwork):
    def client(self, address: str, public_key: str = "") -> PausingClient:
        return PausingClient(self, address, public_key)
