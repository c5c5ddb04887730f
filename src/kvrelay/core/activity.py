"""What a worker has done since its start, for people who watch. Load samples carry it; nothing decides by it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

import msgspec

from kvrelay.core.histogram import LATENCY_BUCKETS_S

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Label = Annotated[str, msgspec.Meta(max_length=64)]
Counts = Annotated[dict[Label, Number], msgspec.Meta(max_length=32)]


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """What has been counted since a start. ``LEVELS``: the fields that tell how much there is now instead."""

    LEVELS: ClassVar[tuple[str, ...]] = ()

    def plus(self, other: Self) -> Self:
        """Of both together."""
        return type(self)(*map(_added, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    def since(self, before: Self) -> Self:
        """What was counted after ``before``. What was rebuilt counts from zero again: nothing."""
        now, then = msgspec.structs.asdict(self), msgspec.structs.asdict(before)
        grown = {name: _grown(now[name], then[name]) for name in now if name not in self.LEVELS}
        return type(self)(**(now | grown))


class Spent(Tally, frozen=True, array_like=True):
    """So many, and how long all of them took together."""

    num: Number = 0
    seconds: Seconds = 0.0

    @property
    def mean_s(self) -> float | None:
        return self.seconds / self.num if self.num else None


class SessionActivity(Tally, frozen=True, array_like=True):
    """Agents' sessions.

    ``num_incomplete``: returns of which the pool had lost a part. ``tokens``: what returning sessions repeated, by
    place. ``saved_s``: what computing the found ones would have taken.
    """

    LEVELS: ClassVar[tuple[str, ...]] = ("num_paused",)

    num_paused: Number = 0
    num_returned: Number = 0
    num_incomplete: Number = 0
    tokens: Counts = {}
    saved_s: Seconds = 0.0


class Activity(Tally, frozen=True, array_like=True):
    """``places``: prefills by where they ran and why (``PrefillPlace``). ``loaded``: prompt tokens whose KV came from
    beyond the pool, by medium. Hand-offs: ``claims`` from sending a prefill away to its grant, ``handoffs`` to its KV,
    both at the decode worker; ``sends`` at the prefill worker, from the end of the prefill until its KV has left.
    ``prefills``: of prefills computed here, counts per bucket of LATENCY_BUCKETS_S; none for several workers together.
    ``cpu_s`` and ``rss_bytes``: of the worker's process and of those that it has started; memory that several of them
    map counts in each.
    """

    LEVELS: ClassVar[tuple[str, ...]] = ("rss_bytes",)

    places: Counts = {}
    loaded: Counts = {}
    claims: Spent = Spent()
    handoffs: Spent = Spent()
    sends: Spent = Spent()
    prefills: Annotated[tuple[Number, ...], msgspec.Meta(max_length=len(LATENCY_BUCKETS_S) + 1)] = ()
    cpu_s: Seconds = 0.0
    rss_bytes: Number = 0
    sessions: SessionActivity = SessionActivity()

    def then(self, later: Activity) -> Activity:
        """Of two intervals together; the level is the larger one."""
        both, num_paused = self.plus(later), max(self.sessions.num_paused, later.sessions.num_paused)
        return msgspec.structs.replace(
            both,
            rss_bytes=max(self.rss_bytes, later.rss_bytes),
            sessions=msgspec.structs.replace(both.sessions, num_paused=num_paused),
        )


def _added(one: Any, other: Any) -> Any:
    match one:
        case Tally():
            return one.plus(other)
        case dict():
            return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}
        case tuple():
            return ()
    return one + other


def _grown(after: Any, before: Any) -> Any:
    """How much more; of counts by name, only those that have grown."""
    match after:
        case Tally():
            return after.since(before)
        case dict():
            return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
        case tuple():
            return tuple(map(_grown, after, before or (0,) * len(after)))
    return max(after - before, type(after)())
