"""A worker's steps that only decode, jumped over in one go.

Their times follow from the costs as soon as the first one begins. So the worker has one callback in the loop, at their
end, instead of three for each step. What they have done until now is caught up with when anything looks: a message
for the worker, an event at the frontend, a view.

    turn ──> times of n steps ──> [a message comes: catch up, and leave between two steps] ──> turn

This is exact: what is caught up with has the order that the steps' own callbacks would have had (``loop.Position``),
and each tick of the clock, draw, load sample and cache event is the one of the step by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrelay.core.events import KvEvent, KvEventBatch, LoadMetrics
from kvrelay.engine.core import EngineCore
from kvrelay.engine.steady import SteadyDecodes
from kvrelay.simulate.loop import EventLoop, Position, Rank
from kvrelay.simulate.machine import TOKEN

MAX_STEPS = 512
"""Longer runs would throw more away when they are interrupted."""


class QuietDelivery(NamedTuple):
    """One step's tokens on their way to the frontend, where they are due at ``time_s``: to be taken in the order of
    these tuples. ``run`` knows whose they are."""

    time_s: float
    number: int
    run: DecodeRun
    step: int
    events: KvEventBatch | None
    load: LoadMetrics | None


class Outlet(NamedTuple):
    """What a worker puts out at the end of a step: ``publish`` numbers cache events, ``sample`` takes the load, which
    is due at ``sample_due_s()``, and ``deliver`` sends to the frontend, ``hop_s`` away."""

    publish: Callable[[list[KvEvent]], KvEventBatch]
    sample: Callable[[], LoadMetrics | None]
    sample_due_s: Callable[[], float]
    deliver: Callable[[QuietDelivery], None]
    hop_s: float


class DecodeRun:
    """The steps of worker ``number``, which take ``seconds`` each and have ``between_s`` between them; the first one
    begins now."""

    def __init__(
        self,
        number: int,
        core: EngineCore,
        steps: SteadyDecodes,
        seconds: npt.NDArray[np.float64],
        between_s: float,
        loop: EventLoop,
        outlet: Outlet,
    ) -> None:
        self.number, self.worker_id = number, core.worker_id
        self.rows = [(one.request_id, len(one.token_ids) - one.num_prompt_tokens) for one in steps.requests]
        """Request ids, and the position of the first step's token in each answer."""
        self._core, self._steps, self._loop, self._outlet = core, steps, loop, outlet
        moments = np.full(2 * len(seconds) + 1, between_s)
        moments[0], moments[1::2] = loop.clock.now(), seconds
        # One addition after the other, as the loop would: the sums must round alike.
        moments = np.add.accumulate(moments)
        self._begins_s: list[float] = moments[0::2].tolist()
        self._ends_s: list[float] = moments[1::2].tolist()
        self._took_s: list[float] = (moments[1::2] - moments[0:-1:2]).tolist()
        self._seconds: list[float] = seconds.tolist()
        self.num_begun = self._num_ended = 0
        self._events: list[KvEvent] = []
        """Of the step that has begun and not ended."""

    @property
    def end_s(self) -> float:
        """When the step after all of these begins."""
        return self._begins_s[-1]

    @property
    def next_s(self) -> float:
        """When the next step begins, or the present one ends."""
        return (self._ends_s if self.num_begun > self._num_ended else self._begins_s)[self._num_ended]

    @property
    def is_in_step(self) -> bool:
        return self.num_begun > self._num_ended

    def seconds_begun(self) -> list[float]:
        """The times of the steps that have begun."""
        return self._seconds[: self.num_begun]

    def leave(self) -> None:
        """What is to come is not as foreseen."""
        self._steps.leave(TOKEN)

    def catch_up(self, position: Position) -> None:
        """Do all that comes before ``position``."""
        if self.next_s > position.time_s:
            return
        now_s = self._loop.clock.now()
        num_begun = self._before(self._begins_s, len(self._ends_s), Rank.TURN, position)
        num_ended = self._before(self._ends_s, num_begun, Rank.STEP_END, position)
        while True:
            if self.is_in_step:
                if self._num_ended >= num_ended:
                    break
                self._end_step()
            elif self.num_begun < num_begun:
                self._begin_steps(num_begun)
            else:
                break
        self._loop.clock.move_to(now_s)

    def end_step(self) -> float:
        """End the present step, now. Returns when the next one begins."""
        self._end_step()
        return self._begins_s[self._num_ended]

    def _before(self, times_s: list[float], most: int, rank: Rank, position: Position) -> int:
        """How many of the moments come before ``position``."""
        at = bisect_left(times_s, position.time_s, self._num_ended, most)
        while at < most and Position(times_s[at], rank, self.number) < position:
            at += 1
        return at

    def _begin_steps(self, num_begun: int) -> None:
        """Begin steps up to the first one that changes blocks, or at whose end the load is sampled; and end all but
        the last of them, which put out nothing but tokens."""
        first = self.num_begun
        end = min(num_begun, first + self._steps.num_until_change)
        end = min(end, bisect_left(self._ends_s, self._outlet.sample_due_s(), first, end) + 1)
        self._loop.clock.move_to(self._begins_s[first])  # what gives way to new blocks depends on the time
        self._steps.compute(self._took_s[first:end], TOKEN)
        self.num_begun, self._num_ended = end, end - 1
        deliver, hop_s = self._outlet.deliver, self._outlet.hop_s
        for step in range(first, end - 1):
            deliver(QuietDelivery(self._ends_s[step] + hop_s, self.number, self, step, None, None))
        if self._core.pool.has_events:
            self._events = self._core.drain_events()

    def _end_step(self) -> None:
        step, outlet = self._num_ended, self._outlet
        end_s = self._ends_s[step]
        events = load = None
        if self._events:
            events, self._events = outlet.publish(self._events), []
        if end_s >= outlet.sample_due_s():
            self._loop.clock.move_to(end_s)
            load = outlet.sample()
        outlet.deliver(QuietDelivery(end_s + outlet.hop_s, self.number, self, step, events, load))
        self._num_ended += 1
