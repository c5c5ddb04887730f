"""What workers know that have served: the costs that they were given, and a copy each."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.config import EngineConfig
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec, parse_event
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.learnt import learnt_by_serving
from kvrelay.simulate.simulation import Simulation

COSTS = Costs(
    step=msgspec.structs.replace(Costs().step, step_s=0.01, prefill_s=0.02, prefill_token_s=2e-5, pair_s=1e-9),
    transfer_overhead_s=0.002,
)


def test_they_have_learnt_the_costs_of_their_steps() -> None:
    """Times do not scatter, so the fits are as good as their priors are weak."""
    learnt, true = learnt_by_serving(COSTS, EngineConfig()), COSTS.step
    for name in ("step_s", "decode_s", "context_s", "prefill_s", "prefill_token_s", "pair_s"):
        assert getattr(learnt.decode.cost, name) == pytest.approx(getattr(true, name), rel=0.03), name
    for name in ("prefill_s", "prefill_token_s", "pair_s"):
        assert getattr(learnt.prefill.cost, name) == pytest.approx(getattr(true, name), rel=0.03), name


def test_they_have_learnt_what_a_remote_prefill_takes() -> None:
    """From the push of 2,048 tokens, one step's chunk, to the first token: the queue's hop, a claim and its grant, the
    step, the transfer; and in the mean half a step of the decode worker, which looks between two of them. With a prompt
    in it such a step takes twice ``prefill_s``, which is above the objective."""
    step = COSTS.step
    compute_s = step.prefill_s + 2048 * step.prefill_token_s
    move_s = COSTS.transfer_overhead_s + 2048 * COSTS.token_bytes / COSTS.link_bytes_per_s
    least_s = COSTS.queue_hop_s + 2 * COSTS.hop_s + compute_s + move_s
    remote = learnt_by_serving(COSTS, EngineConfig()).remote
    assert remote.num_samples > 20
    assert 0.9 * least_s < remote.cost.seconds(2048, 0) < 1.1 * (least_s + step.prefill_s)


def test_they_have_learnt_what_waiting_behind_other_prefills_takes() -> None:
    """It was computed one after the other, in chunks of 2,048 tokens that cost ``prefill_s`` each."""
    remote = learnt_by_serving(COSTS, EngineConfig()).remote.cost
    token_s = COSTS.step.prefill_s / 2048 + COSTS.step.prefill_token_s
    assert 0.8 * token_s < remote.wait_token_s < 1.2 * token_s
    assert remote.prefill_token_s == pytest.approx(token_s, rel=0.2)


def test_the_first_workers_know_it_and_later_ones_do_not() -> None:
    learnt = learnt_by_serving(COSTS, EngineConfig())
    load = [Arrival(time_s=60.0, prompt_tokens=100, answer_tokens=2)]
    spec = ClusterSpec(prefill=1, decode=1, events=(parse_event("1s:start:decode"),))
    simulation = Simulation(spec, load, COSTS, learnt=learnt)
    first, before = simulation.workers["d0"], learnt.decode.num_samples
    assert first.core.metrics().step_cost == learnt.decode.cost
    assert simulation.workers["p0"].core.metrics().step_cost == learnt.prefill.cost
    simulation.run()
    assert simulation.workers["d1"].learnt.decode.num_samples <= 2
    assert first.learnt.decode is not learnt.decode
    assert learnt.decode.num_samples == before
