"""The OpenAPI document, generated from the request structs, so that it matches the parser; and the same as a page."""

from __future__ import annotations

import html
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from kvrelay.frontend.anthropic import AnthropicErrorBody, CountTokensRequest, MessageBody, MessagesRequest
from kvrelay.frontend.api.adapters import LOAD_PATH, UNLOAD_PATH, LoadAdapterRequest, UnloadAdapterRequest
from kvrelay.frontend.api.requests_shown import ORDERS
from kvrelay.frontend.openai.answer_spec import DECISION_HEADER, TIMEOUT_HEADER
from kvrelay.frontend.openai.bounds import MAX_JSON_SIZE
from kvrelay.frontend.openai.completions import ChatResponse, CompletionResponse
from kvrelay.frontend.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from kvrelay.frontend.responses import INPUT_TOKENS_PATH, InputTokensRequest, ResponseBody, ResponsesRequest
from kvrelay.http.errors import ErrorBody
from kvrelay.version import __version__

_REF = "#/components/schemas/{name}"


class _Post(msgspec.Struct, frozen=True):
    """A POST path. ``response``: None if the document does not describe it; else the answer is generated, and may be
    streamed."""

    path: str
    summary: str
    request: type[msgspec.Struct]
    response: type[msgspec.Struct] | None = None
    errors: type[msgspec.Struct] = ErrorBody
    is_text: bool = False


_POSTS = (
    _Post("/v1/completions", "Continue a prompt", CompletionRequest, CompletionResponse),
    _Post("/v1/chat/completions", "Answer a chat", ChatCompletionRequest, ChatResponse),
    _Post("/v1/responses", "Answer as OpenAI's responses API; nothing is kept", ResponsesRequest, ResponseBody),
    _Post(INPUT_TOKENS_PATH, "Count a response's input tokens", InputTokensRequest),
    _Post("/v1/messages", "Answer as Anthropic's messages API", MessagesRequest, MessageBody, AnthropicErrorBody),
    _Post("/v1/messages/count_tokens", "Count a prompt's tokens", CountTokensRequest, errors=AnthropicErrorBody),
    _Post("/v1/kvrelay/route", "Which worker would get this prompt, and why; nothing is generated", CompletionRequest),
    _Post("/tokenize", "Text or messages to token ids", TokenizeRequest),
    _Post("/detokenize", "Token ids to text", DetokenizeRequest),
    _Post(LOAD_PATH, "Load an adapter (LoRA) at all workers; for operators", LoadAdapterRequest, is_text=True),
    _Post(UNLOAD_PATH, "Unload an adapter that was loaded so; for operators", UnloadAdapterRequest, is_text=True),
)
BODIES = tuple({post.request: None for post in _POSTS})
"""All kinds of bodies."""


class _Get(msgspec.Struct, frozen=True):
    """A GET path. ``errors`` are statuses, ``parameter`` is its parameter, if any."""

    path: str
    summary: str
    errors: tuple[str, ...] = ()
    content_type: str = "application/json"
    parameter: dict[str, object] | None = None


def _parameter(place: str, name: str, kind: str, description: str = "", **bounds: object) -> dict[str, object]:
    required = {"required": True} if place == "path" else {}
    described = {"description": description} if description else {}
    return {"name": name, "in": place, **required, **described, "schema": {"type": kind, **bounds}}


_GETS = (
    _Get("/v1/models", "The models that are served now", ("401", "503")),
    _Get("/v1/models/{model}", "One model", ("401", "404", "503"), parameter=_parameter("path", "model", "string")),
    _Get(
        "/v1/kvrelay/router",
        "Settings, workers and their work; with blocks=1 the index as well",
        ("400", "401"),
        parameter=_parameter("query", "blocks", "integer", enum=[0, 1]),
    ),
    _Get(
        "/debug/requests",
        "Requests of all frontends that are kept: the latest, the slowest, or those of one outcome",
        ("400", "401"),
        parameter=_parameter("query", "order", "string", enum=list(ORDERS)),
    ),
    _Get(
        "/debug/requests/{id}",
        "Where the time of one request went",
        ("401", "404"),
        parameter=_parameter("path", "id", "string"),
    ),
    _Get(
        "/debug/cluster",
        "Workers, load, flows of KV, rates of all frontends, and what is wrong now",
        ("400", "401", "403"),
        parameter=_parameter(
            "query", "since", "integer", "The history after this second since 1970", minimum=0, maximum=10**12 - 1
        ),
    ),
    _Get("/health", "Whether a model can be served", ("503",)),
    _Get("/live", "200 while this process answers"),
    _Get("/metrics", "Prometheus metrics", ("401",), content_type="text/plain"),
    _Get("/ping", "As /health", ("503",)),
    _Get("/load", "Sequences in flight", ("401",)),
    _Get(
        "/tokenizer_info",
        "A model's tokenizer and chat template",
        ("401", "404"),
        parameter=_parameter("query", "model", "string"),
    ),
    _Get("/docs", "This document as a page", content_type="text/html"),
    _Get("/version", "The version of the server"),
    _Get("/openapi.json", "This document"),
)
_ERRORS = {
    "400": "The request is wrong; the body says what",
    "401": "The API key is missing or wrong",
    "403": "The API key is valid and does not open this",
    "404": "No such model",
    "413": "The request is too large, in general or for this API key",
    "429": "Too many requests; Retry-After says when to try again",
    "503": "No worker can take the request; Retry-After says when to try again",
    "504": "The request ran past its deadline",
}
_TIMEOUT = "Deadline in seconds, where the body has no timeout"
_GENERATION_PARAMETERS = [
    _parameter("header", TIMEOUT_HEADER, "number", _TIMEOUT, exclusiveMinimum=0),
    _parameter("header", "x-request-id", "string", "Becomes part of the id"),
]
_GENERATION_HEADERS = {
    "x-request-id": {"description": "The answer's id", "schema": {"type": "string"}},
    DECISION_HEADER: {"description": "Where the first choice's prefill ran, if asked", "schema": {"type": "string"}},
    "x-kvrelay-worker": {"description": "Who took the first choice", "schema": {"type": "string"}},
}
_RETRY_AFTER = {
    "retry-after": {"description": "Seconds", "required": True, "schema": {"type": "integer", "minimum": 1}}
}
_RETRIED = ("429", "503")


@cache
def documents() -> tuple[bytes, bytes]:
    """The document as JSON and as a page. They are the same for all frontends of a process."""
    document = openapi_document()
    return msgspec.json.encode(document), _docs_page(document)


def openapi_document() -> dict[str, object]:
    """The document as JSON values."""
    structs = [kind for post in _POSTS for kind in (post.request, post.response, post.errors) if kind is not None]
    _, components = msgspec.json.schema_components(structs, schema_hook=_any_value, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvrelay",
            "version": __version__,
            "description": "OpenAI's API with vLLM's extensions, and Anthropic's messages.",
        },
        "paths": {
            **{post.path: {"post": _post(post)} for post in _POSTS},
            **{get.path: {"get": _get(get)} for get in _GETS},
        },
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _post(post: _Post) -> dict[str, object]:
    answer: dict[str, object] = {"description": "The answer"}
    content: dict[str, object] = {"application/json": {"schema": _schema(post.response)}}
    if post.is_text:
        content = {"text/plain": {"schema": {"type": "string"}}}
    parameters: list[dict[str, object]] = []
    if post.response is not None:
        # The events of a stream depend on the API; this version of OpenAPI cannot describe them.
        content["text/event-stream"] = {}
        answer["headers"], parameters = _GENERATION_HEADERS, _GENERATION_PARAMETERS
    return {
        "summary": post.summary,
        "parameters": parameters,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _schema(post.request)}}},
        "responses": {"200": {**answer, "content": content}, **_error_responses(_ERRORS, post.errors)},
    }


def _get(get: _Get) -> dict[str, object]:
    answer = {"description": "The answer", "content": {get.content_type: {}}}
    return {
        "summary": get.summary,
        "parameters": [get.parameter] if get.parameter else [],
        "responses": {"200": answer, **_error_responses(get.errors)},
    }


def _error_responses(statuses: Iterable[str], shape: type[msgspec.Struct] = ErrorBody) -> dict[str, object]:
    content = {"application/json": {"schema": _schema(shape)}}
    return {
        status: {
            "description": _ERRORS[status],
            "headers": _RETRY_AFTER if status in _RETRIED else {},
            "content": content,
        }
        for status in statuses
    }


def _any_value(kind: type) -> dict[str, object]:
    """msgspec knows no schema for ``object``."""
    return {"description": f"any JSON value; at most {MAX_JSON_SIZE} characters and values in all"}


def _schema(kind: type[msgspec.Struct] | None) -> dict[str, object]:
    return {"$ref": _REF.format(name=kind.__name__)} if kind is not None else {"type": "object"}


_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code{background:#eee}"
    "table{border-collapse:collapse}td{border-top:1px solid #ccc;padding:.2em .8em;vertical-align:top}"
)


def _docs_page(document: dict[str, Any]) -> bytes:
    """The OpenAPI document as a page that needs no other host and no script."""
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [f"<h1>{html.escape(title)}</h1><p>The same as <a href='openapi.json'>OpenAPI</a>.</p>"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            text = html.escape(operation.get("summary", ""))
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{text}</p>")
            parts += _linked(operation)
    for name, schema in document["components"]["schemas"].items():
        rows = "".join(_row(field, of) for field, of in schema.get("properties", {}).items())
        described = html.escape(schema.get("description", ""))
        parts.append(f"<h3 id='{html.escape(name)}'>{html.escape(name)}</h3><p>{described}</p><table>{rows}</table>")
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
    return f"{head}<style>{_STYLE}</style><body>{''.join(parts)}</body></html>".encode()


def _linked(operation: dict[str, Any]) -> list[str]:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = body.get("$ref", "").rpartition("/")[2]
    return [f"<p>Body: <a href='#{html.escape(name)}'>{html.escape(name)}</a></p>"] if name else []


def _row(field: str, schema: dict[str, Any]) -> str:
    return f"<tr><td><code>{html.escape(field)}</code></td><td>{html.escape(_kind(schema))}</td></tr>"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    limit = schema.get("maxLength", schema.get("maxItems", schema.get("maxProperties")))
    kind = str(schema.get("type", "any"))
    return f"{kind} (at most {limit})" if limit is not None else kind
