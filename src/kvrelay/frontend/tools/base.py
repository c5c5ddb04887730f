"""What parsers of a model's text give: pieces of content, of reasoning and of function calls."""

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
    """What a piece of text turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


class OutputParser(Protocol):
    """Reads one answer. However its text is cut, the deltas add up to the same."""

    def push(self, text: str) -> Delta:
        """More text; returns what is certain now."""

    def flush(self) -> Delta:
        """The answer has ended, maybe in the middle of a call."""


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
