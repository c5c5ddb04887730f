"""The hand-written costs that ship: readable, named as estimates, and in the order of the data sheets."""

from __future__ import annotations

import pytest

from kvrelay.errors import ConfigError
from kvrelay.simulate.costs import Costs, costs_of
from kvrelay.simulate.shipped import costs_help, shipped_names

SHEETS = {
    "a100": (2.039e12, 312e12, 200e9, 80e9),
    "b200": (8e12, 2250e12, 400e9, 180e9),
    "h100": (3.35e12, 989e12, 400e9, 80e9),
    "h200": (4.8e12, 989e12, 400e9, 141e9),
}
"""Bytes/s of memory, FLOP/s, bits/s of the network, bytes of memory."""


def test_the_examples_are_estimates_of_one_model() -> None:
    assert shipped_names() == tuple(f"{gpu}-llama-3.1-8b" for gpu in SHEETS)
    assert all(name in costs_help() for name in shipped_names())
    found = [costs_of(name) for name in shipped_names()]
    assert len({costs.model for costs in found}) == 1
    assert all("estimate" in costs.machine for costs in found)
    h100, b200 = costs_of("h100-llama-3.1-8b"), costs_of("b200-llama-3.1-8b")
    # Memory is 2.4 times as fast, and so is arithmetic about.
    assert 2.0 < h100.step.prefill_token_s / b200.step.prefill_token_s < 2.6
    assert b200.step.step_s < h100.step.step_s


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"--costs h1000: neither a file nor one of a100-llama-3.1-8b, b200"):
        costs_of("h1000")
    with pytest.raises(ConfigError, match=r"costs none\.json: No such file"):
        costs_of("none.json")


def test_the_default_pool_holds_what_every_pool_held() -> None:
    assert Costs().num_blocks(16) == 16384


@pytest.mark.parametrize("gpu", SHEETS)
def test_the_costs_follow_from_the_table_of_the_documentation(gpu: str) -> None:
    """docs/simulator.md names the sources of these figures."""
    bytes_per_s, flops, network, memory = SHEETS[gpu]
    costs, read_s = costs_of(f"{gpu}-llama-3.1-8b"), 1 / (0.75 * bytes_per_s)
    assert costs.step.step_s == costs.step.prefill_s == pytest.approx(16.06e9 * read_s + 0.0005, rel=0.01)
    assert costs.step.prefill_token_s == pytest.approx(2 * 8.03e9 / (0.5 * flops), rel=0.01)
    assert costs.step.pair_s == pytest.approx(4 * 32 * 4096 / (0.5 * flops), rel=0.01)
    assert costs.step.context_s == pytest.approx(costs.token_bytes * read_s, rel=0.01)
    assert costs.token_bytes == 2 * 2 * 32 * 8 * 128
    assert costs.kv_tokens == pytest.approx((0.9 * memory - 16.06e9) / costs.token_bytes, abs=16)
    assert costs.link_bytes_per_s == network / 8 * 0.8
