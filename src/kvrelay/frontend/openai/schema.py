"""The OpenAPI document, made from the request structs, so that it says what the parser does."""

from __future__ import annotations

import msgspec

from kvrelay import __version__
from kvrelay.frontend.openai.chat import ChatResponse
from kvrelay.frontend.openai.completions import CompletionResponse
from kvrelay.frontend.openai.errors import ErrorBody
from kvrelay.frontend.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REF = "#/components/schemas/{name}"
_POSTS: tuple[tuple[str, str, type[msgspec.Struct], type[msgspec.Struct] | None], ...] = (
    ("/v1/completions", "Continue a prompt", CompletionRequest, CompletionResponse),
    ("/v1/chat/completions", "Answer a chat", ChatCompletionRequest, ChatResponse),
    ("/v1/kvrelay/route", "Which worker would get this prompt, and why; nothing is generated", CompletionRequest, None),
    ("/tokenize", "Text or messages to token ids", TokenizeRequest, None),
    ("/detokenize", "Token ids to text", DetokenizeRequest, None),
)
_GETS = (
    ("/v1/models", "The models that are served now", "application/json"),
    ("/v1/models/{model}", "One model", "application/json"),
    ("/v1/kvrelay/router", "Settings, workers and their work; ?blocks=1: the index", "application/json"),
    ("/health", "200 when a model can be served, else 503", "application/json"),
    ("/live", "200 while this process answers", "application/json"),
    ("/metrics", "Prometheus metrics", "text/plain"),
    ("/version", "The version of the server", "application/json"),
    ("/openapi.json", "This document", "application/json"),
)
_ERRORS = {
    "400": "The request is wrong; the body says what",
    "401": "The API key is missing or wrong",
    "404": "No such model",
    "413": "The body is too large",
    "429": "Too many requests; Retry-After says when to try again",
    "503": "No worker can take the request; Retry-After says when to try again",
    "504": "The request ran past its deadline",
}


def openapi_document() -> dict[str, object]:
    """The document as JSON values."""
    structs = [kind for _, _, request, response in _POSTS for kind in (request, response) if kind is not None]
    _, components = msgspec.json.schema_components([*structs, ErrorBody], schema_hook=_any_value, ref_template=_REF)
    paths: dict[str, object] = {}
    for path, summary, request, response in _POSTS:
        paths[path] = {"post": _post(summary, request, response)}
    for path, summary, content_type in _GETS:
        paths[path] = {"get": _get(path, summary, content_type)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": __version__, "description": "OpenAI's API with vLLM's extensions."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _post(summary: str, request: type[msgspec.Struct], response: type[msgspec.Struct] | None) -> dict[str, object]:
    content: dict[str, object] = {"application/json": {"schema": _schema(response)}}
    if "stream" in request.__struct_fields__:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _schema(request)}}},
        "responses": {"200": {"description": "The answer", "content": content}, **_error_responses(_ERRORS)},
    }


def _get(path: str, summary: str, content_type: str) -> dict[str, object]:
    operation: dict[str, object] = {"summary": summary}
    errors: dict[str, str] = {}
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        errors = {"404": _ERRORS["404"]}
    if path.startswith("/v1/"):
        errors = {"401": _ERRORS["401"], **errors}
    if path == "/health":
        errors = {"503": "No model can be served"}
    answer = {"description": "The answer", "content": {content_type: {}}}
    return {**operation, "responses": {"200": answer, **_error_responses(errors)}}


def _error_responses(errors: dict[str, str]) -> dict[str, object]:
    content = {"application/json": {"schema": _schema(ErrorBody)}}
    return {status: {"description": text, "content": content} for status, text in errors.items()}


def _any_value(kind: type) -> dict[str, object]:
    """msgspec knows no schema for ``object``."""
    return {"description": "any JSON value"}


def _schema(kind: type[msgspec.Struct] | None) -> dict[str, object]:
    return {"$ref": _REF.format(name=kind.__name__)} if kind is not None else {"type": "object"}
