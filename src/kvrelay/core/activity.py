"""What a worker has done since its start, for people who watch. Load samples carry it; nothing decides by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from kvrelay.core.histogram import LATENCY_BUCKETS_S

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Label = Annotated[str, msgspec.Meta(max_length=64)]
Counts = Annotated[dict[Label, Number], msgspec.Meta(max_length=32)]
N = TypeVar("N", int, float)


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """So many, and how long all of them took together."""

    num: Number = 0
    seconds: Seconds = 0.0

    @property
    def mean_s(self) -> float | None:
        return self.seconds / self.num if self.num else None

    def plus(self, other: Spent) -> Spent:
        return Spent(self.num + other.num, self.seconds + other.seconds)

    def since(self, before: Spent) -> Spent:
        return Spent(_less(self.num, before.num), _less(self.seconds, before.seconds))


class SessionActivity(msgspec.Struct, frozen=True, array_like=True):
    """Agents' sessions: counts since the start, but for ``num_paused``, which is a level.

    ``num_incomplete``: returns of which the pool had lost a part. ``tokens``: what returning sessions repeated, by
    place. ``saved_s``: what computing the found ones would have taken.
    """

    num_paused: Number = 0
    num_returned: Number = 0
    num_incomplete: Number = 0
    tokens: Counts = {}
    saved_s: Seconds = 0.0

    def plus(self, other: SessionActivity) -> SessionActivity:
        return SessionActivity(
            self.num_paused + other.num_paused,
            self.num_returned + other.num_returned,
            self.num_incomplete + other.num_incomplete,
            _added(self.tokens, other.tokens),
            self.saved_s + other.saved_s,
        )

    def since(self, before: SessionActivity) -> SessionActivity:
        return SessionActivity(
            self.num_paused,
            _less(self.num_returned, before.num_returned),
            _less(self.num_incomplete, before.num_incomplete),
            _gone_up(self.tokens, before.tokens),
            _less(self.saved_s, before.saved_s),
        )


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """Counts since the start, but for ``rss_bytes`` and the sessions that are paused, which are levels.

    ``places``: prefills by where they ran and why (``PrefillPlace``). ``loaded``: prompt tokens whose KV came from
    beyond the pool, by medium. Hand-offs: ``claims`` from sending a prefill away to its grant, ``handoffs`` to its KV,
    both at the decode worker; ``sends`` at the prefill worker, from the end of the prefill until its KV has left.
    ``prefills``: of prefills computed here, counts per bucket of LATENCY_BUCKETS_S. ``cpu_s`` and ``rss_bytes``: of
    the worker's process and of those that it has started; memory that several of them map counts in each.
    """

    places: Counts = {}
    loaded: Counts = {}
    claims: Spent = Spent()
    handoffs: Spent = Spent()
    sends: Spent = Spent()
    prefills: Annotated[tuple[Number, ...], msgspec.Meta(max_length=len(LATENCY_BUCKETS_S) + 1)] = ()
    cpu_s: Seconds = 0.0
    rss_bytes: Number = 0
    sessions: SessionActivity = SessionActivity()

    def plus(self, other: Activity) -> Activity:
        """Of two workers together."""
        return Activity(
            _added(self.places, other.places),
            _added(self.loaded, other.loaded),
            self.claims.plus(other.claims),
            self.handoffs.plus(other.handoffs),
            self.sends.plus(other.sends),
            (),
            self.cpu_s + other.cpu_s,
            self.rss_bytes + other.rss_bytes,
            self.sessions.plus(other.sessions),
        )

    def then(self, later: Activity) -> Activity:
        """Of two intervals together; the level is the larger one."""
        both, num_paused = self.plus(later), max(self.sessions.num_paused, later.sessions.num_paused)
        return msgspec.structs.replace(
            both,
            rss_bytes=max(self.rss_bytes, later.rss_bytes),
            sessions=msgspec.structs.replace(both.sessions, num_paused=num_paused),
        )

    def since(self, before: Activity) -> Activity:
        """What was done after ``before``. An engine that was rebuilt counts from zero again: nothing."""
        return Activity(
            _gone_up(self.places, before.places),
            _gone_up(self.loaded, before.loaded),
            self.claims.since(before.claims),
            self.handoffs.since(before.handoffs),
            self.sends.since(before.sends),
            tuple(map(_less, self.prefills, before.prefills or (0,) * len(self.prefills))),
            _less(self.cpu_s, before.cpu_s),
            self.rss_bytes,
            self.sessions.since(before.sessions),
        )


def _less(after: N, before: N) -> N:
    return after - before if after > before else after - after


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}


def _gone_up(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Only those that have grown."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
