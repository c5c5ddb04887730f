"""However often and whatever is logged, few and short lines are written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from kvrelay.cli.log_limit import MAX_CHARS, WINDOW_S, LineFormatter, LogLimit
from kvrelay.core.clock import ManualClock

NUM_LINES = 3


class Written(logging.Handler):
    """Keeps the lines that would be written, without their time."""

    def __init__(self, limit: LogLimit) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.addFilter(limit)
        self.setFormatter(LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record).partition(f" {record.name}: ")[2])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def written(clock: ManualClock) -> Iterator[Written]:
    handler, log = Written(LogLimit(clock, NUM_LINES)), logging.getLogger("limited")
    log.propagate = False
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def complain(text: str = "malformed", level: int = logging.WARNING) -> None:
    logging.getLogger("limited").log(level, "%s frame", text)


def test_a_place_logs_so_many_lines_a_minute_and_says_what_was_dropped(written: Written, clock: ManualClock) -> None:
    for _ in range(100):
        complain()
    assert written.lines == ["malformed frame"] * NUM_LINES
    clock.advance(WINDOW_S)
    for _ in range(100):
        complain()
    assert written.lines[NUM_LINES:] == ["malformed frame (97 more were dropped)", "malformed frame", "malformed frame"]
    clock.advance(10 * WINDOW_S)
    complain()
    clock.advance(WINDOW_S)
    complain()
    assert written.lines[-2:] == ["malformed frame (97 more were dropped)", "malformed frame"]


def test_other_places_are_not_silenced(written: Written) -> None:
    for _ in range(100):
        complain()
    logging.getLogger("limited.elsewhere").error("the engine failed")
    assert written.lines[-1] == "the engine failed"


def test_debug_lines_are_all_written(written: Written) -> None:
    for _ in range(100):
        complain(level=logging.DEBUG)
    assert len(written.lines) == 100


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Grüße 你好", "Grüße 你好 frame"),
        ("a\nERROR forged", "a\\nERROR forged frame"),
        ("\x1b[2J\r\0\u2028\u202e", "\\x1b[2J\\r\\x00\\u2028\\u202e frame"),
        pytest.param("\udcff", "\\udcff frame", id="half a character"),
        ("%s %d", "%s %d frame"),
    ],
)
def test_a_message_is_one_line(written: Written, text: str, line: str) -> None:
    complain(text)
    assert written.lines == [line]


def test_a_message_is_short(written: Written) -> None:
    complain("x" * 10**6)
    assert written.lines == ["x" * MAX_CHARS + "..."]


def test_threads_count_together(written: Written) -> None:
    threads = [threading.Thread(target=lambda: [complain() for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written.lines) == NUM_LINES
