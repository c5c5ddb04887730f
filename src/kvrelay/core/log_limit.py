"""Keeps the log readable and small, whatever peers and clients send: a bound on lines per place, and on each line.

Anybody who can send a malformed message can have a line logged, again and again, with words of his own in it. So the
bound belongs where lines are written, not where they are made: a filter on the handler sees every logger, those of
libraries included.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from kvrelay.core.clock import Clock

WINDOW_S = 60.0
MAX_LINES = 20
MAX_CHARS = 2000


@dataclass(slots=True)
class _Window:
    """What one place has logged since ``began_s``."""

    began_s: float
    num_lines: int = 0
    num_dropped: int = 0


class LogLimit(logging.Filter):
    """Lets every place in the source log ``max_lines`` a minute. Debug lines are asked for by name, and not counted.

    A line that is let through has an attribute ``dropped``: what to say behind it of those that were not, or nothing.
    """

    def __init__(self, clock: Clock, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._clock = clock
        self._max_lines = max_lines
        self._windows: dict[tuple[str, int], _Window] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line may be written. Called by the handler, on any thread."""
        num_dropped: int | None = 0
        if record.levelno > logging.DEBUG:
            with self._lock:
                num_dropped = self._count((record.pathname, record.lineno))
        vars(record)["dropped"] = f" ({num_dropped} more were dropped)" if num_dropped else ""
        return num_dropped is not None

    def _count(self, place: tuple[str, int]) -> int | None:
        """None: this line is too much; else how many were dropped before it and not mentioned yet."""
        now_s, num_dropped = self._clock.now(), 0
        window = self._windows.get(place)
        if window is None or now_s - window.began_s >= WINDOW_S:
            num_dropped = 0 if window is None else window.num_dropped
            window = self._windows[place] = _Window(now_s)
        if window.num_lines == self._max_lines:
            window.num_dropped += 1
            return None
        window.num_lines += 1
        return num_dropped


class LineFormatter(logging.Formatter):
    """Writes a message as one line of at most ``MAX_CHARS`` characters, whatever is in it; behind a LogLimit only."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(dropped)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base's name
        record.message = _one_line(record.message)
        return super().formatMessage(record)


def _one_line(text: str) -> str:
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
