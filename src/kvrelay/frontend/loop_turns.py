"""Large work on the event loop takes turns over all requests together: a little per turn, and at most half of its time.

Bodies are parsed and sequences are routed and sent on the loop, in time proportional to their prompts. Of a burst of
long prompts many would be ready in the same turn, and every stream and every chat would wait for its end. So the
shortest comes first, and while more waits, the loop rests after each turn for as long as the turn took: then it serves
everything else, and the workers' processes have the cores to take in what was sent.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import msgspec

from kvrelay.core.shortest_first import ShortestFirst

TURN_COST = 2**14
"""The cost that a turn has room for, about 1 ms. Work of any cost is done in a turn that has done none yet."""
START_COST = 1024
"""Starting a sequence costs as much as hashing, routing and sending so many tokens."""


class _Waiter(msgspec.Struct, frozen=True):
    cost: int
    future: asyncio.Future[None]


class LoopTurns:
    """The turns of the running event loop. ``num_turns`` counts those that had large work."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.num_turns = 0
        self._now = now
        self._spent = 0
        self._began_s = 0.0
        self._is_resting = False
        self._waiting = ShortestFirst[_Waiter]()
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"LoopTurns({self.num_turns} so far, spent={self._spent}, waiting={len(self._waiting)})"

    async def take(self, cost: int) -> None:
        """Return in a turn in which work of ``cost`` may be done: the present one if there is room."""
        if not self._waiting and not self._is_resting and (not self._spent or self._spent + cost <= TURN_COST):
            self._spend(cost)
            return
        waiter = _Waiter(cost, asyncio.get_running_loop().create_future())
        self._waiting.add(next(self._numbers), cost, waiter)
        await waiter.future

    def _spend(self, cost: int) -> None:
        if not self._spent:
            self.num_turns += 1
            self._began_s = self._now()
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._spent += cost

    def _end_turn(self) -> None:
        """The turn's work has been done: this is called after it."""
        self._spent = 0
        if self._waiting:
            self._is_resting = True
            asyncio.get_running_loop().call_later(self._now() - self._began_s, self._next_turn)

    def _next_turn(self) -> None:
        """Wake those whose work comes next."""
        self._is_resting = False
        while self._spent < TURN_COST:
            waiter = self._waiting.take()
            if waiter is None:
                return
            if not waiter.future.done():
                waiter.future.set_result(None)
                self._spend(waiter.cost)
