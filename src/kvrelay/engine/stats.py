"""The numbers of an engine: counts and gauges, durations as histograms, and when its load is sampled.

``EngineStats`` is read without stopping the engine, so also while a long step runs or the engine hangs. Each number is
a true value, but not all of them are from the same moment. Nothing here knows requests or receivers.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.core.events import LoadMetrics, TokenCounts
from kvrelay.core.histogram import TOKEN_BUCKETS_S, Histogram
from kvrelay.core.tier_stats import TierStats
from kvrelay.engine.pauses import PauseCounts


def _of_steps() -> Histogram:
    return Histogram(TOKEN_BUCKETS_S)


class EngineTimes(msgspec.Struct, frozen=True):
    """``queue``: each wait for admission. ``prefill``: from a slot to the first token, or to the end of a hand-off's
    prefill. ``handoff``: decode side, from sending a prefill away to its KV. ``step``: with a forward pass. ``held``:
    decode side, how long KV that has come waits for the pool. ``sending``: prefill side, how long a computed prefill
    keeps the pool's blocks.

    A HostedEngine sees no queue, and steps only if its backend tells them: there ``prefill`` and ``handoff`` begin at
    arrival.
    """

    queue: Histogram = msgspec.field(default_factory=Histogram)
    prefill: Histogram = msgspec.field(default_factory=Histogram)
    handoff: Histogram = msgspec.field(default_factory=Histogram)
    step: Histogram = msgspec.field(default_factory=_of_steps)
    held: Histogram = msgspec.field(default_factory=Histogram)
    sending: Histogram = msgspec.field(default_factory=Histogram)


class HoldingStats(NamedTuple):
    """Of the holding area: gauges, then counts since start."""

    num_blocks: int
    num_blocks_in_use: int
    num_blocks_spilled: int
    """Blocks of host memory with what the area had."""
    num_arriving: int
    """Requests whose KV is still to come."""
    num_held: int
    """Requests that were held, on either side."""
    num_spilled: int
    """Of these, requests whose KV went to host memory."""
    num_full: int
    """Computed prefills that stayed in the pool because there was no room."""


class SessionStats(NamedTuple):
    """Of sessions that pause between two turns. ``counts`` is not copied."""

    num_paused: int
    counts: PauseCounts

    @property
    def tokens_by_place(self) -> dict[str, int]:
        """What returning sessions repeated: found in the pool, in tiers and at other workers by medium, or computed.
        From any thread."""
        found = {"pool": self.counts.pool_tokens, **self.counts.stored_tokens.copy()}
        return {**found, "computed": max(self.counts.returned_tokens - sum(found.values()), 0)}


class DraftCounts(msgspec.Struct):
    """Of speculative decoding, since start: how often tokens were drafted, how many, and how many of them the model
    would have sampled itself. Written on one thread, read on any."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class EngineStats(msgspec.Struct, frozen=True):
    """``load`` is a sample as of now, and ``tokens`` what the published ones carry. The rest is for metrics and status:
    counts since start, but for ``num_blocks_quarantined``, which are lent to hand-offs.

    ``num_queried_tokens`` are the prompt tokens of admitted requests, ``num_hit_tokens`` those of them that the prefix
    cache held.
    """

    load: LoadMetrics
    tokens: TokenCounts = TokenCounts()
    num_blocks_quarantined: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    step_cost_error: float = 0.0
    """Mean of the last steps' |measured - predicted| / measured."""
    step_spread: float = 0.0
    """How far the times of steps with a prefill scatter about their estimates: standard deviation of the logarithm; 0:
    this engine does not measure its steps."""
    num_step_samples: int = 0
    num_step_samples_rejected: int = 0
    times: EngineTimes = msgspec.field(default_factory=EngineTimes)
    """Not copied: they go on."""
    holding: HoldingStats | None = None
    """None: there is no holding area."""
    tiers: TierStats | None = None
    """Of KV beyond the pool, if there is any. Not copied."""
    sessions: SessionStats | None = None
    """None: blocks are retained by recency."""
    drafts: DraftCounts | None = None
    """None: no tokens are drafted. Not copied."""


class LoadSource(Protocol):
    """The part of an EngineCore that is used here."""

    def has_work(self) -> bool: ...

    def metrics(self) -> LoadMetrics: ...


class LoadSampler:
    """Samples ``core`` at most once per ``interval_s`` while it works, and always when its work ends, so that the last
    published load is the current one, or in a moment. Called on the engine's thread, after each step: the publisher
    sends at most 20 samples a second."""

    def __init__(self, core: LoadSource, interval_s: float, clock: Clock) -> None:
        self._core = core
        self._interval_s = interval_s
        self._clock = clock
        self.due_s = clock.now()
        """When the next sample is due while the engine works."""
        self._last: LoadMetrics | None = None
        self._is_owed = False

    @property
    def owed_in_s(self) -> float:
        """Until when a sample is to be asked for that was put off; infinite: none was."""
        return max(self.due_s - self._clock.now(), 0.0) if self._is_owed else math.inf

    def sample(self, *, may_put_off: bool = False) -> LoadMetrics | None:
        """The load now; None if no sample is due, or if nothing has changed since the last one. ``may_put_off``: the
        caller asks again after ``owed_in_s``, so that work which ends at once and often is not sampled each time."""
        now_s = self._clock.now()
        if now_s < self.due_s and (may_put_off or self._core.has_work()):
            self._is_owed = may_put_off
            return None
        self.due_s, self._is_owed = now_s + self._interval_s, False
        load = self._core.metrics()
        # Callbacks also change the load, for example when a release frees blocks.
        if load == self._last:
            return None
        self._last = load
        return load
