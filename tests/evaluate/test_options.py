"""What nobody gave is chosen by what was measured; what was given is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cli.main import run
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


@pytest.mark.parametrize("words", [(), ("--slo-itl-ms", "40")])
def test_what_nobody_gave_begins_as_the_usual_objective(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own default is 0: one that yields."""
    found: list[EvaluateOptions] = []

    def begin(options: EvaluateOptions, *_: object, **__: object) -> None:
        found.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvrelay.evaluate.run.evaluate", begin)
    assert run(["evaluate", "--output-dir", str(tmp_path / "out"), *words]) == 130
    assert (found[0].slo_ttft_ms, found[0].slo_itl_ms) == (500.0, float(words[1]) if words else 25.0)
    assert ("slo_itl_ms" in found[0].unset) is not bool(words)
