"""What workers count of a chaos run themselves, read from their status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Counts since a worker's start. Sums over workers are lower bounds: the last counts of a killed one are unknown.

    ``remote_prefills``: prompts that were prefilled for another worker. ``recomputes``: those whose KV did not arrive,
    so the decode worker computed it. With transport p2p only: ``spills`` and ``spilled_bytes`` went to the memory pool
    because the buffer was full, ``waits_for_room`` waited for either, ``losses`` found no room in time.
    With KV tiers: prompts whose stored KV was loaded, and loads that failed.
    """

    remote_prefills: int = 0
    recomputes: int = 0
    spills: int = 0
    spilled_bytes: int = 0
    waits_for_room: int = 0
    losses: int = 0
    kv_tier_hits: int = 0
    kv_tier_failures: int = 0


def counts_of(status: Mapping[str, Any]) -> WorkerCounts:
    """From the status of one worker."""
    p2p = status["transfer"]["p2p"] or {}
    tiers = (status["kv_tiers"] or {}).get("counts", {})
    return WorkerCounts(
        remote_prefills=status["prefill"]["num_prefills"],
        recomputes=status["decode"]["num_recomputed"],
        spills=p2p.get("num_spilled", 0),
        spilled_bytes=p2p.get("num_spilled_bytes", 0),
        waits_for_room=p2p.get("num_waited", 0),
        losses=p2p.get("num_lost", 0),
        kv_tier_hits=tiers.get("num_hits", 0),
        kv_tier_failures=tiers.get("num_failed_loads", 0),
    )


def sum_counts(counts: Iterable[WorkerCounts]) -> WorkerCounts:
    """Field by field."""
    return WorkerCounts(*(sum(column) for column in zip(*map(astuple, counts), strict=True)))
