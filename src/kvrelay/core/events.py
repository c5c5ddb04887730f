"""The events of an engine's prefix cache and the samples of its load, as workers publish them."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from kvrelay.core.activity import Activity
from kvrelay.core.step_cost import MAX_COST_S, CostSource, StepCost
from kvrelay.core.workers import Count


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Consecutive blocks became full and immutable, under ``parent_hash`` (None: at the root).

    ``block_hashes`` are sequence hashes, which stand for the tokens in a twentieth of the bytes. ``medium``: of a KV
    tier that holds a copy (``host``, ``disk``), whose parent may lie elsewhere; None: the device's pool, as always
    before there were tiers.
    """

    parent_hash: int | None
    block_hashes: tuple[int, ...]
    block_size: int
    medium: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks (by sequence hash) were evicted from ``medium`` and can no longer be found there."""

    block_hashes: tuple[int, ...]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The prefix cache is empty, and so is every tier."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True):
    """Events of one worker, in order. ``first_seq`` numbers the first event; they are numbered without gaps."""

    worker_id: str
    epoch: int
    first_seq: int
    events: tuple[KvEvent, ...]
    version: int = 1


MAX_TRANSFER_PEERS = 16
"""A load sample has the transfer costs of so many peers at most."""
MAX_TRANSFER_TOKEN_S = 1.0


class TransferCost(msgspec.Struct, frozen=True):
    """What moving the KV of one token between the publisher and ``worker_id`` takes, in seconds, as measured."""

    worker_id: str
    token_s: float

    @property
    def is_sound(self) -> bool:
        """Whether it can be a time: a worker may publish anything."""
        return 0.0 < self.token_s <= MAX_TRANSFER_TOKEN_S


MAX_LOAD_COSTS = 8
"""A load sample has the load costs of so many media at most."""


class LoadCost(msgspec.Struct, frozen=True, array_like=True):
    """What getting KV into the publisher's pool from ``medium`` takes, as measured: ``overhead_s`` for each prompt, and
    ``token_s`` for each token."""

    medium: str
    token_s: float
    overhead_s: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether these can be times: a worker may publish anything."""
        return 0.0 < self.token_s <= MAX_TRANSFER_TOKEN_S and 0.0 <= self.overhead_s <= MAX_COST_S


MAX_FLOWS = 32
"""A load sample has so many flows at most."""


class Flow(msgspec.Struct, frozen=True, array_like=True):
    """What the publisher has moved to or from ``worker_id`` since its start: ended transfers, the bytes that arrived,
    and seconds from submission to end. ``is_read``: the publisher read; else it wrote."""

    worker_id: str
    is_read: bool
    num_transfers: int
    num_bytes: int
    seconds: float

    @property
    def is_sound(self) -> bool:
        """Whether these can be counts: a worker may publish anything."""
        return min(self.num_transfers, self.num_bytes) >= 0 and 0.0 <= self.seconds < math.inf


MAX_AVOIDED = 64
"""A load sample names so many avoided workers at most."""


class TokenCounts(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that an engine has prefilled and generated since its start, in ``num_steps`` forward passes (0 also of a
    worker of an earlier release); and those that it has drafted and accepted, with speculative decoding."""

    num_prefilled: int = 0
    num_generated: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


STALE_AFTER_S = 35.0
"""A worker whose last load sample is older than this has fallen silent: an idle one repeats its sample every 16 s
(``worker/reporting/publisher.py``), so two samples in a row are missing."""


Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class LoadMetrics(msgspec.Struct, frozen=True):
    """A worker's load; published at start, before any forward pass, and then regularly. Whoever sums up, shows or plans
    by a worker's load reads this sample. Names on the wire, and in ``kvrelay status --json``, are those of the first
    release.

    The decoder checks the ranges in the types: receivers add these numbers up as floats, which are exact up to 2^53.

    ``num_running`` answers get a token from each step; ``num_admitted`` requests have one of the ``num_slots``, or a
    reserved one: those that run, that prefill here, and that wait for their KV. ``num_blocks_in_use`` of the pool's
    ``num_blocks`` are held or quarantined; ``cache_usage`` is their share.
    ``step_age_s``: age of the running step when the sample was sent; 0 without a running step.
    ``kv_demand``: blocks that requests hold or wait for, as a share of the pool; above 1 if not all fit at once.
    ``num_prefill_tokens``: prompt tokens still to compute, of waiting requests and of those that are being computed.
    ``step_cost``: what a step of this worker costs, as fitted so far, and where that comes from. ``transfer_costs``: of
    the peers used last.
    ``load_costs``: of the tiers that it has, and of other workers' prefixes if it reads those.
    ``avoided``: prefill workers whose KV it declines for now, since they have failed it.
    ``flows``, ``tokens`` and ``activity`` are for people who watch; a worker of an earlier release publishes none.
    """

    worker_id: str
    num_admitted: Count = msgspec.field(name="request_active_slots")
    num_slots: Count = msgspec.field(name="request_total_slots")
    num_blocks_in_use: Count = msgspec.field(name="kv_active_blocks")
    num_blocks: Count = msgspec.field(name="kv_total_blocks")
    num_waiting: Count = msgspec.field(name="num_requests_waiting")
    cache_usage: Share = msgspec.field(name="gpu_cache_usage_perc")
    prefix_hit_rate: Share = msgspec.field(name="gpu_prefix_cache_hit_rate")
    seq: Annotated[int, msgspec.Meta(ge=0)] = 0
    version: int = 1
    kv_demand: Amount = msgspec.field(default=0.0, name="kv_demand_perc")
    step_age_s: Amount = 0.0
    num_running: Count = msgspec.field(default=0, name="num_decoding")
    num_prefill_tokens: Count = 0
    step_cost: StepCost | None = None
    step_cost_source: CostSource = CostSource.MEASURED
    transfer_costs: tuple[TransferCost, ...] = ()
    load_costs: tuple[LoadCost, ...] = ()
    avoided: tuple[str, ...] = ()
    flows: tuple[Flow, ...] = ()
    tokens: TokenCounts | None = None
    activity: Activity | None = None

    @property
    def without_details(self) -> LoadMetrics:
        """Without what concerns single peers and tiers, and what people watch."""
        return msgspec.structs.replace(self, transfer_costs=(), load_costs=(), avoided=(), flows=(), activity=None)

    @property
    def sound(self) -> LoadMetrics:
        """With those costs and flows only that can be: the rest of the sample is worth having. Without a cost the
        receiver falls back to its own."""
        return msgspec.structs.replace(
            self,
            step_cost=self.step_cost if self.step_cost is not None and self.step_cost.is_sound else None,
            transfer_costs=tuple(cost for cost in self.transfer_costs[:MAX_TRANSFER_PEERS] if cost.is_sound),
            load_costs=tuple(cost for cost in self.load_costs[:MAX_LOAD_COSTS] if cost.is_sound),
            avoided=self.avoided[:MAX_AVOIDED],
            flows=tuple(flow for flow in self.flows[:MAX_FLOWS] if flow.is_sound),
        )
