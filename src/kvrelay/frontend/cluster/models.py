"""A model as the frontend serves it: its tokenizer, its limits, its workers and the router over them."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec

from kvrelay.core.handoff import LEAVING_LENDS_S, OrderPolicy, PrefixHolder
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import WorkerUnavailableError
from kvrelay.frontend.cluster.adapters import RunTimeAdapters
from kvrelay.frontend.cluster.cold_start import ColdStart
from kvrelay.frontend.cluster.worker_link import WorkerLink
from kvrelay.frontend.loop_turns import LoopTurns
from kvrelay.frontend.tokens.tokenizer import Tokenizer
from kvrelay.placement.ways import Ways
from kvrelay.router import IndexState, PairRouter, Router, RoutingRequest, RuntimeSettings

RECONNECT_S = 1.0
"""A pause of this process or of the network breaks all connections at once. New ones take some tens of ms after it."""


class WorkerState(msgspec.Struct, frozen=True):
    """A worker as this frontend knows it, and the work that it has done over the current connection."""

    worker_id: str
    index: IndexState
    requests: int
    computed_tokens: int
    cached_tokens: int
    generated_tokens: int


class WorkerLinks(msgspec.Struct, frozen=True):
    """Where a request runs. ``prefill``: the other half of the pair, if there is one. ``ways``: the estimates that have
    decided between pair and decode worker, if they did."""

    decode: WorkerLink
    prefill: WorkerLink | None = None
    holder: PrefixHolder | None = None
    """Another worker whose prefix may be read by the one of these that prefills."""
    ways: Ways | None = None


class Model:
    """Workers come and go; the model stays known, so that a request without a worker is told to retry.

    All workers have the weights of ``first``, the worker for which the model was made: any of them may continue a
    request.
    """

    def __init__(
        self,
        first: WorkerInfo,
        tokenizer: Tokenizer,
        pairs: PairRouter,
        known_adapters: RunTimeAdapters,
        cold_start: ColdStart | None = None,
    ) -> None:
        self.name = first.model
        self.root = first.model_path
        self.weights_fingerprint = first.weights_fingerprint
        self.tokenizer_fingerprint = first.tokenizer_fingerprint
        self.adapter = first.adapter
        self.known_adapters = known_adapters
        self.adapters = known_adapters.served(first.model, first.adapters, {})
        """By name, the ids of the adapters that a request may ask for: each is on at least one worker."""
        self.created_unix_s = int(time.time())
        self.tokenizer = tokenizer
        self.cold_start = cold_start or ColdStart(0.0)
        self.pairs = pairs
        self.router = pairs.decodes
        self._router_config = self.router.config
        self.max_model_len = 0
        self.vocab_size = 0
        self._links: dict[str, WorkerLink] = {}
        self._prefill_links: dict[str, WorkerLink] = {}
        """Workers that take no requests, only halves of pairs."""
        self._broken_s = -math.inf
        self._changed = asyncio.Event()
        self.turns = LoopTurns()
        """In which sequences are placed that have waited for a worker: thousands may have waited for the same one."""

    def __repr__(self) -> str:
        return f"Model({self.name}, workers={sorted(self._links)}, router={self.router!r})"

    def is_of(self, info: WorkerInfo) -> bool:
        """Whether the worker has this model's weights and tokenizer, so that it may continue the model's requests. Its
        adapters may be others: a request runs where the contents are that it was placed with."""
        ours = (self.weights_fingerprint, self.adapter, self.tokenizer_fingerprint)
        return ours == (info.weights_fingerprint, info.adapter, info.tokenizer_fingerprint)

    def called(self, name: str | None) -> str:
        """Its name in the answer to a request for ``name``: an adapter's, or its own."""
        return name if name is not None and name in self.adapters else self.name

    def adapter_of(self, name: str) -> str:
        """The id of the adapter that a request for ``name`` is computed with; empty: none, or the workers' only one.
        Raises WorkerUnavailableError if it is unknown by now."""
        if name != self.name and name not in self.adapters:
            raise WorkerUnavailableError(f"no worker has the adapter `{name}` any more")
        return self.adapters.get(name, "")

    @property
    def is_available(self) -> bool:
        """Whether a worker takes requests now."""
        return bool(self._links)

    @property
    def reconnect_s(self) -> float:
        """How long a request may wait now for a worker whose connection broke; 0: there are workers, or none would
        come."""
        return 0.0 if self.is_available else max(self._broken_s + RECONNECT_S - time.monotonic(), 0.0)

    @property
    def wait_s(self) -> float:
        """The same, also for a worker that a planner starts."""
        return 0.0 if self.is_available else max(self.cold_start.wait_s, self.reconnect_s)

    def connection_broke(self) -> None:
        """That of a worker in discovery."""
        self._broken_s = time.monotonic()

    @property
    def worker_ids(self) -> list[str]:
        """Those that take requests."""
        return list(self._links)

    @property
    def num_workers(self) -> int:
        """With those that only prefill."""
        return len(self._links) + len(self._prefill_links)

    def add_worker(self, info: WorkerInfo, link: WorkerLink) -> None:
        """The worker takes requests or prefills, or has changed. The model's limits are the smallest of all workers
        that take requests."""
        if not info.role.takes_requests:
            self._remove_taker(info.worker_id)
            self._prefill_links[info.worker_id] = link
            self.pairs.prefills.add_worker(info)
            return
        self._remove_prefiller(info.worker_id)
        self._links[info.worker_id] = link
        self.router.add_worker(info)
        self.refresh()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def remove_worker(self, worker_id: str) -> None:
        """Send no new requests to the worker; its running requests continue."""
        self._remove_taker(worker_id)
        self._remove_prefiller(worker_id)

    def _remove_prefiller(self, worker_id: str) -> None:
        if self._prefill_links.pop(worker_id, None) is not None:
            self.pairs.prefills.remove_worker(worker_id)

    def _remove_taker(self, worker_id: str) -> None:
        link = self._links.pop(worker_id, None)
        if link is not None:
            # One that is there still drains or prefills only: its sessions go on elsewhere.
            self.router.remove_worker(worker_id, LEAVING_LENDS_S if link.is_open else 0.0)
            self.refresh()

    def refresh(self) -> None:
        """Workers have changed, or what was loaded at run time. Set each limit to the smallest of the present workers,
        and the adapters to those that any of them has. Without workers the last ones stay."""
        infos = [link.info for link in self._links.values()]
        published = [each for info in infos for each in info.adapters] if infos else self.adapters.values()
        self.adapters = self.known_adapters.served(self.name, published, self.adapters)
        if infos:
            self.max_model_len = min(info.max_model_len for info in infos)
            self.vocab_size = min(info.vocab_size for info in infos)

    def place(self, request: RoutingRequest, order: OrderPolicy, *, must_be_local: bool = False) -> WorkerLinks:
        """The worker or pair for a request, which counts as placed there. ``must_be_local``: no other worker may
        prefill it.

        Raises WorkerUnavailableError.
        """
        if order is OrderPolicy.DECODE_FIRST or (order is OrderPolicy.AUTO and not self._prefill_links):
            chosen, prefill, ways = self.router.choose(request), None, None
        else:
            decision = self.pairs.choose(request, order, must_be_local=must_be_local)
            chosen, prefill, ways = decision.decode, decision.prefill, decision.ways
        worker_id = chosen.worker_id
        link = self._links.get(worker_id)
        if link is None:
            self.leave(request.request_id)
            raise WorkerUnavailableError(f"worker {worker_id} is not connected")
        if prefill is None:
            return WorkerLinks(link, holder=chosen.holder, ways=ways)
        return WorkerLinks(link, self._prefill_links.get(prefill.worker_id), holder=prefill.holder, ways=ways)

    def leave(self, request_id: str, num_output_tokens: int = 0) -> None:
        """A placed request has left its worker, or both of its pair."""
        self.router.finished(request_id, num_output_tokens)
        self.pairs.prefilled(request_id)

    # -- what workers publish -----------------------------------------------------------------------------------------

    def router_of(self, worker_id: str) -> Router:
        """Which of the routers hears what this worker publishes."""
        return self.pairs.prefills if worker_id in self._prefill_links else self.router

    def tune(self, settings: RuntimeSettings) -> None:
        """Apply the run-time settings on top of those that the router was started with."""
        config = settings.apply(self._router_config)
        for router in (self.router, self.pairs.prefills):
            if config != router.config:
                router.configure(config)

    def worker_states(self) -> list[WorkerState]:
        """The workers that take requests, in order of arrival."""
        return [
            WorkerState(worker_id, self.router.index_state(worker_id), *msgspec.structs.astuple(link.counts))
            for worker_id, link in self._links.items()
        ]

    def next_change(self) -> asyncio.Event:
        """An event that is set when a worker is added or comes back."""
        return self._changed
