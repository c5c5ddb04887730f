"""What the planner knows, what it decides, and who carries that out. Values and one contract.

Everything here is JSON: decisions are logged with their inputs, and a log can be planned again.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.events import LoadMetrics, TokenCounts


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: what it has told last of its load, and what may be done with it.

    ``is_ready``: it is listed, tells its load, and its engine has taken a step; False while it starts, drains or is
    silent. ``is_starting``: it was launched and is not ready yet. ``is_held``: its role was set by hand, so the planner
    leaves it alone. ``may_stop``: the actuator can stop it.
    """

    role: WorkerRole
    load: LoadMetrics
    """A decoder has checked it."""
    block_size: int
    is_ready: bool = True
    is_starting: bool = False
    is_held: bool = False
    may_stop: bool = True

    @property
    def worker_id(self) -> str:
        return self.load.worker_id

    @property
    def tokens(self) -> TokenCounts:
        """Of the engine since its start; 0: unknown."""
        return self.load.tokens or TokenCounts()


Range = tuple[float, float]
"""Seconds, from and to: the bucket of a histogram."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What clients got in the last minute: the 95th percentile of times to first token, and the median between two
    tokens."""

    ttft_s: Range
    itl_s: Range


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """All workers at ``now_s``, in the order of their ids. ``max_workers``: how many may run at once; 0: the planner
    starts and stops none. ``num_queued_prefill_tokens``: tokens of the global prefill queue, in no worker's count.
    ``num_unplaced``: requests that wait at frontends because no worker takes requests.
    ``measured``: None if too few requests have come; ``plan`` does not use it, and who reads its log may.
    ``start_s``: from the launch of a worker until it is ready. ``spread``: standard deviation of the logarithm of a
    step's time. ``chunk``: the most prefill tokens of a step."""

    now_s: float
    workers: tuple[WorkerView, ...]
    max_workers: int = 0
    num_queued_prefill_tokens: int = 0
    num_unplaced: int = 0
    measured: Measured | None = None
    start_s: float = 30.0
    spread: float = 0.1
    chunk: int = 2048


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What has come and ended in the ``duration_s`` seconds before the view. ``num_prompt_tokens`` and
    ``num_uncached_tokens`` are those of the arrived requests, ``sum_squares`` the squares of their uncached tokens.
    ``num_ended`` answers, with ``num_ended_tokens`` in all. ``num_generated_tokens``: of all answers."""

    duration_s: float
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_uncached_tokens: int = 0
    sum_squares: float = 0.0
    num_ended: int = 0
    num_ended_tokens: int = 0
    num_generated_tokens: int = 0


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner aims at. ``horizon_s``: a change must pay for itself within it. ``window_s``: the demand is
    measured over windows of that length. ``min_workers``: with 0, all workers are stopped once nothing has come or run
    for ``quiet_s``, and the next request starts one."""

    ttft_s: float = 0.5
    itl_s: float = 0.025
    min_workers: int = 1
    quiet_s: float = 300.0
    horizon_s: float = 60.0
    window_s: float = 5.0


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """Why. ``lateness``: expected seconds beyond the objectives, of all requests that come in a second, as the fleet is
    and as it would be. ``gain_s`` is their difference over the horizon, ``cost_s`` what the change costs on the way.
    ``utilisation``: of the prefill side and of the decode side, as the fleet is. ``ttft_s`` and ``itl_s`` are estimates
    of the 95th percentile and the mean, those with ``then`` after the change."""

    lateness: float = 0.0
    lateness_then: float = 0.0
    gain_s: float = 0.0
    cost_s: float = 0.0
    requests_per_s: float = 0.0
    uncached_tokens: float = 0.0
    answer_tokens: float = 0.0
    prefill_utilisation: float = 0.0
    decode_utilisation: float = 0.0
    ttft_s: float = 0.0
    itl_s: float = 0.0
    ttft_then_s: float = 0.0
    itl_then_s: float = 0.0


class Widen(msgspec.Struct, frozen=True, tag="widen"):
    """``worker_id`` also takes the other half of the work: prefill -> both, or decode -> both. It drains nothing."""

    worker_id: str
    reason: str
    numbers: Numbers


class Narrow(msgspec.Struct, frozen=True, tag="narrow"):
    """``worker_id``, which does both, ends one half of its work and continues as ``role``."""

    worker_id: str
    role: WorkerRole
    reason: str
    numbers: Numbers


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Launch a worker in ``role``."""

    role: WorkerRole
    reason: str
    numbers: Numbers


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """``worker_id`` drains and ends."""

    worker_id: str
    reason: str
    numbers: Numbers


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Change nothing, and why."""

    reason: str
    numbers: Numbers


Action = Widen | Narrow | Start | Stop | Hold


def words_of(action: Action) -> str:
    """What it does, for people."""
    match action:
        case Widen():
            return f"widen {action.worker_id}"
        case Narrow():
            return f"narrow {action.worker_id} to {action.role}"
        case Start():
            return f"start a {action.role} worker"
        case Stop():
            return f"stop {action.worker_id}"
    return "change nothing"


Plan = tuple[Action, ...]
"""One action at a time: a plan has one entry."""


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """The change that is under way. ``role``: what the view will show instead of ``was``; None: the worker leaves.
    ``worker_id`` is empty for a start, which shows as a ready one that is not among ``known``. Given up at
    ``until_s``."""

    worker_id: str
    role: WorkerRole | None
    was: WorkerRole | None = None
    known: tuple[str, ...] = ()
    until_s: float


class Backlog(msgspec.Struct, frozen=True):
    """What waited at ``at_s``: tokens for a prefill, and answers for a place beside the running ones."""

    at_s: float
    tokens: float
    answers: float


class PlannerState(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner remembers between two calls; the first call gets ``PlannerState()``."""

    samples: tuple[Demand, ...] = ()
    """The demand since it changed last, the oldest first."""
    answer_tokens: float = 0.0
    """Mean length of the answers that have ended; 0: unknown."""
    roles: dict[str, WorkerRole] = {}
    """As seen last, and as ordered since. A worker that shows another one was changed by hand."""
    held: tuple[str, ...] = ()
    """Workers whose role was set by hand."""
    pending: Pending | None = None
    evidence_s: dict[str, float] = {}
    """By kind of change: for how long it has been worth its cost, less the time in which it was not."""
    looked_s: float = 0.0
    """When the evidence was weighed last."""
    backlog: tuple[Backlog, ...] = ()
    """What has waited in the last two windows, since the fleet changed last; the oldest first."""
    least_share: float = 0.0
    """Of prefills that only prefill workers compute: seen when they were late, until a decode worker has some again."""
    direction: str = ""
    """Of the last change, at ``changed_s``; ``num_reversals`` counts recent ones against the one before."""
    changed_s: float = -1e9
    num_reversals: int = 0
    active_s: float | None = None
    """When a request came or ran last, as far as this planner has seen; None: it has not looked yet."""
    told: str = ""
    """The objective that cannot be met, as told; it is told once."""


class Room(msgspec.Struct, frozen=True):
    """``max_workers``: how many may run at once, those that run included; 0: none is started or stopped.
    ``num_starting`` were launched and are not in discovery yet. ``may_stop``: ids of those that can be stopped.
    ``needs_worker``: a host ends if no worker is left."""

    max_workers: int = 0
    num_starting: int = 0
    may_stop: frozenset[str] = frozenset()
    needs_worker: bool = False


class Actuator(Protocol):
    """Carries out actions, one at a time. It does not decide."""

    async def apply(self, action: Action) -> None:
        """Begin the change; return when it has begun and may be seen in the next view. ``Hold`` does nothing.

        Raises KvrelayError if the change is not possible now: the fleet is as it was, and the planner holds.
        """

    async def room(self) -> Room:
        """What can be started and stopped now. Raises KvrelayError."""
