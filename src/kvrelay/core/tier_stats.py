"""The numbers of KV tiers, for metrics and status. Counts since the start; any thread reads them."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvrelay.core.events import LoadCost

PEER = "peer"
"""The medium of prefixes in other workers' pools."""


class StoreStats(msgspec.Struct):
    """Of one store. ``misses``: loads that failed, by reason; ``drops``: blocks that were not stored, by reason."""

    num_loaded: int = 0
    num_stored: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    misses: Counter[str] = msgspec.field(default_factory=Counter)
    drops: Counter[str] = msgspec.field(default_factory=Counter)


class TierCounts(msgspec.Struct):
    """Decisions at admission. ``saved_s``: estimated time to compute what was loaded, less the time to load it;
    ``lost_s``: time of loads that ended in computing after all. ``num_not_worth``: prompts whose stored blocks are
    computed no slower than loaded."""

    num_hits: int = 0
    num_hit_blocks: int = 0
    num_not_worth: int = 0
    num_failed_loads: int = 0
    saved_s: float = 0.0
    lost_s: float = 0.0


class TierStats(msgspec.Struct, frozen=True):
    """``stores``: by medium. ``num_queued``: blocks that wait to be written."""

    counts: TierCounts
    stores: dict[str, StoreStats]
    num_queued: int
    load_costs: tuple[LoadCost, ...] = ()
    """What loads take, by medium."""
