"""What a StreamedEngine counts, as load samples and as statistics. It knows numbers, not requests."""

from __future__ import annotations

from kvrelay.config import EngineConfig
from kvrelay.core.events import LoadMetrics
from kvrelay.engine.contract import EngineFacts
from kvrelay.engine.stats import EngineStats, EngineTimes


class Tally:
    """Counts since the start. Blocks and slots are as configured, counted over this worker's requests only: steps and
    the real pool are in the backend's own metrics."""

    def __init__(self, worker_id: str, facts: EngineFacts, config: EngineConfig) -> None:
        self._worker_id = worker_id
        self._num_blocks = facts.num_blocks
        self._num_slots = config.max_num_seqs
        self._num_samples = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_generated_tokens = 0
        self.times = EngineTimes()

    def load(self, num_running: int, num_active_blocks: int) -> LoadMetrics:
        """The next load sample."""
        self._num_samples += 1
        return LoadMetrics(
            worker_id=self._worker_id,
            request_active_slots=min(num_running, self._num_slots),
            request_total_slots=self._num_slots,
            kv_active_blocks=min(num_active_blocks, self._num_blocks),
            kv_total_blocks=self._num_blocks,
            num_requests_waiting=max(num_running - self._num_slots, 0),
            gpu_cache_usage_perc=min(num_active_blocks / self._num_blocks, 1.0),
            gpu_prefix_cache_hit_rate=self.num_hit_tokens / max(1, self.num_queried_tokens),
            kv_demand_perc=num_active_blocks / self._num_blocks,
            seq=self._num_samples,
        )

    def stats(self, num_running: int, num_active_blocks: int) -> EngineStats:
        """From any thread."""
        return EngineStats(
            num_running=min(num_running, self._num_slots),
            num_waiting=max(num_running - self._num_slots, 0),
            num_blocks=self._num_blocks,
            num_blocks_in_use=min(num_active_blocks, self._num_blocks),
            num_blocks_quarantined=0,
            num_blocks_demanded=num_active_blocks,
            num_queried_tokens=self.num_queried_tokens,
            num_hit_tokens=self.num_hit_tokens,
            num_prefill_tokens=self.num_queried_tokens - self.num_hit_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_steps=0,
            num_preemptions=0,
            times=self.times,
        )
