"""What nobody gave is chosen by what was measured; what was given is kept."""

from __future__ import annotations

from pathlib import Path

from kvrelay.core.step_cost import StepCost
from kvrelay.evaluate.options import OBJECTIVES, EvaluateOptions, suited

SLOW = StepCost(step_s=0.05, prefill_s=0.06, prefill_token_s=1e-3, pair_s=0.0, decode_s=7e-3, context_s=0.0)
FAST = StepCost(step_s=1e-3, prefill_s=2e-3, prefill_token_s=1e-5, pair_s=0.0, decode_s=1e-5, context_s=0.0)


def options(*unset: str) -> EvaluateOptions:
    return EvaluateOptions("m", Path("m"), Path("out"), 500.0, 25.0, load_spec="poisson", slots=4, unset=unset)


def test_objectives_are_those_that_a_slow_machine_can_hold() -> None:
    """Three times 1,000 tokens in one step, and three times a step of eight answers."""
    found = suited(options(*OBJECTIVES), SLOW, 0.8, 1000.0)
    assert (found.slo_ttft_ms, found.slo_itl_ms) == (3200.0, 320.0)
    assert found.load_spec == "poisson"


def test_a_fast_machine_keeps_the_usual_ones() -> None:
    found = suited(options(*OBJECTIVES), FAST, 50.0, 1000.0)
    assert (found.slo_ttft_ms, found.slo_itl_ms) == (500.0, 25.0)


def test_the_load_has_half_of_what_the_slots_can_do() -> None:
    found = suited(options("load_spec"), SLOW, 0.8, 1000.0)
    assert found == EvaluateOptions(
        "m", Path("m"), Path("out"), 500.0, 25.0, load_spec="poisson:rate=0.8", slots=4, unset=("load_spec",)
    )
    assert suited(options(), SLOW, 0.8, 1000.0) == options()
