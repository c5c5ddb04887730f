"""The router's contract: which worker gets a request.

What it owns: what is known of the workers of one model (who holds which prefixes, who carries how much load), and the
policies over it. What it does not know: HTTP, sockets, the control plane; those who hear something call ``add_worker``,
``apply_events`` and so on. Everything is synchronous and runs on the frontend's event loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from kvrelay.config import RouterConfig
from kvrelay.core.events import KvEventBatch, LoadMetrics
from kvrelay.core.workers import WorkerInfo

ReplayRequester = Callable[[str, bytes], None]
"""``request_replay(worker_id, request)``: the router misses events of that worker. Whoever has the event bus sends
``request`` to the worker's replay service and gives the answer to ``Router.apply_replay``. Must not block. When no
answer comes there is nothing to do: the router asks again, driven by the worker's load samples."""


class RoutingRequest(msgspec.Struct, frozen=True):
    """What a policy may look at. ``exclude`` names workers that have already failed this request."""

    request_id: str
    token_ids: Sequence[int]
    max_tokens: int = 0
    priority: int = 0
    lora: str | None = None
    exclude: Collection[str] = ()


class CandidateScore(msgspec.Struct, frozen=True):
    """One worker's numbers in a decision, for ``--explain`` and logs."""

    worker_id: str
    score: float
    overlap_blocks: int = 0
    cache_usage: float = 0.0
    num_waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class RoutingDecision(msgspec.Struct, frozen=True):
    """The worker. ``hit_rate`` is the share of the prompt that it is estimated to hold, ``overlap_blocks`` the same in
    blocks."""

    worker_id: str
    policy: str
    hit_rate: float
    overlap_blocks: int


class RoutingExplanation(RoutingDecision, frozen=True):
    """And why: the numbers of every worker that could have been chosen."""

    candidates: tuple[CandidateScore, ...]


class IndexState(enum.StrEnum):
    """What is known of a worker's prefixes: all; being asked for; only guessed from placements; not looked at."""

    SYNCED = "synced"
    CATCHING_UP = "catching up"
    APPROXIMATE = "approximate"
    NONE = "none"


class Router(Protocol):
    """Routes the requests of one model. Workers are named by ``WorkerInfo.worker_id``."""

    @property
    def config(self) -> RouterConfig: ...

    @property
    def block_size(self) -> int:
        """Tokens per block in the index and in decisions."""

    def configure(self, config: RouterConfig) -> None:
        """Change policy or weights, from the next decision on; load and placements are kept."""

    def add_worker(self, info: WorkerInfo) -> None:
        """A worker that takes requests appeared, or re-registered with another epoch."""

    def remove_worker(self, worker_id: str) -> None: ...

    def choose(self, request: RoutingRequest) -> RoutingDecision:
        """Pick a worker and count the request as placed there. Raises WorkerUnavailableError when there is none."""

    def explain(self, request: RoutingRequest) -> RoutingExplanation:
        """What ``choose`` would say now, and why, without a trace: nothing is placed, no turn is taken. Raises as
        ``choose`` does."""

    def first_token(self, request_id: str) -> None:
        """The prefill of a placed request is done."""

    def finished(self, request_id: str, num_output_tokens: int) -> None:
        """A placed request has left its worker, for whatever reason."""

    def apply_events(self, batch: KvEventBatch) -> None: ...

    def apply_replay(self, worker_id: str, reply: bytes) -> None:
        """The worker's answer to what was handed to the ReplayRequester. A malformed one is counted and dropped."""

    def apply_metrics(self, metrics: LoadMetrics) -> None: ...

    def index_state(self, worker_id: str) -> IndexState: ...

    def indexed_blocks(self, worker_id: str) -> list[int]:
        """Sequence hashes of the blocks that the worker is known to hold, by its own events. For diagnosis: it takes
        time in proportion to the whole index."""
