"""The engine's source of KV that another worker's prefix cache has, and this one's lacks.

    router ── GenerateRequest.holder ──> Request.holder ── find: read or compute? ── load ──> the prefill side's ledger
    the ledger: claim, grant, read, verify, release ── ended ──> ``kv_loaded``

The frontend's router names the holder, by its events. What it says is a hint: the holder may have evicted the blocks,
and then the request computes. Who may read which blocks for how long is the ledgers' (``handoff/base.py``): a prefix is
a hand-off without a request. A holder is asked once for each request.

Reading is measured for each holder: from the claim to the grant, which waits for the end of a step there, and the read
of a block. What costs more than computing is computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sized

import msgspec

from kvrelay.core.events import LoadCost
from kvrelay.core.handoff import new_prefix_id
from kvrelay.core.latest import Latest
from kvrelay.core.layout import BlockRun, KVLayout
from kvrelay.core.step_cost import StepCost
from kvrelay.core.tier_stats import PEER, StoreStats, TierCounts, TierStats
from kvrelay.engine.kv_source import Hit, Loaded
from kvrelay.engine.request import Request
from kvrelay.engine.step import KvLoad, StepOutput
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason
from kvrelay.handoff.messages import Prefix
from kvrelay.tiers.policy import LoadTime
from kvrelay.worker.sides.prefill import OutgoingHandoffs

PRIOR_WAIT_S = 0.005
PRIOR_BYTES_PER_S = 1e9
MIN_GRANT_S = 0.25
"""A grant may take as long as computing would, and at least this."""
MAX_HOLDERS = 256


class _Holder(msgspec.Struct):
    """What reading from one worker takes."""

    wait: LoadTime
    block: LoadTime

    def seconds(self, num_blocks: int, num_before: int) -> float:
        """``num_before``: blocks of reads that have not ended."""
        return self.wait.block_s + (num_blocks + num_before) * self.block.block_s


class PeerPrefixes:
    """A ``SourceBeyond``. ``layout``: of this worker's pool; ``term``: its own, now; ``cost`` returns the costs of
    computing."""

    pending: Sized = ()

    def __init__(
        self,
        worker_id: str,
        layout: KVLayout,
        handoffs: OutgoingHandoffs,
        term: Callable[[], int],
        cost: Callable[[], StepCost],
    ) -> None:
        self._worker_id = worker_id
        self._layout = layout
        self._handoffs = handoffs
        self._term = term
        self._cost = cost
        self._loaded: Loaded = lambda _, __, ___: None
        self._holders: Latest[str, _Holder] = Latest(MAX_HOLDERS)
        self._all = self._new_holder()
        """The mean of all holders: what is expected of one that is not known, and published."""
        self._lock = threading.Lock()
        """For the numbers: reads begin and end on other threads."""
        self._num_reading = 0
        self.counts, self.store = TierCounts(), StoreStats()

    def __repr__(self) -> str:
        return f"PeerPrefixes({self._num_reading} blocks being read, {self.counts})"

    def start(self, loaded: Loaded, changed: Callable[[], None] = lambda: None) -> None:
        self._loaded = loaded

    def stats(self) -> TierStats:
        """From any thread."""
        return TierStats(self.counts, {PEER: self.store}, 0)

    def load_cost(self) -> LoadCost:
        """What reading takes, for the router. From any thread."""
        return LoadCost(PEER, self._all.block.block_s / self._layout.block_size, self._all.wait.block_s)

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    def find(self, request: Request, first_block: int) -> Hit | None:
        holder = request.holder
        if holder is None:
            return None
        size = self._layout.block_size
        num_blocks = min(holder.num_tokens, len(request.token_ids) - 1) // size - first_block
        if num_blocks <= 0 or holder.worker_id == self._worker_id:
            return None
        known = self._holders.get(holder.worker_id) or self._all
        seconds = known.seconds(num_blocks, self._num_reading)
        if self._recompute_seconds(num_blocks, first_block) <= seconds:
            # Admission asks before the request has blocks, and may ask again; the request is counted as it is placed.
            if request.block_ids:
                self.counts.num_not_worth += 1
                known.wait.refused()
                known.block.refused()
            return None
        return Hit(num_blocks, seconds, media=(PEER,) * num_blocks)

    def load(self, request: Request, load: KvLoad, output: StepOutput) -> None:
        holder, request.holder = request.holder, None
        assert holder is not None, "what was not found is not loaded"
        num_tokens = (load.first_block + len(load.block_ids)) * self._layout.block_size
        saves_s = self._recompute_seconds(len(load.block_ids), load.first_block)
        with self._lock:
            self._num_reading += len(load.block_ids)
            self.counts.num_hits += 1
            read = _Read(self, holder.worker_id, load, saves_s)
        wanted = pe.PrefixWanted(
            new_prefix_id(holder.worker_id),
            holder.worker_id,
            BlockRun(load.first_block, load.block_ids),
            Prefix(tuple(request.token_ids[:num_tokens]), request.sampling.cache_salt),
            self._term(),
            max(saves_s, MIN_GRANT_S),
        )
        self._handoffs.read_prefix(read, wanted)

    def _recompute_seconds(self, num_blocks: int, first_block: int) -> float:
        size = self._layout.block_size
        return self._cost().extra_seconds(num_blocks * size, first_block * size)

    # -- on any thread ------------------------------------------------------------------------------------------------

    def ended(self, read: _Read, num_blocks: int, reason: EndReason | None) -> None:
        """``num_blocks`` are here and have proved themselves."""
        now_s = time.monotonic()
        with self._lock:
            self._num_reading -= len(read.load.block_ids)
            self.counts.num_hit_blocks += num_blocks
            self.store.num_loaded += num_blocks
            self.store.load_s += now_s - read.began_s
            if num_blocks:
                self.store.loaded_bytes += read.num_bytes
                self.counts.saved_s += read.saves_s * num_blocks / len(read.load.block_ids) - (now_s - read.began_s)
                self._took(read, num_blocks, now_s)
            else:
                self.counts.num_failed_loads += 1
                self.counts.lost_s += now_s - read.began_s
                self.store.misses[EndReason.READ_FAILED if reason is None else reason] += 1
        self._loaded(read.load.request_id, num_blocks == len(read.load.block_ids), num_blocks)

    def _took(self, read: _Read, num_blocks: int, now_s: float) -> None:
        known = self._holders.get(read.worker_id)
        if known is None:
            known = self._holders[read.worker_id] = self._new_holder()
        for holder in (known, self._all):
            holder.wait.took(1, read.granted_s - read.began_s)
            holder.block.took(num_blocks, now_s - read.granted_s)

    def _new_holder(self) -> _Holder:
        return _Holder(LoadTime(PRIOR_WAIT_S), LoadTime(self._layout.block_bytes / PRIOR_BYTES_PER_S))


class _Read(msgspec.Struct):
    """The reading of one prefix (``PrefixRead``)."""

    source: PeerPrefixes
    worker_id: str
    load: KvLoad
    saves_s: float
    began_s: float = msgspec.field(default_factory=time.monotonic)
    granted_s: float = 0.0
    num_bytes: int = 0

    def begins(self, num_bytes: int) -> None:
        self.granted_s, self.num_bytes = time.monotonic(), num_bytes

    def ended(self, ok: bool, num_blocks: int, reason: EndReason | None) -> None:
        self.source.ended(self, num_blocks if ok else 0, reason)
