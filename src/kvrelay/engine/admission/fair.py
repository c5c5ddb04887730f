"""The order of waiting requests: API keys in turn, then priorities, short before long, and no request waits for ever.

    FairQueue ── one _Key per API key ── one _Class per priority ── requests by size, and by arrival
                      │                          │                        │
             the key that has been       a class gains a rank for    begun ones first, then the shortest; the oldest
             served least comes          each ageing time that its   after shorter ones have overtaken it by OVERTAKE
             first (Shares)              oldest request has waited   times its own size

Size is the number of tokens to compute: shortest remaining time first (Schrage 1968). The key that has been served the
fewest tokens comes first, whatever priorities the others ask for. A key that becomes busy starts at the least served
busy one: start-time fair queueing (Goyal 1996). Like deficit round robin it lets two busy keys differ by one request at
most, and it needs no quantum.

No request waits for ever: its key gets its share; its class gains a rank with each ageing time; and before its class
admits it, each older request of the class and itself can be overtaken by OVERTAKE times its own size. This module only
orders. It does not know blocks, budgets or steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import nsmallest
from itertools import chain, islice
from typing import NamedTuple

import msgspec

from kvrelay.engine.request import Request

OVERTAKE = 4
"""Shorter requests may overtake the oldest one by this many times its own size."""


class Candidate(NamedTuple):
    """A waiting request. ``rank``: its priority, lower first, less what ageing has gained. ``is_due``: it was overtaken
    or has aged enough, and comes before shorter ones. ``turn``: its position within its key and what the key has been
    served; equal for all while only one key waits."""

    request: Request
    rank: int
    is_due: bool
    turn: tuple[int, int] = (0, 0)

    @property
    def urgency(self) -> tuple[tuple[int, int], int, bool, int]:
        """The key by which candidates of several queues are merged: turn, rank, whether due, then the older first."""
        return (self.turn, self.rank, not self.is_due, self.request.arrival)


class Shares:
    """The tokens that each API key has been served, as virtual times. All queues of one engine share them.

    Service is counted only while requests wait: without competition there is nothing to share.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_waiting: dict[str, int] = {}

    @property
    def waiting(self) -> list[str]:
        """The API keys whose requests wait, the least served first; without keys none."""
        return sorted(filter(None, self._num_waiting), key=self.served)

    @property
    def is_contended(self) -> bool:
        """Whether requests of several keys wait."""
        return len(self._num_waiting) > 1

    def served(self, tenant: str) -> int:
        """Only comparable between keys that wait."""
        return self._served[tenant]

    def may_exceed(self, tenant: str, bound: int) -> bool:
        """Whether this key may send another request although ``bound`` requests wait: others fill the queue, and the
        key has less than an equal share of it. So at most twice the bound wait. From any thread."""
        num_own, num_keys = self._num_waiting.get(tenant, 0), len(self._num_waiting)
        num_keys += not num_own
        return tenant != "" and num_keys > 1 and (num_own + 1) * num_keys <= bound

    def is_newcomer(self, tenant: str) -> bool:
        """Whether other keys wait and this one does not. From any thread."""
        return tenant != "" and len(self._num_waiting) > 0 and tenant not in self._num_waiting

    def enter(self, tenant: str) -> None:
        """A request of this key begins to wait."""
        if tenant not in self._num_waiting:
            least = min((self._served[other] for other in self._num_waiting), default=0)
            self._served[tenant] = max(self._served.get(tenant, least), least)
            self._num_waiting[tenant] = 0
        self._num_waiting[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of this key no longer waits."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
        if not self._num_waiting:
            self._served.clear()

    def charge(self, tenant: str, num_tokens: int) -> None:
        """This key has been served tokens: of a prompt that was admitted, or of an answer that has ended."""
        if self._num_waiting:
            self._served[tenant] = self._served.get(tenant, 0) + num_tokens


class _Line(msgspec.Struct):
    """Requests by size and by arrival."""

    overtaken: int = 0
    """Tokens that were admitted from this line before its oldest request since that became the oldest."""
    by_size: list[tuple[int, int, Request]] = []
    by_arrival: list[tuple[int, Request]] = []

    @property
    def oldest(self) -> Request:
        return self.by_arrival[0][1]

    def add(self, request: Request) -> None:
        insort(self.by_size, (request.num_queued_tokens, request.arrival, request))
        insort(self.by_arrival, (request.arrival, request))

    def remove(self, request: Request, *, is_admitted: bool) -> None:
        if self.oldest is request:
            self.overtaken = 0
        elif is_admitted:
            self.overtaken += request.num_queued_tokens
        del self.by_size[bisect_left(self.by_size, (request.num_queued_tokens, request.arrival))]
        del self.by_arrival[bisect_left(self.by_arrival, (request.arrival,))]

    def in_order(self) -> Iterator[tuple[Request, bool]]:
        """Its requests, and whether each is due before shorter ones."""
        if not self.by_size:
            return
        due = self.oldest if self.overtaken >= OVERTAKE * self.oldest.num_queued_tokens else None
        if due is not None:
            yield due, True
        for _, _, request in self.by_size:
            if request is not due:
                yield request, False


class _Class:
    """The waiting requests of one key and one priority."""

    def __init__(self) -> None:
        self._begun, self._new = _Line(), _Line()

    def __bool__(self) -> bool:
        return bool(self._begun.by_size or self._new.by_size)

    @property
    def oldest(self) -> Request:
        lines = [line for line in (self._begun, self._new) if line.by_size]
        return min((line.oldest for line in lines), key=lambda request: request.waiting_since_s)

    def line_of(self, request: Request) -> _Line:
        return self._begun if request.is_begun else self._new

    def in_order(self, limit: int) -> Iterator[tuple[Request, bool]]:
        """The first ``limit`` requests: begun ones in order of arrival, then the new ones."""
        begun = ((request, False) for _, request in self._begun.by_arrival)
        return islice(chain(begun, self._new.in_order()), limit)


class _Key:
    """The waiting requests of one API key."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def __bool__(self) -> bool:
        return bool(self._classes)

    def add(self, request: Request) -> None:
        self._classes.setdefault(request.priority, _Class()).line_of(request).add(request)

    def remove(self, request: Request, *, is_admitted: bool) -> None:
        found = self._classes[request.priority]
        found.line_of(request).remove(request, is_admitted=is_admitted)
        if not found:
            del self._classes[request.priority]

    def candidates(self, now_s: float, ageing_s: float, limit: int) -> list[Candidate]:
        """Its first ``limit`` requests in order of service."""
        if len(self._classes) == 1:
            # Nothing to age past.
            ((priority, only),) = self._classes.items()
            return [Candidate(request, priority, is_due) for request, is_due in only.in_order(limit)]
        carried: list[Candidate] = []
        found: list[Candidate] = []
        ranks = {priority: _rank(priority, entry, now_s, ageing_s) for priority, entry in self._classes.items()}
        for priority in sorted(ranks, key=lambda priority: (ranks[priority], priority)):
            entry, rank = self._classes[priority], ranks[priority]
            aged = entry.oldest if rank < priority else None
            if aged is not None:
                carried.append(Candidate(aged, rank, True))
            # Ageing moves only the oldest request past other classes; the requests after it keep their priority.
            found += [
                Candidate(request, priority, is_due) for request, is_due in entry.in_order(limit) if request is not aged
            ]
        return sorted(carried + found, key=lambda candidate: candidate.rank)[:limit]


def _rank(priority: int, entry: _Class, now_s: float, ageing_s: float) -> int:
    if ageing_s <= 0.0:
        return priority
    waited_s = max(now_s - entry.oldest.waiting_since_s, 0.0)
    return priority - int(min(waited_s / ageing_s, 1e9))


class FairQueue:
    """Waiting requests. ``ageing_s``: seconds of waiting that count as much as one priority."""

    def __init__(self, ageing_s: float, shares: Shares) -> None:
        self._ageing_s = ageing_s
        self._shares = shares
        self._keys: dict[str, _Key] = {}
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
        self._shares.enter(request.tenant)
        self._keys.setdefault(request.tenant, _Key()).add(request)

    def remove(self, request: Request, *, is_admitted: bool = False) -> None:
        """Remove ``request`` from any position. Raises KeyError if it does not wait."""
        del self._members[request]
        key = self._keys[request.tenant]
        key.remove(request, is_admitted=is_admitted)
        if not key:
            del self._keys[request.tenant]
        self._shares.leave(request.tenant)
        if is_admitted:
            self._shares.charge(request.tenant, request.num_queued_tokens)

    def candidates(self, now_s: float, limit: int, tenant: str | None = None) -> list[Candidate]:
        """The first ``limit`` requests in order of service: those of all keys in turn, the least served key first; or
        those of ``tenant`` alone."""
        if tenant is not None or not self._shares.is_contended:
            keys = [key for name, key in self._keys.items() if tenant in (None, name)]
            return [found for key in keys for found in key.candidates(now_s, self._ageing_s, limit)]
        served = self._shares.served
        found: list[Candidate] = []
        first = nsmallest(limit, self._keys, key=served)
        # Twice each key's part, for keys that have less.
        most = min(-(-2 * limit // max(len(first), 1)), limit)
        for name in first:
            own = self._keys[name].candidates(now_s, self._ageing_s, most)
            found += [entry._replace(turn=(position, served(name))) for position, entry in enumerate(own)]
        return sorted(found, key=lambda candidate: candidate.turn)[:limit]
