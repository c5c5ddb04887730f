"""The hand-written costs that ship: readable, named as estimates, and in the order of the data sheets."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from kvrelay.simulate.costs import Costs, read_costs


def costs_of(name: str) -> Costs:
    return read_costs(Path(str(resources.files("kvrelay.data") / "costs" / name)))


def test_the_examples_are_estimates_of_one_model() -> None:
    h100, b200 = (costs_of(f"{gpu}-llama-3.1-8b.json") for gpu in ("h100", "b200"))
    assert h100.model == b200.model
    assert all("estimate" in costs.machine for costs in (h100, b200))
    # Memory is 2.4 times as fast, and so is arithmetic about.
    assert 2.0 < h100.step.prefill_token_s / b200.step.prefill_token_s < 2.6
    assert b200.step.step_s < h100.step.step_s
