"""Finds stop strings in text that arrives in pieces. Pure.

Text that may begin a stop string is held back until that is clear, so that no part of a stop string, and nothing after
one, is ever sent. The cuts between pieces do not matter: the stop string that is complete first wins, and the longest
of those that are complete at the same character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string that ended the text, and the text that may still be sent."""

    stop: str
    text: str


class StopStrings:
    """Matches several stop strings (none of them empty) over a stream of text."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    @property
    def held(self) -> str:
        """Text that is waiting for its continuation."""
        return self._held

    def push(self, text: str) -> str | StopMatch:
        """Add text. Returns the text that can be sent now, or the match that ends the sequence."""
        text = self._held + text
        found = self._find(text)
        if found is not None:
            end, start, stop = found
            self._held = ""
            return StopMatch(stop, text[: end if self._include else start])
        keep = self._num_undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end of the text: the held text is not a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best

    def _num_undecided(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
