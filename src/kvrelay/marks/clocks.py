"""How far another process's monotonic clock is from ours, by the messages between the two.

A message is sent before it is heard. So each message of ours gives a lower bound of what must be added to the other's
times, and each of its messages an upper one:

    ours    sent 10 ─────────╮          ╭───> heard 30           lower = 10 - 105 = -95
    other               heard 105   sent 120                     upper = 30 - 120 = -90      offset -92.5, +- 2.5

If 0 lies between the bounds it is taken: the two share a clock then, as all processes of a machine do, or nearly so,
since two machines' clocks differ by the time between their starts. Bounds that cross contradict each other: a clock has
jumped, and the offset is a guess. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvrelay.marks.phases import Phase
from kvrelay.marks.recorder import Mark


class Offset(NamedTuple):
    """Add ``seconds`` to the other's times. ``uncertainty_s`` None: messages in one direction only are known."""

    seconds: float
    uncertainty_s: float | None


SAME = Offset(0.0, 0.0)

Message = tuple[Phase, Phase]
"""The phase of sending it, and that of hearing it."""


def offset_of(ours: list[Mark], other: list[Mark], sent: Iterable[Message], heard: Iterable[Message]) -> Offset | None:
    """By the messages that we ``sent`` and those that we ``heard``; None if no message is known. A phase that was
    reached several times pairs in order."""
    lower = [at - there for at, there in _pairs(ours, other, sent)]
    upper = [at - there for there, at in _pairs(other, ours, heard)]
    if lower and upper:
        low, high = max(lower), min(upper)
        if low <= 0 <= high:
            return Offset(0.0, max(-low, high))
        return Offset((low + high) / 2, abs(high - low) / 2)
    if lower or upper:
        return Offset(max(lower) if lower else min(upper), None)
    return None


def _pairs(first: list[Mark], second: list[Mark], messages: Iterable[Message]) -> list[tuple[float, float]]:
    return [pair for a, b in messages for pair in zip(times(first, a), times(second, b))]


def times(marks: Iterable[Mark], phase: Phase) -> list[float]:
    """When the phase was reached, in order."""
    return [mark.at_s for mark in marks if mark.phase is phase]
