"""Agents' sessions on a simulated cluster: who counts them, and where siblings with one root go."""

from __future__ import annotations

from kvrelay.config import DisaggConfig, EngineConfig, TiersConfig
from kvrelay.core.step_cost import StepCost
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loads import generated_arrivals
from kvrelay.simulate.simulation import Simulation


def test_each_turn_counts_once_at_the_worker_that_answers_it() -> None:
    """All prompts are computed by prefill workers, which see the sessions by their prefixes, too."""
    load = generated_arrivals("agents:sessions=6,calls=4,tools=2,prompt=600,answer=20,cached=0.7,rate=2", 1)
    spec = ClusterSpec(
        prefill=2,
        decode=1,
        engine=EngineConfig(num_blocks=2000, block_size=16),
        disagg=DisaggConfig(disagg_policy="always"),
    )
    simulation = Simulation(spec, load, Costs(step=StepCost(prefill_token_s=1e-5)))
    result = simulation.run()
    assert result.places == {"remote": len(load)}
    sessions = [worker.core.stats().sessions for worker in simulation.workers.values()]
    counts = [of_worker.counts for of_worker in sessions if of_worker is not None]
    assert [sum(count.num_begun for count in counts), sum(count.num_returned for count in counts)] == [24, 18]
    assert sum(of_worker.num_paused for of_worker in sessions if of_worker is not None) == 6
    halves = [worker for worker in simulation.workers.values() if worker.worker_id.startswith("p")]
    assert any(worker.core.pauses is not None and len(worker.core.pauses) for worker in halves), (
        "they learn all the same"
    )


def test_turns_that_were_prefetched_wait_for_no_load_and_compute_no_more() -> None:
    """Host memory for all, from which a token comes in a sixth of the time that computing it takes."""
    later_s, computed = [], []
    for prefetch_s in (0.0, 0.3):
        load = generated_arrivals(
            f"agents:sessions=24,calls=12,tools=3,prompt=2000,answer=20,cached=0.9,rate=0.5,prefetch={prefetch_s}", 1
        )
        spec = ClusterSpec(
            both=1, engine=EngineConfig(num_blocks=1200, block_size=16), tiers=TiersConfig(host_kv_cache="64GiB")
        )
        costs = Costs(step=StepCost(prefill_token_s=6e-5), host_bytes_per_s=131072 / 1e-5)
        result = Simulation(spec, load, costs).run()
        assert len(result.done) == len(load)
        waits_s = [request.ttft_s for arrival, request in zip(load, result.requests) if arrival.after is not None]
        later_s.append(sum(waits_s) / len(waits_s))
        computed.append(result.num_computed_tokens)
    assert later_s[1] < 0.9 * later_s[0]
    assert computed[1] < computed[0]
