"""Server-sent events: bytes in pieces of any size become the data of each event. Pure.

The rules are those of the HTML standard, section "Interpreting an event stream": a line ends with LF, CR or both, an
event ends with an empty line, its data lines are joined, comments and other fields are skipped.
"""

from __future__ import annotations

from kvrelay.errors import KvrelayError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLongError(KvrelayError):
    """An event does not end."""


class EventParser:
    """One stream. ``max_bytes``: of an event that has not ended."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line: list[bytes] = []
        """The pieces of a line that has not ended."""
        self._data: list[bytes] = []
        """The data lines of an event that has not ended."""
        self._num_line_bytes = self._num_data_bytes = 0
        self._is_after_cr = False
        self._is_first = True

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that end in ``received``. Raises EventTooLongError."""
        if self._is_after_cr and received:
            received = received.removeprefix(b"\n")
        self._is_after_cr = received.endswith(b"\r") or (self._is_after_cr and not received)
        *lines, rest = _lines(received)
        found: list[bytes] = []
        if lines:
            self._line.append(lines[0])
            lines[0] = b"".join(self._line)
            self._line.clear()
            self._num_line_bytes = 0
            for line in lines:
                self._end_line(line, found)
        if rest:
            self._line.append(rest)
            self._num_line_bytes += len(rest)
        if self._num_line_bytes + self._num_data_bytes > self._max_bytes:
            raise EventTooLongError(f"an event of the server has more than {self._max_bytes} bytes")
        return found

    def end(self) -> list[bytes]:
        """The stream is over: the event whose empty line is missing. A line that is cut off is not part of it."""
        found: list[bytes] = []
        self._end_line(b"", found)
        return found

    def _end_line(self, line: bytes, found: list[bytes]) -> None:
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.startswith(b"data:"):
            self._data.append(line[5:].strip())
            self._num_data_bytes += len(line)
        elif not line and self._data:
            data = b"\n".join(self._data).strip()
            self._data.clear()
            self._num_data_bytes = 0
            if data:
                found.append(data)


def _lines(received: bytes) -> list[bytes]:
    """The lines without their ends; the last one has not ended."""
    if b"\r" not in received:
        return received.split(b"\n")
    lines = received.splitlines()
    if not lines or received.endswith((b"\n", b"\r")):
        lines.append(b"")
    return lines
