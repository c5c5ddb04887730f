"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import math

import msgspec

from kvrelay.errors import InvalidInputError, KvrelayError, RetryElsewhereError
from kvrelay.frontend.http.messages import Response

MAX_RETRY_AFTER_S = 3600.0


class DeadlineError(RetryElsewhereError):
    """The request ran past its own deadline."""

    status = 504


class RefusedError(KvrelayError):
    """A worker refused the request for good, with a status of its own. ``param`` is the field that is to blame."""

    def __init__(self, message: str, status: int, retry_after_s: float | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.retry_after_s = retry_after_s


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


def status_of(error: KvrelayError) -> int:
    """The HTTP status that tells a client about ``error``. A worker's own status counts if it is one of an error."""
    if isinstance(error, InvalidInputError | RetryElsewhereError | RefusedError) and 400 <= error.status < 600:
        return error.status
    return 500


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON body; the message is brought to one line."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    detail = ErrorDetail(" ".join(message.split()), kind, param, code if code is not None else status)
    return msgspec.json.encode(ErrorBody(detail))


def error_event(error: KvrelayError) -> bytes:
    """The same inside a stream that has begun."""
    return b"data: " + _body_of(error) + b"\n\n"


def error_response(error: KvrelayError) -> Response:
    """The whole answer, with Retry-After where trying again makes sense."""
    retry_after_s = getattr(error, "retry_after_s", None)
    headers: list[tuple[bytes, bytes]] = []
    if retry_after_s is not None and status_of(error) in (429, 503):
        headers.append((b"retry-after", b"%d" % _whole_seconds(retry_after_s)))
    return Response(status_of(error), _body_of(error), headers=headers)


def _whole_seconds(seconds: float) -> int:
    """From one second to an hour, whatever a worker said."""
    return math.ceil(min(max(seconds, 1.0), MAX_RETRY_AFTER_S)) if not math.isnan(seconds) else 1


def _body_of(error: KvrelayError) -> bytes:
    if isinstance(error, InvalidInputError):
        return error_body(status_of(error), error.message, error.param, error.code)
    if isinstance(error, RefusedError):
        return error_body(status_of(error), error.message, error.param)
    return error_body(status_of(error), error.message)
