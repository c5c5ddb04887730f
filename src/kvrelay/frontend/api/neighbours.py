"""Paths that clients know from other servers: small answers for some, and a refusal by name for the others."""

from __future__ import annotations

import html
from typing import Any

import msgspec

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.cluster.cluster import Cluster
from kvrelay.frontend.cluster.models import Model
from kvrelay.http import Exchange, Response

REFUSED = {
    "/v1/embeddings": "embeddings",
    "/v1/audio/transcriptions": "audio",
    "/v1/audio/translations": "audio",
    "/v1/audio/speech": "audio",
    "/v1/images/generations": "images",
    "/v1/moderations": "moderations",
    "/v1/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scoring; use prompt_logprobs of /v1/completions",
    "/score": "scoring; use prompt_logprobs of /v1/completions",
    "/pooling": "pooling",
    "/classify": "classification",
    "/generate": "SGLang's and TGI's API; use /v1/completions",
}
"""What is asked for there is not done here."""

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code{background:#eee}"
    "table{border-collapse:collapse}td{border-top:1px solid #ccc;padding:.2em .8em;vertical-align:top}"
)


class TokenizerInfo(msgspec.Struct, frozen=True):
    """``GET /tokenizer_info``."""

    model: str
    vocab_size: int
    max_model_len: int
    chat_template: str | None


class NeighbourEndpoints:
    """Handlers, as ``FrontendApp`` wants them."""

    def __init__(self, cluster: Cluster, document: dict[str, Any]) -> None:
        """``document`` is the OpenAPI document."""
        self._cluster = cluster
        self._page = docs_page(document)

    async def refuse(self, exchange: Exchange, request_id: str) -> None:
        """Raises InvalidInputError."""
        path = exchange.request.path
        raise InvalidInputError(f"{path} is not served: kvrelay does not do {REFUSED[path]}")

    async def tokenizer_info(self, exchange: Exchange, request_id: str) -> None:
        """Of the first model, or of the one that the query names as ``model=``. Raises ModelNotFoundError."""
        _, _, name = exchange.request.query.partition("model=")
        model: Model = self._cluster.model(name or None)
        template = model.tokenizer.chat_template
        info = TokenizerInfo(
            model.name,
            model.tokenizer.vocab_size,
            model.max_model_len,
            template.source if template is not None else None,
        )
        exchange.respond(Response(200, msgspec.json.encode(info)))

    async def docs(self, exchange: Exchange, request_id: str) -> None:
        exchange.respond(Response(200, self._page, b"text/html; charset=utf-8"))


def docs_page(document: dict[str, Any]) -> bytes:
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
