"""A model as the frontend serves it: its tokenizer, its limits, its workers and the router over them."""

from __future__ import annotations

import asyncio
import time

import msgspec

from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import WorkerUnavailableError
from kvrelay.frontend.tokenizer import Tokenizer
from kvrelay.frontend.worker_link import WorkerLink
from kvrelay.router import IndexState, Router, RoutingRequest, RuntimeSettings


class WorkerState(msgspec.Struct, frozen=True):
    """What this frontend knows of a worker and has had done by it, over the connection that it has now."""

    worker_id: str
    index: IndexState
    requests: int
    computed_tokens: int
    cached_tokens: int
    generated_tokens: int


class Model:
    """Workers come and go; the model stays known, so that a request in the gap between two is told to try again.

    All its workers have the weights of ``first``, the worker that it is made for: a request may be continued on any.
    """

    def __init__(self, first: WorkerInfo, tokenizer: Tokenizer, router: Router) -> None:
        self.name = first.model
        self.root = first.model_path
        self.weights_fingerprint = first.weights_fingerprint
        self.tokenizer_fingerprint = first.tokenizer_fingerprint
        self.created_unix_s = int(time.time())
        self.tokenizer = tokenizer
        self.router = router
        self._router_config = router.config
        self.max_model_len = 0
        self.vocab_size = 0
        self._links: dict[str, WorkerLink] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"Model({self.name}, workers={sorted(self._links)}, router={self.router!r})"

    def is_of(self, info: WorkerInfo) -> bool:
        """Whether the worker's weights and tokenizer are this model's: whether it may continue its requests."""
        return (self.weights_fingerprint, self.tokenizer_fingerprint) == (
            info.weights_fingerprint,
            info.tokenizer_fingerprint,
        )

    @property
    def is_available(self) -> bool:
        """Whether a worker takes requests now."""
        return bool(self._links)

    @property
    def worker_ids(self) -> list[str]:
        return list(self._links)

    def add_worker(self, info: WorkerInfo, link: WorkerLink) -> None:
        """The worker takes requests, or has changed. Limits are those of the most modest worker."""
        self._links[info.worker_id] = link
        self.router.add_worker(info)
        self._limit()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def remove_worker(self, worker_id: str) -> None:
        """No new requests go there; those that run there are not touched."""
        if self._links.pop(worker_id, None) is not None:
            self.router.remove_worker(worker_id)
            self._limit()

    def _limit(self) -> None:
        """To what the most modest of the present workers can do. Without workers the last limits stay."""
        infos = [link.info for link in self._links.values()]
        if infos:
            self.max_model_len = min(info.max_model_len for info in infos)
            self.vocab_size = min(info.vocab_size for info in infos)

    def place(self, request: RoutingRequest) -> WorkerLink:
        """The worker for a request, which counts as placed there.

        Raises WorkerUnavailableError.
        """
        decision = self.router.choose(request)
        link = self._links.get(decision.worker_id)
        if link is None:
            self.router.finished(request.request_id, 0)
            raise WorkerUnavailableError(f"worker {decision.worker_id} is not connected")
        return link

    def tune(self, settings: RuntimeSettings) -> None:
        """Route as the settings say, over those that the router was started with."""
        config = settings.apply(self._router_config)
        if config != self.router.config:
            self.router.configure(config)

    def worker_states(self) -> list[WorkerState]:
        """Of those that take requests, in order of arrival."""
        return [
            WorkerState(
                worker_id=worker_id,
                index=self.router.index_state(worker_id),
                requests=link.tally.requests,
                computed_tokens=link.tally.computed_tokens,
                cached_tokens=link.tally.cached_tokens,
                generated_tokens=link.tally.generated_tokens,
            )
            for worker_id, link in self._links.items()
        ]

    def next_change(self) -> asyncio.Event:
        """Set when the next worker is added, or back."""
        return self._changed
