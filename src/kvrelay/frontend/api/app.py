"""Routes: handlers, access control, and how errors become answers. Knows HTTP's values, not its bytes."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec

from kvrelay.config import FrontendConfig, KeyLimits
from kvrelay.config.addresses import is_loopback
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.status import outcome_of
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import InvalidInputError, KvrelayError
from kvrelay.frontend.access.access_log import AccessLog
from kvrelay.frontend.access.admission import Admission
from kvrelay.frontend.access.cors import AllowedOrigins
from kvrelay.frontend.anthropic import COUNT_TOKENS_PATH, COUNTED, MESSAGES, MESSAGES_PATH, anthropic_error
from kvrelay.frontend.api.adapters import LOAD_PATH, UNLOAD_PATH, AdapterEndpoints
from kvrelay.frontend.api.cluster_shown import CLUSTER_PATH, ShownCluster
from kvrelay.frontend.api.content_coding import gunzipped, is_coded, utf8_json
from kvrelay.frontend.api.fields import RequestFields
from kvrelay.frontend.api.openapi import documents
from kvrelay.frontend.api.page import PAGE, Page
from kvrelay.frontend.api.requests_shown import CHALLENGE, REQUESTS_PATH, ShownRequests
from kvrelay.frontend.api.routing import RoutingEndpoints
from kvrelay.frontend.cluster.frontends import Frontends
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.cluster.view import ClusterView
from kvrelay.frontend.generate.answers import ClientGoneError, require_client
from kvrelay.frontend.generate.chat_api import CHAT_COMPLETIONS
from kvrelay.frontend.generate.pipeline import BrokenStreamError, Pipeline
from kvrelay.frontend.generate.prompts import detokenized, tokenized
from kvrelay.frontend.openai.requests import DetokenizeRequest, TokenizeRequest, parse_body
from kvrelay.frontend.responses import INPUT_TOKENS, INPUT_TOKENS_PATH, RESPONSES
from kvrelay.frontend.side_threads import SideThreads
from kvrelay.http import Exchange, HttpRequest, Response
from kvrelay.http.api_keys import ApiKeys
from kvrelay.http.errors import ErrorShape, Failure, error_response, openai_error
from kvrelay.http.exchange import JSON
from kvrelay.http.keys_file import following
from kvrelay.marks.trace_context import HEADER as TRACEPARENT
from kvrelay.version import __version__

_log = logging.getLogger(__name__)

MODEL_PATH = "/v1/models/"
OPEN_PATHS = frozenset({"/", "/health", "/live", "/ping", "/version", "/openapi.json", "/docs"})
"""Paths that need no key, because load balancers have none. On loopback ``/metrics`` is open too."""
NOT_SERVED = {
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
MAX_REQUEST_ID_CHARS = 128
NUM_RANDOM = 8
"""Digits that make a client's own id unique."""

Handler = Callable[[Exchange, str], Awaitable[None]]
Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)


class ModelCard(msgspec.Struct, frozen=True):
    """As OpenAI, vLLM and Anthropic show it. ``parent``: the model of which it is an adapter."""

    id: str
    created: int
    root: str
    max_model_len: int
    display_name: str
    created_at: datetime
    max_input_tokens: int
    parent: str | None = None
    object: str = "model"
    owned_by: str = "kvrelay"
    type: str = "model"
    lifecycle: str = "active"


class ModelList(msgspec.Struct, frozen=True):
    """The only page, as OpenAI and Anthropic show it."""

    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: str = "list"


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """``GET /tokenizer_info``."""

    model: str
    vocab_size: int
    max_model_len: int
    chat_template: str | None


class Route(msgspec.Struct, frozen=True):
    """A path's method, handler, and the prefix of its request ids. ``takes_x_api_key``: the key may stand in that
    header. ``shows_requests``: the keys of operators are admitted too, and HTTP Basic. ``is_scraped``: the former only.
    ``is_traced``: it generates, so its requests can be shown."""

    method: str
    handler: Handler
    id_prefix: str = "req-"
    takes_x_api_key: bool = False
    shows_requests: bool = False
    is_scraped: bool = False
    is_traced: bool = False


class FrontendApp:
    """Implements ``HttpApplication``."""

    def __init__(
        self,
        config: FrontendConfig,
        cluster: ClusterView,
        metrics: FrontendMetrics,
        shown: ShownRequests,
        frontends: Frontends,
    ) -> None:
        """Raises ConfigError if the API keys cannot be read."""
        common = KeyLimits(config.requests_per_minute, config.tokens_per_minute, config.requests_at_once)
        self._keys = ApiKeys.load(config.api_key, config.api_keys_file, common)
        self._keys_file = config.api_keys_file
        self._admission = Admission(config.max_waiting_requests, MonotonicClock())
        metrics.num_in_flight_of = lambda: self._admission.num_in_flight
        metrics.rejections_of = lambda: self._admission.rejections
        self._open_paths = OPEN_PATHS | {"/metrics"} if is_loopback(config.host) else OPEN_PATHS
        self._cluster = cluster
        self._metrics = metrics
        self._shown = shown
        self._tasks = TaskSet()
        self._threads = SideThreads()
        self._access_log = AccessLog(config.access_log, config.access_log_file)
        self._origins = AllowedOrigins(config.allowed_origins)
        self._max_body_bytes = config.max_body_bytes
        self._check_fields = RequestFields(config.on_unknown_field).check
        pipeline = Pipeline(
            config,
            cluster,
            metrics,
            self._keys,
            self._admission,
            self._threads,
            self._access_log,
            self._check_fields,
            shown.kept,
        )
        routing = RoutingEndpoints(config, cluster, metrics, self._threads, self._check_fields)
        shown_cluster = ShownCluster(cluster, frontends, metrics.objectives)
        self._routes = self._build_routes(pipeline, routing, shown_cluster)
        self._named_routes = {
            MODEL_PATH: Route("GET", self._model, takes_x_api_key=True),
            f"{REQUESTS_PATH}/": Route("GET", shown.show, shows_requests=True),
        }
        """Paths that end with a name."""

    def _build_routes(
        self, pipeline: Pipeline, routing: RoutingEndpoints, shown_cluster: ShownCluster
    ) -> dict[str, Route]:
        page, adapters = Page(), AdapterEndpoints(self._cluster)
        document, docs_page = documents()
        return {
            "/v1/completions": Route("POST", pipeline.complete, "cmpl-", is_traced=True),
            "/v1/chat/completions": Route(
                "POST", partial(pipeline.chat, CHAT_COMPLETIONS), "chatcmpl-", is_traced=True
            ),
            "/v1/responses": Route("POST", partial(pipeline.chat, RESPONSES), "resp_", is_traced=True),
            MESSAGES_PATH: Route("POST", partial(pipeline.chat, MESSAGES), "msg_", True, is_traced=True),
            COUNT_TOKENS_PATH: Route("POST", partial(pipeline.count_tokens, COUNTED), "req_", True),
            INPUT_TOKENS_PATH: Route("POST", partial(pipeline.count_tokens, INPUT_TOKENS)),
            "/v1/models": Route("GET", self._models, takes_x_api_key=True),
            "/v1/kvrelay/route": Route("POST", routing.explain),
            "/v1/kvrelay/router": Route("GET", routing.show),
            "/tokenize": Route("POST", self._tokenize),
            "/detokenize": Route("POST", self._detokenize),
            "/health": Route("GET", self._health),
            "/live": Route("GET", _fixed(b'{"status":"ok"}')),
            "/metrics": Route("GET", self._render_metrics, is_scraped=True),
            "/version": Route("GET", _fixed(msgspec.json.encode({"version": __version__}))),
            "/openapi.json": Route("GET", _fixed(document)),
            "/ping": Route("GET", self._health),
            "/load": Route("GET", self._load),
            "/tokenizer_info": Route("GET", self._tokenizer_info),
            "/docs": Route("GET", _fixed(docs_page, b"text/html; charset=utf-8")),
            REQUESTS_PATH: Route("GET", self._shown.show_list, shows_requests=True),
            CLUSTER_PATH: Route("GET", shown_cluster.show, shows_requests=True),
            LOAD_PATH: Route("POST", adapters.load, shows_requests=True),
            UNLOAD_PATH: Route("POST", adapters.unload, shows_requests=True),
            "/": Route("GET", page.redirect),
            PAGE.rstrip("/"): Route("GET", page.redirect, shows_requests=True),
            **dict.fromkeys(page.paths, Route("GET", page.show, shows_requests=True)),
            **dict.fromkeys(NOT_SERVED, Route("POST", self._refuse)),
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Changed files of API keys are loaded, and other frontends are answered, while this context is open."""
        async with (
            following(self._keys_file, self._keys, lambda: self._admission.keep_keys(self._keys.names)),
            self._shown.serving(),
        ):
            yield

    # -- HttpApplication ----------------------------------------------------------------------------------------------

    def check_head(self, request: HttpRequest) -> Response | None:
        """Answers 404, 405 and 401 before the body is read, and sets the body's limit."""
        route = self._route(request.path)
        if route is None:
            failure = Failure(404, f"there is nothing at {request.path[:200]}{self._meant(request.path)}")
            return self._refusal(request, failure)
        if self._origins.preflight(request, route.method) is not None:
            request.max_body_bytes = 0
            return None
        method = "GET" if request.method == "HEAD" else request.method
        if method != route.method:
            allow = [(b"allow", route.method.encode())]
            failure = Failure(405, f"{request.path[:200]} takes {route.method}")
            return self._refusal(request, failure, allow)
        if request.path not in self._open_paths:
            authorization = _authorization(request, route)
            client = (
                self._shown.viewer(authorization, self._keys)
                if route.shows_requests
                else self._keys.name_of(authorization)
            )
            if client is None and route.is_scraped and self._shown.is_operator(authorization):
                client = ""
            if client is None:
                challenge = CHALLENGE if route.shows_requests else [(b"www-authenticate", b"Bearer")]
                failure = Failure(401, "a valid API key is needed", code="invalid_api_key")
                return self._refusal(request, failure, challenge)
            request.client, request.max_body_bytes = client, self._keys.limits_of(client).max_body_bytes
        if route.method != "POST":
            request.max_body_bytes = 0
        return None

    def error_response(self, status: int, message: str, path: str) -> Response:
        self._metrics.answered("http", str(status))
        self._access_log.write("-", "", "", path, str(status), 0.0)
        return Response(status, _errors_of(path)(Failure(status, message)))

    def handle(self, exchange: Exchange) -> None:
        self._tasks.spawn(self._answer(exchange))

    async def close(self) -> None:
        """End the requests that are still open, each with an error."""
        await self._tasks.close()
        self._threads.close()
        self._access_log.close()
        self._shown.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _route(self, path: str) -> Route | None:
        route = self._routes.get(path)
        return route if route is not None else self._named_routes.get(self._stem(path))

    def _stem(self, path: str) -> str:
        """All but the name at the end; empty if there is none. Names of models have slashes."""
        return next((stem for stem in self._named_routes if path.startswith(stem) and path != stem), "")

    def _meant(self, path: str) -> str:
        """A hint for clients with a wrong base URL."""
        near = "/" + "/".join(filter(None, path.split("/")))
        found = (name for name in (near, f"/v1{near}", near.removeprefix("/v1")) if name in self._routes)
        return next((f"; use {name}" for name in found), "")

    def _check_rate(self, request: HttpRequest) -> None:
        """Raises OverloadedError for a client that exceeds its request rate, and KeyRevokedError for one whose key was
        revoked. The head alone must not decide this: a refusal there ends the connection, and with it other answers
        that the client still waits for."""
        per_minute = self._keys.limits_of(request.client).requests_per_minute
        self._admission.count_request(request.client, per_minute or 0)

    def _refusal(self, request: HttpRequest, failure: Failure, headers: Sequence[tuple[bytes, bytes]] = ()) -> Response:
        self._metrics.answered("http", str(failure.status))
        self._access_log.write("-", request.client, request.method, request.path, str(failure.status), 0.0)
        shown = (*headers, *self._origins.headers(request))
        return Response(failure.status, _errors_of(request.path)(failure), headers=shown)

    async def _answer(self, exchange: Exchange) -> None:
        """A request's outermost frame: the client hears of every error."""
        path = exchange.request.path
        route = self._route(path)
        assert route is not None
        endpoint = path if path in self._routes else self._stem(path) + "{id}"
        request_id = _request_id(exchange.request, route.id_prefix, self._shown.name)
        status, started_s = "200", time.monotonic()
        error: str | None = None
        kept = self._shown.kept if route.is_traced else None
        request = exchange.request
        preflight = self._origins.preflight(request, route.method)
        if preflight is not None:
            exchange.respond(preflight)
            self._access_log.write(request_id, request.client, request.method, path, str(preflight.status), 0.0)
            return
        exchange.extra_headers = self._origins.headers(request)
        if kept is not None:
            kept.begin(request_id, request.client, request.headers.get(TRACEPARENT, ""))
        try:
            if route.method == "POST":
                self._check_rate(request)
                await self._decode_body(exchange)
            await route.handler(exchange, request_id)
        except ClientGoneError as exc:
            status, error = "disconnected", exc.message
        except BrokenStreamError as exc:
            status, error = "broken", exc.message
            _log.warning("%s: the stream ended with an error: %s", request_id, exc)
        except KvrelayError as exc:
            response = _with_request_id(error_response(exc, _errors_of(path)), request_id)
            status, error = str(response.status), exc.noted
            exchange.respond(response)
        except asyncio.CancelledError:
            # Only close() cancels, and nothing waits for this task's result.
            status, error = "503", "the frontend is shutting down"
            _cut_short(exchange, Failure(503, "the frontend is shutting down"), request_id)
        except Exception:  # noqa: BLE001 - the outermost frame of a request
            status, error = "500", "internal error"
            _log.exception("%s failed", request_id)
            _cut_short(exchange, Failure(500, "internal error"), request_id)
        if kept is not None:
            kept.end(request_id, error, outcome_of(status))
        self._metrics.answered(endpoint, status, request.model)
        duration_s = time.monotonic() - started_s
        self._access_log.write(request_id, request.client, request.method, path, status, duration_s)

    async def _decode_body(self, exchange: Exchange) -> None:
        """Raises RequestRefusedError, PayloadTooLargeError, InvalidInputError."""
        request = exchange.request
        if is_coded(request.headers.get("content-encoding", "")):
            own = request.max_body_bytes
            limit = self._max_body_bytes if own is None else min(own, self._max_body_bytes)
            work = gunzipped(request.body, limit)
            exchange.replace_body(await self._threads.run(limit, work, partial(require_client, exchange)))
        request.body = utf8_json(request.body)

    # -- handlers -----------------------------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange, request_id: str) -> None:
        cards = [card for model in self._cluster.listed_models() for card in _cards(model)]
        first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
        _respond(exchange, ModelList(cards, first, last))

    async def _model(self, exchange: Exchange, request_id: str) -> None:
        name = exchange.request.path.removeprefix(MODEL_PATH)
        model = self._cluster.model(name)
        _respond(exchange, next(card for card in _cards(model) if card.id == model.called(name)))

    async def _parsed(self, exchange: Exchange, kind: type[Body]) -> tuple[Body, int]:
        """The body and its size in bytes. Raises InvalidInputError."""
        size = len(exchange.request.body)
        request = await self._threads.parse(size, parse_body, exchange.request.body, kind, self._check_fields)
        exchange.drop_body()
        return request, size

    async def _tokenize(self, exchange: Exchange, request_id: str) -> None:
        request, size = await self._parsed(exchange, TokenizeRequest)
        model = self._cluster.model(request.model)
        tokens = await self._threads.run(size, tokenized(request, model), partial(require_client, exchange))
        answer = await self._threads.call(size, _tokenize_answer, tokens, model, bool(request.return_token_strs))
        exchange.respond(Response(200, answer))

    async def _detokenize(self, exchange: Exchange, request_id: str) -> None:
        request, size = await self._parsed(exchange, DetokenizeRequest)
        model = self._cluster.model(request.model)
        text = await self._threads.call(size, detokenized, request, model)
        _respond(exchange, DetokenizeResponse(text))

    async def _tokenizer_info(self, exchange: Exchange, request_id: str) -> None:
        """Of the first model, or of the one that the query names as ``model=``. Raises ModelNotFoundError."""
        names = parse_qs(exchange.request.query).get("model", [None])
        model = self._cluster.model(names[-1])
        template = model.tokenizer.chat_template
        source = template.source if template is not None else None
        _respond(exchange, TokenizerInfo(model.name, model.tokenizer.vocab_size, model.max_model_len, source))

    async def _refuse(self, exchange: Exchange, request_id: str) -> None:
        """Raises InvalidInputError."""
        path = exchange.request.path
        raise InvalidInputError(f"{path} is not served: kvrelay does not do {NOT_SERVED[path]}")

    async def _health(self, exchange: Exchange, request_id: str) -> None:
        """Ready if at least one model can be served. The ``pid`` tells frontends apart that share a port, ``workers``
        how many workers get this one's requests or prefills."""
        if self._cluster.models:
            num_workers = sum(model.num_workers for model in self._cluster.models)
            told = {"status": "ok", "pid": os.getpid(), "workers": num_workers}
            exchange.respond(Response(200, msgspec.json.encode(told)))
        else:
            body = openai_error(Failure(503, "no worker serves a model"))
            exchange.respond(Response(503, body, headers=[(b"retry-after", b"1")]))

    async def _load(self, exchange: Exchange, request_id: str) -> None:
        """As vLLM's: how many sequences this frontend has in flight."""
        exchange.respond(Response(200, msgspec.json.encode({"server_load": self._admission.num_in_flight})))

    async def _render_metrics(self, exchange: Exchange, request_id: str) -> None:
        exchange.respond(Response(200, self._metrics.render(), b"text/plain; version=0.0.4; charset=utf-8"))


def _fixed(body: bytes, content_type: bytes = JSON) -> Handler:
    """Answers always the same."""

    async def respond(exchange: Exchange, request_id: str) -> None:
        exchange.respond(Response(200, body, content_type))

    return respond


def _tokenize_answer(tokens: list[int], model: Model, with_strings: bool) -> bytes:
    strings = list(map(model.tokenizer.token_string, tokens)) if with_strings else None
    return msgspec.json.encode(TokenizeResponse(len(tokens), model.max_model_len, tokens, strings))


def _errors_of(path: str) -> ErrorShape:
    """The shape of errors of the API that ``path`` belongs to, served or not."""
    return anthropic_error if f"{path}/".startswith(f"{MESSAGES_PATH}/") else openai_error


def _respond(exchange: Exchange, body: msgspec.Struct) -> None:
    exchange.respond(Response(200, msgspec.json.encode(body)))


def _with_request_id(response: Response, request_id: str) -> Response:
    return msgspec.structs.replace(response, headers=(*response.headers, (b"x-request-id", request_id.encode())))


def _cut_short(exchange: Exchange, failure: Failure, request_id: str) -> None:
    """End an answer that cannot be completed with an error: its status, or the last event of its stream."""
    if exchange.is_done:
        return
    if exchange.is_started:
        if exchange.last_words is not None:
            exchange.write(exchange.last_words(failure.status, failure.message))
        exchange.finish()
    else:
        headers = [(b"retry-after", b"1")] if failure.status == 503 else []
        response = Response(failure.status, _errors_of(exchange.request.path)(failure), headers=headers)
        exchange.respond(_with_request_id(response, request_id))


def _authorization(request: HttpRequest, route: Route) -> str:
    """The authorization header, or the same from ``x-api-key``."""
    given = request.headers.get("authorization", "")
    return given if given or not route.takes_x_api_key else f"Bearer {request.headers.get('x-api-key', '')}"


def _request_id(request: HttpRequest, prefix: str, frontend: str) -> str:
    """The prefix, the client's own id if it is valid, this frontend's name, and a random part."""
    given = request.headers.get("x-request-id", "")
    unique = frontend + secrets.token_hex(16)[len(frontend) :]
    if (
        given
        and len(given) <= MAX_REQUEST_ID_CHARS
        and given.isascii()
        and given.replace("-", "").replace("_", "").isalnum()
    ):
        return f"{prefix}{given}-{unique[: len(frontend) + NUM_RANDOM]}"
    return prefix + unique


def _cards(model: Model) -> list[ModelCard]:
    """The model, and its adapters; the ``root`` of one that was loaded at run time is its path."""
    paths = {name: entry.path for name, entry in model.known_adapters.entries.items()}
    adapters = [_card(model, name, paths.get(name, model.root), model.name) for name in sorted(model.adapters)]
    return [_card(model, model.name, model.root), *adapters]


def _card(model: Model, name: str, root: str, parent: str | None = None) -> ModelCard:
    created, limit = model.created_unix_s, model.max_model_len
    return ModelCard(name, created, root, limit, name, datetime.fromtimestamp(created, UTC), limit, parent)
