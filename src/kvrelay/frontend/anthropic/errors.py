"""Errors as Anthropic's clients expect them: ``{"type": "error", "error": {"type", "message"}}`` and a status."""

from __future__ import annotations

import msgspec

from kvrelay.frontend.openai.errors import Failure

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    error: AnthropicError
    type: str = "error"


def anthropic_error(failure: Failure) -> bytes:
    """An ``ErrorShape``. There is no place for the field's name but the message."""
    kind = _TYPES.get(failure.status) or ("invalid_request_error" if failure.status < 500 else "api_error")
    message = failure.line
    if failure.param is not None and failure.param not in message:
        message = f"{failure.param}: {message}"
    return msgspec.json.encode(AnthropicErrorBody(AnthropicError(kind, message)))
