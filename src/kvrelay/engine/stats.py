"""The numbers of an engine, for monitoring.

They are read without stopping the engine, so also while a long step runs or the engine hangs. Each number is a true
value, but not all of them are from the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.step_cost import StepCost
from kvrelay.engine.core import EngineCore
from kvrelay.engine.times import EngineTimes


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges, then counts since start.

    ``num_prefill_tokens`` were computed and ``num_generated_tokens`` sampled here, in ``num_steps`` forward passes.
    ``num_queried_tokens`` are the prompt tokens of admitted requests, ``num_hit_tokens`` those of them that the prefix
    cache held. Quarantined blocks count as in use, too. Demanded blocks are those that requests hold or wait for.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_in_use: int
    num_blocks_quarantined: int
    num_blocks_demanded: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_prefill_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions: int
    step_cost: StepCost | None = None
    """The fitted cost of a step; None: this engine does not measure its steps."""
    step_cost_error: float = 0.0
    """Mean of the last steps' |measured - predicted| / measured."""
    num_step_samples: int = 0
    num_step_samples_rejected: int = 0
    times: EngineTimes = field(default_factory=EngineTimes)
    """Not copied: they go on."""


def engine_stats(core: EngineCore) -> EngineStats:
    """May be called from any thread."""
    scheduler, pool = core.scheduler, core.pool
    costs = scheduler.pace.costs
    return EngineStats(
        num_running=scheduler.num_admitted,
        num_waiting=scheduler.num_waiting,
        num_blocks=pool.num_blocks,
        num_blocks_in_use=pool.num_blocks - pool.num_free,
        num_blocks_quarantined=pool.num_quarantined,
        num_blocks_demanded=scheduler.num_demanded_blocks,
        num_queried_tokens=scheduler.admission.num_queried_tokens,
        num_hit_tokens=scheduler.admission.num_hit_tokens,
        num_prefill_tokens=scheduler.num_prefill_tokens,
        num_generated_tokens=scheduler.num_generated_tokens,
        num_steps=scheduler.num_steps,
        num_preemptions=scheduler.num_preemptions,
        step_cost=costs.cost,
        step_cost_error=costs.relative_error,
        num_step_samples=costs.num_samples,
        num_step_samples_rejected=costs.num_rejected,
        times=scheduler.times,
    )
