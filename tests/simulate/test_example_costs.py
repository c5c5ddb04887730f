"""The hand-written costs that ship: readable, named as estimates, and in the order of the data sheets."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("gpu", "bytes_per_s", "flops"), [("h100", 3.35e12, 989e12), ("b200", 8e12, 2250e12)])
def test_the_steps_follow_from_the_table_of_the_documentation(gpu: str, bytes_per_s: float, flops: float) -> None:
    """docs/simulator.md names the sources of these figures."""
    costs, read_s = costs_of(f"{gpu}-llama-3.1-8b.json"), 1 / (0.75 * bytes_per_s)
    assert costs.step.step_s == costs.step.prefill_s == pytest.approx(16.06e9 * read_s + 0.0005, rel=0.01)
    assert costs.step.prefill_token_s == pytest.approx(2 * 8.03e9 / (0.5 * flops), rel=0.01)
    assert costs.step.pair_s == pytest.approx(4 * 32 * 4096 / (0.5 * flops), rel=0.01)
    assert costs.step.context_s == pytest.approx(costs.token_bytes * read_s, rel=0.01)
    assert costs.token_bytes == 2 * 2 * 32 * 8 * 128
    assert costs.link_bytes_per_s == 400e9 / 8 * 0.8
