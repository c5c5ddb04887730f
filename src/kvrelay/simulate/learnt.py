"""What workers have learnt of their costs once they have served: simulated workers can begin with it.

It is learnt as by real ones, from a load: an aggregated worker learns its steps; a cluster in which answers leave
no room for prefills learns those of a prefill worker, and what remote prefills take.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kvrelay.config import DisaggConfig, EngineConfig
from kvrelay.core.handoff import OrderPolicy
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.simulation import Simulation
from kvrelay.simulate.worker import Learnt

PROMPTS, ANSWER = (256, 2048, 8192), 40
"""Tokens of the prompts, which take turns, and of the answers."""
NUM_REQUESTS = 48
ALL_REMOTE = DisaggConfig(disagg_policy="cost", slo_itl_ms=1.0)
"""No chunk fits between two tokens, so that each prefill here costs more than one elsewhere."""


@lru_cache(64)
def learnt_by_serving(costs: Costs, engine: EngineConfig) -> Learnt:
    """A function of its arguments. ``engine``: of the workers; their pools are as large as the costs say."""
    engine = replace(engine, num_blocks=0, max_model_len=0)
    alone = Simulation(ClusterSpec(both=1, engine=engine), _load(num_clients=4), costs)
    split = ClusterSpec(prefill=1, decode=1, engine=engine, disagg=ALL_REMOTE, order=OrderPolicy.DECODE_FIRST)
    # So many clients that prefills wait for each other, and what that costs is learnt, too.
    pair = Simulation(split, _load(num_clients=8), costs)
    alone.run()
    pair.run()
    return Learnt(
        pair.workers["p0"].learnt.prefill, alone.workers["b0"].learnt.decode, pair.workers["d0"].learnt.remote
    )


def _load(num_clients: int) -> list[Arrival]:
    """Each client sends its next request after the answer to the one before."""
    return [
        Arrival(
            time_s=0.0,
            prompt_tokens=PROMPTS[at // num_clients % len(PROMPTS)],
            answer_tokens=ANSWER,
            after=at - num_clients if at >= num_clients else None,
        )
        for at in range(NUM_REQUESTS)
    ]
