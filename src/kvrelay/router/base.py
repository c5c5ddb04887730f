"""The values that go into and come out of a Router."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.handoff import PrefixHolder
from kvrelay.core.workers import WorkerInfo
from kvrelay.placement.seconds import Candidates, FloatColumn

ReplayRequester = Callable[[str, bytes], None]
"""``request_replay(worker_id, request)``: the router misses events of that worker. The callback sends ``request`` to
the worker's replay service over the event bus and passes the answer to ``Router.apply_replay``. It must not block. If
no answer comes, it does nothing: the router asks again, driven by the worker's load samples."""


class RoutingRequest(msgspec.Struct, frozen=True):
    """A request as the policies see it. ``exclude`` names workers that have already failed this request. Only workers
    with its ``adapter`` are candidates. Its own objectives are in milliseconds; 0: the configured ones."""

    request_id: str
    token_ids: Sequence[int]
    max_tokens: int = 0
    exclude: Collection[str] = ()
    cache_salt: str | None = None
    adapter: str = ""
    slo_ttft_ms: float = 0.0
    slo_itl_ms: float = 0.0
    sequence_hashes: tuple[int, ...] | None = None
    """Of the complete blocks, if the caller knows them; None: they are computed."""


class CandidateScore(msgspec.Struct, frozen=True):
    """One worker's numbers in a decision, for ``--explain`` and logs.

    The times are the terms of the cost in seconds (``placement/seconds.py``); None if weights decided.
    """

    worker_id: str
    score: float
    overlap_blocks: int = 0
    cache_usage: float = 0.0
    num_waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    first_token_s: float | None = None
    lost_prefix_s: float | None = None
    decode_s: float | None = None
    load_s: float | None = None


class RoutingDecision(msgspec.Struct, frozen=True):
    """The chosen worker. ``hit_rate`` is the estimated share of the prompt in its cache (0 to 1), ``overlap_blocks``
    the same in blocks. ``load_blocks``: further blocks that it would load rather than compute; ``holder``: from this
    worker, or from its own tiers."""

    worker_id: str
    policy: str
    hit_rate: float
    overlap_blocks: int
    load_blocks: int = 0
    holder: PrefixHolder | None = None


class RoutingExplanation(RoutingDecision, frozen=True):
    """A decision and its reasons: the numbers of every candidate."""

    candidates: tuple[CandidateScore, ...] = ()


class IndexState(enum.StrEnum):
    """What the router knows of a worker's prefixes: all; being asked for; guessed from placements; not looked at."""

    SYNCED = "synced"
    CATCHING_UP = "catching up"
    APPROXIMATE = "approximate"
    NONE = "none"


class RouterStage(enum.Enum):
    """Which workers compete. REQUEST: workers to which frontends send requests (decode-first order, and the decode half
    of a pair). PREFILL: workers that prefill (the prefill half of a pair in prefill-first order)."""

    REQUEST = "request"
    PREFILL = "prefill"

    def admits(self, info: WorkerInfo) -> bool:
        if self is RouterStage.PREFILL:
            return info.role is not WorkerRole.DECODE
        return info.role.takes_requests


class Survey(msgspec.Struct, frozen=True):
    """Everything that a decision looks at, in row order: the competing workers, their numbers, the policy's scores."""

    worker_ids: list[str]
    workers: Mapping[str, WorkerInfo]
    candidates: Candidates
    scores: FloatColumn
    sequence: tuple[int, ...]
    """The prompt's sequence hashes."""
    holders: Sequence[PrefixHolder | None] = ()
    """Of which worker each could read; empty: none of any."""

    @property
    def infos(self) -> list[WorkerInfo]:
        return [self.workers[worker_id] for worker_id in self.worker_ids]
