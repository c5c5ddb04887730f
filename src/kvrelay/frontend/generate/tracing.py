"""The trace of one request, from its body to the end of its answer, whichever way it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.errors import KvrelayError
from kvrelay.http import HttpRequest
from kvrelay.marks.kept import Kept
from kvrelay.marks.trace import Trace
from kvrelay.marks.trace_context import HEADER as TRACEPARENT
from kvrelay.marks.trace_context import TraceContext, followed

WATERFALL_HEADER = "x-kvrelay-waterfall"


@contextmanager
def traced(kept: Kept | None, request: HttpRequest, request_id: str) -> Iterator[Trace | None]:
    """A new trace, kept from now on; None if none are."""
    if kept is None:
        yield None
        return
    trace, error = kept.begin(request_id, request.client), None
    trace.traceparent = followed(request.headers.get(TRACEPARENT, ""))
    if kept.exporter is not None:
        trace.context = TraceContext.of(trace.traceparent)
        trace.traceparent = trace.context.traceparent
    try:
        yield trace
    except KvrelayError as exc:
        error = exc.message or type(exc).__name__
        raise
    except BaseException as exc:
        error = type(exc).__name__
        raise
    finally:
        trace.model = request.model
        kept.ended(trace, error)
