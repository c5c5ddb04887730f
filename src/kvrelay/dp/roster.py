"""The ranks of a group: gathered at start, watched to the end. Pure: events in, one message to all out.

    GATHERING ──all registered, all agree──> FORMED ──all have said Leave──> OVER
        └──────they differ, one is lost, timeout──────> OVER <──one is lost──┘

A part is a connection to the coordinator. It has no rank before it registers.
"""

from __future__ import annotations

import enum

from kvrelay.dp.messages import AllLeft, AllReady, Ended, Formed, GroupRefused, RankInfo
from kvrelay.errors import IllegalTransitionError

Part = int
"""A connection's number."""


class RosterState(enum.Enum):
    GATHERING = enum.auto()
    FORMED = enum.auto()
    OVER = enum.auto()


_MOVES = {
    RosterState.GATHERING: (RosterState.FORMED, RosterState.OVER),
    RosterState.FORMED: (RosterState.OVER,),
    RosterState.OVER: (),
}


class Roster:
    """Each method returns the message for all registered parts, or None."""

    def __init__(self, size: int, group_id: str) -> None:
        self._size = size
        self._group_id = group_id
        self.parts: dict[Part, RankInfo] = {}
        self._ready: set[Part] = set()
        self._left: set[Part] = set()
        self.state = RosterState.GATHERING
        self.closed = ""
        """Why no further rank can register."""

    def __repr__(self) -> str:
        return f"Roster({self.state.name}, {len(self.parts)} of {self._size} ranks, {len(self._left)} left)"

    @property
    def is_gathering(self) -> bool:
        return self.state is RosterState.GATHERING

    @property
    def is_formed(self) -> bool:
        """Whether all ranks are there, and none has been lost: from then on a silent rank hangs."""
        return self.state is RosterState.FORMED

    @property
    def is_running(self) -> bool:
        """Whether all of them are loaded, too."""
        return self.is_formed and len(self._ready) == self._size

    def has(self, part: Part) -> bool:
        return part in self.parts

    def registered(self, part: Part, info: RankInfo) -> Formed | GroupRefused | None:
        """The group is formed or refused only after all have registered, so that every rank gets the reason."""
        self.parts[part] = info
        if len(self.parts) < self._size:
            return None
        reason = _difference(self._size, list(self.parts.values()))
        if reason:
            self._move(RosterState.OVER, reason)
            return GroupRefused(reason)
        self._move(RosterState.FORMED, "the data-parallel group is complete already")
        return Formed(self._group_id)

    def ready(self, part: Part) -> AllReady | None:
        self._ready.add(part)
        return AllReady() if len(self._ready) == self._size else None

    def left(self, part: Part) -> AllLeft | None:
        self._left.add(part)
        if self.state is not RosterState.FORMED or len(self._left) < self._size:
            return None
        self._move(RosterState.OVER, "the data-parallel group has ended")
        return AllLeft()

    def lost(self, part: Part, how: str) -> Ended | None:
        """Its connection has ended."""
        info = self.parts.get(part)
        if info is None or self.state is RosterState.OVER:
            return None
        reason = f"rank {info.rank} of the data-parallel group ({info.place}) {how}"
        self._move(RosterState.OVER, reason)
        return Ended(reason)

    def overdue(self, waited_s: float) -> GroupRefused:
        """The ranks have not gathered in time."""
        known = {info.rank for info in self.parts.values()}
        missing = ", ".join(str(rank) for rank in range(self._size) if rank not in known)
        reason = f"rank {missing} of the data-parallel group did not register within {waited_s:g} s"
        self._move(RosterState.OVER, reason)
        return GroupRefused(reason)

    def not_loaded(self, waited_s: float) -> Ended:
        """The group was formed so long ago, and not all ranks are loaded."""
        missing = sorted((info.rank, info.place) for part, info in self.parts.items() if part not in self._ready)
        ranks = ", ".join(f"{rank} ({place})" for rank, place in missing)
        reason = f"rank {ranks} of the data-parallel group did not load within {waited_s:g} s"
        self._move(RosterState.OVER, reason)
        return Ended(reason)

    def _move(self, state: RosterState, closed: str) -> None:
        if state not in _MOVES[self.state]:
            raise IllegalTransitionError(f"a group's roster cannot go from {self.state.name} to {state.name}")
        self.state, self.closed = state, closed


def _difference(size: int, infos: list[RankInfo]) -> str:
    """Why these ranks cannot be a group; empty if they can."""
    first, *others = sorted(infos, key=lambda info: info.rank)
    for info in infos:
        if info.size != size:
            return f"rank {info.rank} ({info.place}) has --dp {info.size}, rank 0 has --dp {size}"
    if [info.rank for info in sorted(infos, key=lambda info: info.rank)] != list(range(size)):
        twice = ", ".join(f"{info.rank} ({info.place})" for info in infos)
        return f"the ranks of a data-parallel group of {size} must be 0 to {size - 1}, each once; there are {twice}"
    for info in others:
        for name in sorted({*first.facts, *info.facts}):
            ours, theirs = first.facts.get(name), info.facts.get(name)
            if ours != theirs:
                return (
                    f"the ranks of a data-parallel group must agree: {name} is {theirs} on rank {info.rank} "
                    f"({info.place}) and {ours} on rank 0 ({first.place})"
                )
    return ""
