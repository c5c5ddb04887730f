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
    """A worker as this frontend knows it, and the work that it has done over the current connection."""

    worker_id: str
    index: IndexState
    requests: int
    computed_tokens: int
    cached_tokens: int
    generated_tokens: int


class Model:
    """Workers come and go; the model stays known, so that a request without a worker is told to retry.

    All workers have the weights of ``first``, the worker for which the model was made: any of them may continue a
    request.
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
        """Whether the worker has this model's weights and tokenizer, so that it may continue the model's requests."""
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
        """The worker takes requests, or has changed. The model's limits are the smallest of all workers."""
        self._links[info.worker_id] = link
        self.router.add_worker(info)
        self._limit()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def remove_worker(self, worker_id: str) -> None:
        """Send no new requests to the worker; its running requests continue."""
        if self._links.pop(worker_id, None) is not None:
            self.router.remove_worker(worker_id)
            self._limit()

    def _limit(self) -> None:
        """Set each limit to the smallest of the present workers. Without workers the last limits stay."""
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
        """Apply the run-time settings on top of those that the router was started with."""
        config = settings.apply(self._router_config)
        if config != self.router.config:
            self.router.configure(config)

    def worker_states(self) -> list[WorkerState]:
        """The workers that take requests, in order of arrival."""
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
        """An event that is set when a worker is added or comes back."""
        return self._changed
