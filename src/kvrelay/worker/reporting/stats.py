"""A worker's counts of its two sides, since start, for metrics and status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from kvrelay.core.activity import Activity, SessionActivity, Spent
from kvrelay.core.histogram import Histogram
from kvrelay.core.process_usage import Usage
from kvrelay.core.tier_stats import TierStats
from kvrelay.engine.stats import EngineStats, SessionStats
from kvrelay.handoff.base import EndReason, RefusalReason
from kvrelay.placement.cost_model import RemoteCost

C = TypeVar("C", bound=msgspec.Struct)


def by_reason(counts: Mapping[EndReason, int] | Mapping[RefusalReason, int]) -> dict[str, int]:
    """For metrics and status: the reasons' names, since their values are sentences."""
    return {reason.name.lower(): count for reason, count in dict(counts).items()}


def copied(counts: C) -> C:
    """A copy that later counting does not change: its fields are numbers and mappings of numbers."""
    values = msgspec.structs.asdict(counts)
    return type(counts)(**{name: value.copy() if isinstance(value, dict) else value for name, value in values.items()})


class DecodeStats(msgspec.Struct):
    """Counters of the decode side. ``num_early_rejected`` counts the refusals because of an objective,
    ``num_recomputed`` remote prefills whose KV did not arrive, so that
    they were computed here; ``places`` prefills by where they ran and why; ``num_verified_blocks`` blocks with correct
    checksums, ``num_kv_checksum_mismatches`` hand-offs with a wrong block."""

    num_requests: int = 0
    num_refused: int = 0
    num_early_rejected: int = 0
    num_aborted: int = 0
    num_remote_done: int = 0
    num_recomputed: int = 0
    num_stale: int = 0
    num_received_bytes: int = 0
    num_verified_blocks: int = 0
    num_kv_checksum_mismatches: int = 0
    places: dict[str, int] = {}


class RemoteCostStats(msgspec.Struct, frozen=True):
    """The fitted cost of remote prefills, how wrong it was lately (relative), decisions that had to do
    without, and decisions against it, so that it is measured."""

    cost: RemoteCost = RemoteCost()
    error: float = 0.0
    num_samples: int = 0
    num_rejected: int = 0
    num_fallbacks: int = 0
    num_trials: int = 0


def activity_of(
    engine: EngineStats,
    decode: DecodeStats,
    claim_times: Histogram,
    prefixes: TierStats | None,
    block_size: int,
    usage: Usage,
) -> Activity:
    """For the load samples. ``prefixes``: of other workers; ``block_size`` in tokens."""
    tiers = (found.stores for found in (engine.tiers, prefixes) if found is not None)
    times = engine.times
    return Activity(
        places=dict(decode.places),
        loaded={medium: store.num_loaded * block_size for stores in tiers for medium, store in stores.items()},
        claims=_spent(claim_times),
        handoffs=_spent(times.handoff),
        sends=_spent(times.sending),
        prefills=tuple(times.prefill.counts),
        cpu_s=usage.cpu_s,
        rss_bytes=usage.rss_bytes,
        sessions=SessionActivity() if engine.sessions is None else _sessions(engine.sessions),
    )


def _sessions(sessions: SessionStats) -> SessionActivity:
    counts = sessions.counts
    return SessionActivity(
        sessions.num_paused, counts.num_returned, counts.num_missed, sessions.tokens_by_place, counts.saved_s
    )


def _spent(histogram: Histogram) -> Spent:
    return Spent(histogram.count, histogram.total_s)
