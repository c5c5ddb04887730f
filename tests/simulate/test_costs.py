"""The file of costs: strict, and each error says in one line what is wrong and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.core.step_cost import StepCost
from kvrelay.errors import ConfigError
from kvrelay.simulate.costs import Costs, decode_costs, encode_costs, read_costs


def test_costs_survive_their_file(tmp_path: Path) -> None:
    costs = Costs(step=StepCost(step_s=0.02), spread=0.1, machine="2 cores", model="m")
    path = tmp_path / "costs.json"
    path.write_bytes(encode_costs(costs))
    assert read_costs(path) == costs
    assert decode_costs(b"{}", "none") == Costs()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated"),
        ('{"hops": 1.0}', "unknown field `hops`"),
        ('{"step": {"steps": 1.0}}', "unknown field `steps`"),
        ('{"step": {"step_s": -1.0}}', "times of 0 s or more"),
        ('{"hop_s": -0.1}', "`\\$.hop_s` must be 0 or more, got -0.1"),
        ('{"hop_s": 1e300}', "`\\$.hop_s` must be at most an hour, got 1e\\+300 s"),
        ('{"frontend_token_s": 1e308}', "frontend_token_s.* at most an hour"),
        ('{"link_bytes_per_s": 0}', "above 0"),
        ('{"spread": 3}', "at most 2"),
        ('{"kv_tokens": 100000001}', "kv_tokens.* must be at most 100,000,000"),
        ('{"token_bytes": 100000000000000000000}', "token_bytes.* must be at most 100,000,000"),
        ('{"version": 2}', "version 2 is unknown"),
        ('{"start_s": "soon"}', "start_s"),
        ('{"step": {"step_s": 1e300}}', "together at most an hour"),
        ('{"spread": NaN}', "malformed"),
        ('{"model": "\xff"}', "utf-8"),
        ("[" * 100_000, "costs costs.json"),
    ],
)
def test_wrong_costs_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        decode_costs(text.encode("latin-1"), "costs.json")
    assert caught.value.message.startswith("costs costs.json: ")
    assert "\n" not in caught.value.message
