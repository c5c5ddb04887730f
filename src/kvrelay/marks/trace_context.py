"""Which trace of a tracing system a request belongs to: W3C's ``traceparent`` header. Pure.

Source: W3C Trace Context, https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import os
import re

import msgspec

HEADER = "traceparent"
_FORM = re.compile(r"(?P<version>[0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?P<more>-.{0,200})?")
_SAMPLED = 0x01


def followed(header: str) -> str:
    """The header for others, unless it is malformed: then nothing."""
    return header if _FORM.fullmatch(header) else ""


class TraceContext(msgspec.Struct, frozen=True):
    """Ids in hexadecimal. ``parent_id`` is the caller's span, empty if the request begins the trace. ``span_id`` is the
    request's own. A caller that does not sample the trace wants no spans."""

    trace_id: str
    parent_id: str
    span_id: str
    is_sampled: bool

    @classmethod
    def of(cls, header: str) -> TraceContext:
        """The context of a request with this header. A header that is missing or malformed begins a new trace."""
        span_id = os.urandom(8).hex()
        found = _FORM.fullmatch(header)
        if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
            return cls(os.urandom(16).hex(), "", span_id, True)
        _, trace_id, parent_id, flags, _ = found.groups()
        if not (int(trace_id, 16) and int(parent_id, 16)):
            return cls(os.urandom(16).hex(), "", span_id, True)
        return cls(trace_id, parent_id, span_id, bool(int(flags, 16) & _SAMPLED))

    @property
    def traceparent(self) -> str:
        """The header for whom this process calls on behalf of the request."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"
