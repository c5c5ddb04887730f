"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kvrelay.errors import InvalidInputError, KvrelayError, PromptTooLongError, RetryElsewhereError
from kvrelay.http.exchange import Response

MAX_RETRY_AFTER_S = 3600.0


class DeadlineError(RetryElsewhereError):
    """The request ran past its own deadline."""

    status = 504


class RequestRefusedError(KvrelayError):
    """A worker refused the request permanently, with its own status. ``param`` is the field at fault."""

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
    """The HTTP status for ``error``. A worker's own status is used if it is an error status."""
    if isinstance(error, InvalidInputError | RetryElsewhereError | RequestRefusedError) and 400 <= error.status < 600:
        return error.status
    return 500


class Failure(msgspec.Struct, frozen=True):
    """An error for a client, independent of its API's format. ``status`` is the HTTP status; ``lengths`` are those of
    PromptTooLongError."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    lengths: tuple[int, int, int] | None = None

    @property
    def line(self) -> str:
        """The message in one line."""
        return " ".join(self.message.split())


ErrorShape = Callable[[Failure], bytes]
"""The JSON body of an error in one API."""


def failure_of(error: KvrelayError) -> Failure:
    if isinstance(error, InvalidInputError):
        lengths = error.lengths if isinstance(error, PromptTooLongError) else None
        return Failure(status_of(error), error.message, error.param, error.code, lengths)
    return Failure(status_of(error), error.message, error.param if isinstance(error, RequestRefusedError) else None)


def openai_error(failure: Failure) -> bytes:
    """An ``ErrorShape``."""
    kind = _TYPES.get(failure.status) or ("invalid_request_error" if failure.status < 500 else "server_error")
    code = failure.code if failure.code is not None else failure.status
    return msgspec.json.encode(ErrorBody(ErrorDetail(failure.line, kind, failure.param, code)))


def error_response(error: KvrelayError, shape: ErrorShape = openai_error) -> Response:
    """The whole answer, with Retry-After if a retry makes sense."""
    retry_after_s = getattr(error, "retry_after_s", None)
    headers: list[tuple[bytes, bytes]] = []
    if retry_after_s is not None and status_of(error) in (429, 503):
        headers.append((b"retry-after", b"%d" % _whole_seconds(retry_after_s)))
    return Response(status_of(error), shape(failure_of(error)), headers=headers)


def _whole_seconds(seconds: float) -> int:
    """Limited to between one second and an hour."""
    return math.ceil(min(max(seconds, 1.0), MAX_RETRY_AFTER_S)) if not math.isnan(seconds) else 1
