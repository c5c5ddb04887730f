"""The order of waiting requests: short before long, API keys in turn, and no request waits for ever.

    FairQueue ── one _Class per priority ── one _Lane per API key ── requests by size, and by arrival
                        │                          │                        │
             a class gains a rank for     the key that has been     the shortest first; the oldest after
             each ageing time that its    served least comes        shorter ones have overtaken it by
             oldest request has waited    first                     OVERTAKE times its own size

Size is the number of tokens to compute: shortest remaining time first (Schrage 1968). The lane that has been served the
fewest tokens comes first, and a lane that becomes busy starts at the least served one: start-time fair queueing (Goyal
1996). Like deficit round robin it lets two busy lanes differ by one request at most, and it needs no quantum.

No request waits for ever: before its lane admits it, each older request of the lane and itself can be overtaken by
OVERTAKE times its own size; its lane gets its share; and its class gains a rank with each ageing time. This module only
orders. It does not know blocks, budgets or steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvrelay.engine.request import Request

OVERTAKE = 4
"""Shorter requests may overtake the oldest one by this many times its own size."""


class Candidate(NamedTuple):
    """A waiting request. ``rank``: its priority, lower first, less what ageing has gained. ``is_due``: it was overtaken
    or has aged enough, and comes before shorter ones."""

    request: Request
    rank: int
    is_due: bool

    @property
    def urgency(self) -> tuple[int, bool, int]:
        """The key by which candidates of several queues are merged: rank, whether due, then the older first."""
        return (self.rank, not self.is_due, self.request.arrival)


@dataclass(slots=True)
class _Lane:
    """The waiting requests of one API key and one priority."""

    served: int = 0
    """Tokens admitted, as a virtual time; only comparable between busy lanes."""
    overtaken: int = 0
    """Tokens that were admitted from this lane before its oldest request since that became the oldest."""
    by_size: list[tuple[int, int, Request]] = field(default_factory=list)
    by_arrival: list[tuple[int, Request]] = field(default_factory=list)

    @property
    def oldest(self) -> Request:
        return self.by_arrival[0][1]

    @property
    def is_oldest_due(self) -> bool:
        return self.overtaken >= OVERTAKE * self.oldest.num_queued_tokens

    def add(self, request: Request) -> None:
        insort(self.by_size, (request.num_queued_tokens, request.arrival, request))
        insort(self.by_arrival, (request.arrival, request))

    def remove(self, request: Request) -> None:
        if self.oldest is request:
            self.overtaken = 0
        del self.by_size[bisect_left(self.by_size, (request.num_queued_tokens, request.arrival))]
        del self.by_arrival[bisect_left(self.by_arrival, (request.arrival,))]

    def in_order(self) -> Iterator[tuple[Request, bool]]:
        """Its requests, and whether each is due before shorter ones."""
        due = self.oldest if self.is_oldest_due else None
        if due is not None:
            yield due, True
        for _, _, request in self.by_size:
            if request is not due:
                yield request, False


class _Class:
    """The waiting requests of one priority."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self._begun = _Lane()
        self._lanes: dict[str, _Lane] = {}

    def __bool__(self) -> bool:
        return bool(self._begun.by_size) or bool(self._lanes)

    @property
    def oldest(self) -> Request:
        lanes = [lane for lane in (self._begun, *self._lanes.values()) if lane.by_size]
        return min((lane.oldest for lane in lanes), key=lambda request: request.waiting_since_s)

    def add(self, request: Request) -> None:
        if request.is_begun:
            self._begun.add(request)
            return
        lane = self._lanes.get(request.tenant)
        if lane is None:
            least = min((other.served for other in self._lanes.values()), default=0)
            lane = self._lanes[request.tenant] = _Lane(served=least)
        lane.add(request)

    def remove(self, request: Request, *, is_admitted: bool) -> None:
        if request.is_begun:
            self._begun.remove(request)
            return
        lane = self._lanes[request.tenant]
        is_oldest = lane.oldest is request
        lane.remove(request)
        if is_admitted:
            lane.served += request.num_queued_tokens
            lane.overtaken += 0 if is_oldest else request.num_queued_tokens
        if not lane.by_size:
            del self._lanes[request.tenant]

    def in_order(self, limit: int) -> list[tuple[Request, bool]]:
        """The first ``limit`` requests: begun ones, then those of all lanes in turn, the least served lane first."""
        if len(self._lanes) == 1 and not self._begun.by_arrival:
            (only,) = self._lanes.values()
            return list(islice(only.in_order(), limit))
        found = [(request, False) for _, request in self._begun.by_arrival[:limit]]
        lanes = [lane.in_order() for lane in sorted(self._lanes.values(), key=lambda lane: lane.served)]
        while lanes and len(found) < limit:
            for lane in list(lanes):
                entry = next(lane, None)
                if entry is None:
                    lanes.remove(lane)
                else:
                    found.append(entry)
        return found[:limit]


class FairQueue:
    """Waiting requests. ``ageing_s``: seconds of waiting that count as much as one priority."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._classes: dict[int, _Class] = {}
        self._members: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def members(self) -> list[Request]:
        """All waiting requests, in the order in which they were pushed."""
        return list(self._members)

    def push(self, request: Request) -> None:
        """Add a request. Its size, key and priority must not change until it is removed."""
        self._members[request] = None
        found = self._classes.get(request.priority)
        if found is None:
            found = self._classes[request.priority] = _Class(request.priority)
        found.add(request)

    def remove(self, request: Request, *, is_admitted: bool = False) -> None:
        """Remove ``request`` from any position. Raises KeyError if it does not wait."""
        del self._members[request]
        found = self._classes[request.priority]
        found.remove(request, is_admitted=is_admitted)
        if not found:
            del self._classes[request.priority]

    def candidates(self, now_s: float, limit: int) -> list[Candidate]:
        """The first ``limit`` requests in order of service."""
        if len(self._classes) == 1:
            # Nothing to age past.
            ((priority, only),) = self._classes.items()
            return [Candidate(request, priority, is_due) for request, is_due in only.in_order(limit)]
        carried: list[Candidate] = []
        found: list[Candidate] = []
        for rank, priority in sorted((self._rank(entry, now_s), entry.priority) for entry in self._classes.values()):
            entry = self._classes[priority]
            aged = entry.oldest if rank < priority else None
            if aged is not None:
                carried.append(Candidate(aged, rank, True))
            # Ageing moves only the oldest request past other classes; the requests after it keep their priority.
            found += [
                Candidate(request, priority, is_due) for request, is_due in entry.in_order(limit) if request is not aged
            ]
        return sorted(carried + found, key=lambda candidate: candidate.rank)[:limit]

    def _rank(self, entry: _Class, now_s: float) -> int:
        if self._ageing_s <= 0.0:
            return entry.priority
        waited_s = max(now_s - entry.oldest.waiting_since_s, 0.0)
        return entry.priority - int(min(waited_s / self._ageing_s, 1e9))
