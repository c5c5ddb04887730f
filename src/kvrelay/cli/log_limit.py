"""Keeps the log readable and small: a bound on lines per place in the source, and on the length of each line.

A peer or client that sends malformed messages can have a line with its own words logged again and again. So the bound
is applied to all lines when they are written: a filter on the handler sees every logger, those of libraries included.
"""

from __future__ import annotations

import logging
import threading

import msgspec

from kvrelay.core.clock import Clock

WINDOW_S = 60.0
MAX_LINES = 20
MAX_CHARS = 2000


class _Window(msgspec.Struct):
    """Lines of one place in the source since ``began_s``."""

    began_s: float
    num_lines: int = 0
    num_dropped: int = 0


class LogLimit(logging.Filter):
    """Lets every place in the source log ``max_lines`` a minute. Debug lines are opt-in and not counted.

    A line that passes has an attribute ``dropped``: a suffix with the number of lines dropped before it, or "".
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
        """None if this line must be dropped; otherwise the number of dropped lines that no line has mentioned yet."""
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
    """Writes any message as one line of at most ``MAX_CHARS`` characters. Needs a LogLimit on the same handler."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(dropped)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base's name
        record.message = _one_line(record.message)
        return super().formatMessage(record)


def _one_line(text: str) -> str:
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
