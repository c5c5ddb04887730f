"""A frontend's report on its routing: the decision for a prompt, and the state behind all decisions.

With several frontends on one port, the ``pid`` of each answer tells which process gave it. For operators and tests: no
request is placed, and nothing changes.
"""

from __future__ import annotations

import os
from urllib.parse import parse_qs

import msgspec

from kvrelay.config import FrontendConfig
from kvrelay.core.handoff import OrderPolicy
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.frontend.cluster.models import Model, WorkerState
from kvrelay.frontend.cluster.pairs import ORDER_HEADER, read_order
from kvrelay.frontend.cluster.view import ClusterView
from kvrelay.frontend.generate.prompts import completion_prompts, read_completion
from kvrelay.frontend.openai.requests import FieldsCheck
from kvrelay.frontend.side_threads import SideThreads
from kvrelay.http import Exchange, Response
from kvrelay.http.api_keys import cache_salt_of
from kvrelay.router import PairDecision, RoutingExplanation, RoutingRequest
from kvrelay.router.runtime import SETTABLE


class RouteCounts(msgspec.Struct, frozen=True):
    """What this frontend has decided for the model since its start. ``fallbacks``: placed without costs; ``places``:
    auto and prefill-first, where prefills ran and why; ``refusals`` of workers and ``rejections`` of this frontend by
    reason."""

    fallbacks: int
    places: dict[str, int]
    refusals: dict[str, int]
    rejections: dict[str, int]


class RouteAnswer(msgspec.Struct, frozen=True):
    """``POST /v1/kvrelay/route``. ``pair``: unless decode-first is forced, the place of the prefill and why;
    ``decision`` is then the one for the decode worker if it were to serve the request alone."""

    pid: int
    model: str
    num_prompt_tokens: int
    block_size: int
    decision: RoutingExplanation
    order: OrderPolicy
    counts: RouteCounts
    pair: PairDecision | None = None


class RoutedWorker(msgspec.Struct, frozen=True):
    """A worker, and with ``blocks=1`` the sequence hashes of its known blocks, in hexadecimal because many JSON readers
    round 64-bit numbers."""

    state: WorkerState
    blocks: list[str] | None = None


class ModelRouting(msgspec.Struct, frozen=True):
    """The routing of one model. ``settings`` are those that can be changed at run time."""

    model: str
    block_size: int
    settings: dict[str, str | float]
    workers: list[RoutedWorker]


class RouterAnswer(msgspec.Struct, frozen=True):
    """``GET /v1/kvrelay/router``."""

    pid: int
    models: list[ModelRouting]


class RoutingEndpoints:
    """The handlers that ``FrontendApp`` expects."""

    def __init__(
        self,
        config: FrontendConfig,
        cluster: ClusterView,
        metrics: FrontendMetrics,
        threads: SideThreads,
        check_fields: FieldsCheck,
    ) -> None:
        self._is_shared = config.share_prefix_cache
        self._order = OrderPolicy(config.order)
        self._cluster, self._metrics = cluster, metrics
        self._threads, self._check_fields = threads, check_fields

    async def explain(self, exchange: Exchange, request_id: str) -> None:
        """The decision on a completion request with one prompt. Raises InvalidInputError, WorkerUnavailableError."""
        size = len(exchange.request.body)
        request, items = await self._threads.parse(size, read_completion, exchange.request.body, 1, self._check_fields)
        exchange.drop_body()
        model = self._cluster.model(request.model)
        add_special_tokens = request.add_special_tokens is not False
        (prompt,) = await self._threads.run(size, completion_prompts(items, model, add_special_tokens))
        order = read_order(exchange.request.headers.get(ORDER_HEADER), self._order)
        salt = cache_salt_of(exchange.request.client, request.cache_salt, is_shared=self._is_shared)
        adapter = model.adapter_of(model.called(request.model)) or model.adapter
        routed = RoutingRequest(request_id, prompt.token_ids, request.max_tokens or 0, cache_salt=salt, adapter=adapter)
        decision = model.router.explain(routed)
        pair = None if order is OrderPolicy.DECODE_FIRST else model.pairs.explain(routed, order)
        num_tokens, block_size = len(prompt.token_ids), model.router.block_size
        counts = self._counts(model)
        answer = RouteAnswer(os.getpid(), model.name, num_tokens, block_size, decision, order, counts, pair)
        exchange.respond(Response(200, msgspec.json.encode(answer)))

    def _counts(self, model: Model) -> RouteCounts:
        return RouteCounts(
            fallbacks=model.router.num_fallbacks,
            places={place.value: count for place, count in model.pairs.places.items()},
            refusals=self._metrics.refusals_of(model.name),
            rejections=dict(self._metrics.rejections_of()),
        )

    async def show(self, exchange: Exchange, request_id: str) -> None:
        """Every model's routing. Raises InvalidInputError."""
        with_blocks = _flag(exchange.request.query, "blocks")
        if with_blocks and exchange.request.client and not self._is_shared:
            # Salts are not secret: whoever sees the hashes can tell which prompts other keys have sent.
            message = "blocks of all API keys are shown only with --share-prefix-cache; see the admin command cache"
            raise InvalidInputError(message, param="blocks")
        models = [_routing(model, with_blocks) for model in self._cluster.models]
        exchange.respond(Response(200, msgspec.json.encode(RouterAnswer(os.getpid(), models))))


def _flag(query: str, name: str) -> bool:
    """The parameter ``name``, 1 or 0 (default). Raises InvalidInputError."""
    values = parse_qs(query, keep_blank_values=True).get(name, ["0"])
    if values not in (["0"], ["1"]):
        raise InvalidInputError(f"{name} must be 0 or 1", param=name)
    return values == ["1"]


def _routing(model: Model, with_blocks: bool) -> ModelRouting:
    router = model.router
    return ModelRouting(
        model=model.name,
        block_size=router.block_size,
        settings={name: getattr(router.config, name) for name in SETTABLE},
        workers=[
            RoutedWorker(
                state, [f"{block:016x}" for block in router.indexed_blocks(state.worker_id)] if with_blocks else None
            )
            for state in model.worker_states()
        ],
    )
