"""How loaded the backend is: what it was given, and how long a full one is left alone. Pure.

A full backend gets pauses that grow from refusal to refusal, and a probe after each:

    refused ──> pause ──> one request tries ──answered──> as before
                  ^              │
                  └── refused, or no answer within PROBE_S: the next one may try

What the backend asks for is an upper bound: it may have room long before, and it may ask for a year.
"""

from __future__ import annotations

from kvrelay.config import EngineConfig
from kvrelay.core.clock import Clock
from kvrelay.core.events import LoadMetrics, TokenCounts
from kvrelay.engine.contract import EngineFacts
from kvrelay.engine.stats import DraftCounts, EngineStats, EngineTimes
from kvrelay.engines.hosted.costs import HostedCosts

FIRST_S = 1.0
LONGEST_S = 30.0
PROBE_S = 1.0


class Backoff:
    """Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pause_s = 0.0
        """0: the backend has answered a request since it refused one."""
        self._until_s = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until a new request may try; 0: now."""
        return max(self._until_s - self._clock.now(), 0.0)

    def tries(self) -> bool:
        """A request is sent to the backend. Whether it is the probe after a pause."""
        is_probe = self._pause_s > 0 and not self.wait_s
        if is_probe:
            self._until_s = self._clock.now() + PROBE_S
        return is_probe

    def refused(self, retry_after_s: float, *, is_probe: bool) -> None:
        """The refusals of one burst count once."""
        if is_probe or not self._pause_s:
            self._pause_s = min(2 * self._pause_s or FIRST_S, LONGEST_S)
        self._until_s = self._clock.now() + min(retry_after_s, self._pause_s)

    def answered(self, *, is_probe: bool) -> None:
        """The backend computes the request. One that was sent before a refusal proves nothing."""
        if is_probe:
            self._pause_s = self._until_s = 0.0


class HostedLoad:
    """Counts since the start. Blocks and slots are as configured, counted over this worker's requests only: the real
    pool is in the backend's own metrics."""

    def __init__(self, worker_id: str, facts: EngineFacts, config: EngineConfig, drafts: DraftCounts | None) -> None:
        self._worker_id = worker_id
        self._num_blocks = facts.num_blocks
        self._num_slots = config.max_num_seqs
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.times = EngineTimes()
        self._drafts = drafts

    def load(
        self, num_requests: int, num_active_blocks: int, costs: HostedCosts, num_waiting_tokens: int
    ) -> LoadMetrics:
        """The load now. ``num_waiting_tokens``: of prompts that the backend does not have yet."""
        return LoadMetrics(
            worker_id=self._worker_id,
            num_admitted=min(num_requests, self._num_slots),
            num_slots=self._num_slots,
            num_blocks_in_use=min(num_active_blocks, self._num_blocks),
            num_blocks=self._num_blocks,
            num_waiting=max(num_requests - self._num_slots, 0),
            cache_usage=min(num_active_blocks / self._num_blocks, 1.0),
            prefix_hit_rate=self.num_hit_tokens / max(1, self.num_queried_tokens),
            kv_demand=num_active_blocks / self._num_blocks,
            num_running=costs.answers.num_decodes,
            num_prefill_tokens=costs.answers.num_prefill_tokens + num_waiting_tokens,
            step_cost=costs.cost,
            step_cost_source=costs.source,
        )

    def stats(self, load: LoadMetrics, costs: HostedCosts) -> EngineStats:
        """From any thread."""
        drafts, num_prefilled = self._drafts or DraftCounts(), self.num_queried_tokens - self.num_hit_tokens
        return EngineStats(
            load,
            TokenCounts(
                num_prefilled,
                self.num_generated_tokens,
                costs.num_steps,
                drafts.num_draft_tokens,
                drafts.num_accepted_tokens,
            ),
            num_queried_tokens=self.num_queried_tokens,
            num_hit_tokens=self.num_hit_tokens,
            num_preemptions=self.num_preemptions,
            step_cost_error=costs.model.relative_error,
            num_step_samples=costs.model.num_samples,
            num_step_samples_rejected=costs.model.num_rejected,
            times=self.times,
            drafts=self._drafts,
        )
