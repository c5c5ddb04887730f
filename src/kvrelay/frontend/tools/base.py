"""The results of parsing a model's text: pieces of content, of reasoning and of function calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of call ``index``. The first delta of a call has its name; ``arguments`` is the next piece of JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The parsed parts of a piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


MAX_SPACE = 256
"""White space that waits until it is clear whether a marker follows. More of it is content like any text."""


class OutputParser(Protocol):
    """Parses one answer. The deltas add up to the same result, independent of how the text is cut."""

    def push(self, text: str) -> Delta:
        """Add text; returns the parts that are certain now."""

    def flush(self) -> Delta:
        """End the answer, maybe in the middle of a call."""


def held_back(text: str, marker: str) -> int:
    """The number of characters at the end of ``text`` that may be the beginning of ``marker``."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
