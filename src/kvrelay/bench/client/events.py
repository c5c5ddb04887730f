"""Server-sent events, cut out of a byte stream."""

from __future__ import annotations

from kvrelay.bench.errors import BadResponseError

MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventSplitter:
    """Feed bytes as they come, get the data of each event that is complete. Comments and other fields are skipped."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of all events that end in ``data``. Raises BadResponseError for an event without an end."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            # A carriage return at the end may be half of a line end.
            held = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(held)].replace(b"\r\n", b"\n") + held
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadResponseError("the server sends an event that does not end")
        return [found for event in events if (found := _data_of(event))]


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
