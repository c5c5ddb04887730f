"""What this frontend shows of its requests, and how frontends ask each other: ``/debug/requests``.

    client ── GET /debug/requests/ID ──> any frontend ── request over the control plane ──> the frontend that ID names
                                                      <── the waterfall, as JSON, and whose request it is ──

It owns the kept traces of this frontend. With API keys on, a key of ``--metrics-keys-file`` sees all requests and any
other key its own. A request of another key is as one that does not exist.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec

from kvrelay.config import MetricsConfig
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.status import Outcome
from kvrelay.errors import ControlUnavailableError, InvalidInputError, KvrelayError
from kvrelay.frontend.cluster.frontends import other_frontends
from kvrelay.http import Exchange, Response
from kvrelay.http.api_keys import OWN_KEY, ApiKeys
from kvrelay.http.keys_file import following
from kvrelay.marks.kept import Kept
from kvrelay.marks.trace import Trace
from kvrelay.marks.waterfall import Summary, Waterfall, summary, waterfall

T = TypeVar("T", bound=msgspec.Struct)
Line = TypeVar("Line", Summary, Trace)

REQUESTS_PATH = "/debug/requests"
CHALLENGE = [(b"www-authenticate", b'Basic realm="kvrelay", charset="UTF-8"'), (b"www-authenticate", b"Bearer")]
NAME_CHARS = 10
OWNER = re.compile(r"[A-Za-z]+[-_](?:[A-Za-z0-9_-]{1,128}-)?([0-9a-f]{10})(?:[0-9a-f]{8}|[0-9a-f]{22})")
ASK_TIMEOUT_S = 1.0
MAX_LISTED = 1000
UNANSWERED = tuple(outcome.value for outcome in Outcome if outcome is not Outcome.ANSWERED)
ORDERS = ("recent", "slowest", *UNANSWERED)


class RequestNotKeptError(InvalidInputError):
    """No such request, or it is another key's."""

    status = 404


class Question(msgspec.Struct, frozen=True):
    """Frontend to frontend. With ``request_id`` one request, else a list. ``client`` None: of all keys."""

    client: str | None
    request_id: str = ""
    limit: int = 0
    order: str = "recent"


class RequestList(msgspec.Struct, frozen=True):
    requests: list[Summary]


class ShownRequests:
    """``name``: this frontend's in discovery; empty: a random one, which no other frontend finds."""

    def __init__(self, config: MetricsConfig, control: ControlPlane, keys: Keys, name: str = "") -> None:
        """Raises ConfigError if the keys cannot be read."""
        self.name = name or uuid.uuid4().hex[:NAME_CHARS]
        self.kept = Kept(self.name) if config.request_marks else None
        self._keys_file = config.metrics_keys_file
        self._operators = ApiKeys.load("", config.metrics_keys_file)
        self._control = control
        self._names = keys

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Other frontends are answered while this context is open."""
        async with following(self._keys_file, self._operators):
            asked = await self._control.events.serve(self._names.frontend_requests(self.name), self._answer)
            try:
                yield
            finally:
                await asked.unsubscribe()

    def close(self) -> None:
        if self.kept is not None:
            self.kept.close()

    def viewer(self, authorization: str, clients: ApiKeys) -> str | None:
        """Whose requests the holder of this key may see: ``""`` for all, None if no key matches. Without any key
        everyone sees all, and so does the holder of ``--api-key`` if that is the only one."""
        bearer = as_bearer(authorization)
        if not (clients or self._operators) or self.is_operator(bearer):
            return ""
        name = clients.name_of(bearer) if clients else None
        is_only = not self._operators and clients.names == {OWN_KEY}
        return "" if name is not None and is_only else name

    def is_operator(self, bearer: str) -> bool:
        """Whether it is a key of ``--metrics-keys-file``."""
        return bool(self._operators) and self._operators.name_of(bearer) is not None

    # -- handlers -----------------------------------------------------------------------------------------------------

    async def show_list(self, exchange: Exchange, request_id: str) -> None:
        """``GET /debug/requests``. Raises InvalidInputError."""
        query = parse_qs(exchange.request.query, keep_blank_values=True)
        order, limit = query.get("order", ["recent"])[-1], query.get("limit", ["100"])[-1]
        if order not in ORDERS:
            raise InvalidInputError(f"order must be one of {', '.join(ORDERS)}", param="order")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= MAX_LISTED):
            raise InvalidInputError(f"limit must be 1 to {MAX_LISTED}", param="limit")
        question = Question(exchange.request.client or None, limit=int(limit), order=order)
        found = self._listed(question)
        for answer in await asyncio.gather(*(self._ask(name, question, RequestList) for name in await self._others())):
            found += answer.requests if answer is not None else []
        exchange.respond(Response(200, msgspec.json.encode(RequestList(_ordered(found, question)))))

    async def show(self, exchange: Exchange, request_id: str) -> None:
        """``GET /debug/requests/{id}``. Raises RequestNotKeptError."""
        asked = exchange.request.path.removeprefix(f"{REQUESTS_PATH}/")
        owner = OWNER.fullmatch(asked)
        if owner is None:
            raise RequestNotKeptError("no request has such an id: it comes with the answer, as id or x-request-id")
        question = Question(exchange.request.client or None, asked)
        name = owner[1]
        if name == self.name:
            found = self._shown(question)
        else:
            found = await self._ask(name, question, Waterfall)
        if found is None:
            raise RequestNotKeptError(f"request {asked[:200]} is not kept by its frontend {name}, or that is gone")
        exchange.respond(Response(200, msgspec.json.encode(found)))

    # -- this frontend's own ------------------------------------------------------------------------------------------

    def _listed(self, question: Question) -> list[Summary]:
        kept = self.kept.all() if self.kept is not None else []
        mine = [trace for trace in kept if question.client in (None, trace.client)]
        return [summary(trace, self.name) for trace in _ordered(mine, question)]

    def _shown(self, question: Question) -> Waterfall | None:
        trace = self.kept.find(question.request_id) if self.kept is not None else None
        if trace is None or question.client not in (None, trace.client):
            return None
        return waterfall(trace, self.name)

    # -- other frontends ----------------------------------------------------------------------------------------------

    async def _others(self) -> list[str]:
        """None without a control plane, or if it does not answer."""
        try:
            return list(await other_frontends(self._control, self._names, self.name, ASK_TIMEOUT_S))
        except ControlUnavailableError:
            return []

    async def _answer(self, data: bytes) -> bytes:
        """Another frontend's question. It has checked the key."""
        try:
            question = msgspec.json.decode(data, type=Question)
        except UNREADABLE:
            return b"null"
        found = self._shown(question) if question.request_id else RequestList(self._listed(question))
        return msgspec.json.encode(found)

    async def _ask(self, name: str, question: Question, kind: type[T]) -> T | None:
        """None if it does not answer, or keeps no such request."""
        try:
            answer = await self._control.events.request(
                self._names.frontend_requests(name), msgspec.json.encode(question), ASK_TIMEOUT_S
            )
            return msgspec.json.decode(answer, type=kind | None)
        except (KvrelayError, *UNREADABLE):
            return None


def _ordered(found: Sequence[Line], question: Question) -> list[Line]:
    """As asked, the first of them."""
    chosen = [one for one in found if question.order not in UNANSWERED or one.status == question.order]
    if question.order == "slowest":
        chosen.sort(key=lambda one: one.latency_ms, reverse=True)
    else:
        chosen.sort(key=lambda one: one.received_unix, reverse=True)
    return chosen[: question.limit]


def as_bearer(authorization: str) -> str:
    """HTTP Basic as a bearer token: the password is the key. Anything else as it is."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return ""
    return f"Bearer {password.decode('latin-1')}"
