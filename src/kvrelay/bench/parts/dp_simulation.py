"""A data-parallel group in simulated time, stepped by the protocol of ``dp`` or in waves.

    requests ──Poisson──> ranks ── begin_round ──> step: it ends ``step_s`` after the last rank has entered it
                            ^  └─ StartStep ──delay_s──> Coordinator ──delay_s──> StepsUntil to every rank

The protocol's own state machines decide; only time and network are simulated. The wave design is here for comparison
alone: all ranks are woken by the frontend, and every ``interval`` steps an all-gather asks whether any rank has work.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

from kvrelay.dp.protocol import Coordinator, Participant, Round


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of ``num_steps`` steps each, ``rate`` per second over the whole group, at random ranks, in bursts that
    last ``burst_s`` with ``gap_s`` between them. Every delay of a message is ``delay_s`` on average."""

    num_ranks: int
    duration_s: float
    rate: float
    num_steps: int
    step_s: float
    delay_s: float
    burst_s: float
    gap_s: float
    seed: int

    def arrivals(self) -> list[tuple[float, int]]:
        """Times and ranks."""
        draw, found, at = random.Random(self.seed), [], 0.0
        while (at := at + draw.expovariate(self.rate)) < self.duration_s:
            if at % (self.burst_s + self.gap_s) < self.burst_s:
                found.append((at, draw.randrange(self.num_ranks)))
        return found


@dataclass(slots=True)
class Outcome:
    """Counts of a run. A superfluous step is one in which no rank had a request."""

    num_messages: int = 0
    num_steps: int = 0
    num_superfluous: int = 0
    num_tokens: int = 0
    last_token_s: float = 0.0
    first_steps_s: list[float] = field(default_factory=list)
    """From a request's arrival at a sleeping group to the end of its first step."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.last_token_s if self.last_token_s else 0.0


class _Rank:
    def __init__(self) -> None:
        self.participant = Participant()
        self.left: list[int] = []
        """Steps that each of its requests still needs."""
        self.is_inside = False

    def compute(self) -> int:
        """A step; returns the tokens."""
        count = len(self.left)
        self.left = [steps - 1 for steps in self.left if steps > 1]
        return count


class SteppedGroup:
    """The protocol with ``lookahead``, in simulated time."""

    def __init__(self, load: Load, lookahead: int) -> None:
        self._load = load
        self._draw = random.Random(load.seed + 1)
        self._coordinator = Coordinator(lookahead)
        self._ranks = [_Rank() for _ in range(load.num_ranks)]
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = itertools.count()
        self._num_inside = self._num_tokens = 0
        self._waiting_since: float | None = None
        self._outcome = Outcome()

    def run(self) -> Outcome:
        for at, rank in self._load.arrivals():
            self._at(at, "request", rank)
        while self._events:
            now, _, kind, number, step = heapq.heappop(self._events)
            if kind == "request":
                self._request(number, now)
            elif kind == "start":
                told = self._coordinator.start_step(step)
                for rank in range(len(self._ranks)) if told is not None else ():
                    self._send("notice", rank, self._coordinator.step, now)
            elif kind == "notice":
                self._ranks[number].participant.heard(step)
                self._enter(number, now)
            else:
                self._end_step(now)
        return self._outcome

    def _request(self, number: int, now: float) -> None:
        rank = self._ranks[number]
        if self._waiting_since is None and not any(each.left or each.is_inside for each in self._ranks):
            self._waiting_since = now
        rank.left.append(self._load.num_steps)
        self._enter(number, now)

    def _enter(self, number: int, now: float) -> None:
        """A rank that is not in a step begins its next round."""
        rank = self._ranks[number]
        if rank.is_inside:
            return
        kind, start = rank.participant.begin_round(has_batch=bool(rank.left))
        if start is not None:
            self._send("start", 0, start.step, now)
        if kind is Round.NO_STEP:
            return
        rank.is_inside = True
        self._num_tokens += rank.compute() if kind is Round.REAL else 0
        self._num_inside += 1
        if self._num_inside == len(self._ranks):
            self._at(now + self._load.step_s, "end", 0)

    def _end_step(self, now: float) -> None:
        outcome = self._outcome
        outcome.num_steps += 1
        outcome.num_superfluous += self._num_tokens == 0
        outcome.num_tokens += self._num_tokens
        outcome.last_token_s = now if self._num_tokens else outcome.last_token_s
        if self._waiting_since is not None and self._num_tokens:
            outcome.first_steps_s.append(now - self._waiting_since)
            self._waiting_since = None
        self._num_inside = self._num_tokens = 0
        for rank in self._ranks:
            rank.is_inside = False
        for number in range(len(self._ranks)):
            self._enter(number, now)

    def _send(self, kind: str, number: int, step: int, now: float) -> None:
        self._outcome.num_messages += 1
        self._at(now + self._load.delay_s * self._draw.uniform(0.5, 1.5), kind, number, step)

    def _at(self, at: float, kind: str, number: int, step: int = 0) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, number, step))


def run_waves(load: Load, interval: int) -> Outcome:
    """The wave design: a liveness all-gather every ``interval`` steps, which all ranks wait for."""
    outcome, now = Outcome(), 0.0
    arrivals, at = load.arrivals(), 0
    ranks = [_Rank() for _ in range(load.num_ranks)]
    gather_s = load.delay_s * max(1, math.ceil(math.log2(load.num_ranks)))
    while at < len(arrivals):
        # The frontend wakes every rank, by way of the coordinator.
        begun = arrivals[at][0]
        now = max(now, begun) + 2 * load.delay_s
        outcome.num_messages += 1 + load.num_ranks
        is_first, is_alive = True, True
        while is_alive:
            for _ in range(interval):
                while at < len(arrivals) and arrivals[at][0] <= now:
                    ranks[arrivals[at][1]].left.append(load.num_steps)
                    at += 1
                now += load.step_s
                tokens = sum(rank.compute() for rank in ranks)
                outcome.num_steps += 1
                outcome.num_superfluous += tokens == 0
                outcome.num_tokens += tokens
                outcome.last_token_s = now if tokens else outcome.last_token_s
                if is_first:
                    outcome.first_steps_s.append(now - begun)
                    is_first = False
            now += gather_s
            outcome.num_messages += load.num_ranks * max(1, math.ceil(math.log2(load.num_ranks)))
            is_alive = any(rank.left for rank in ranks)
    return outcome
