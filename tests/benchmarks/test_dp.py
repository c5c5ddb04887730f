"""Simulated groups answer every request, whatever the design; wake-ups are timed between real processes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvrelay.bench.parts.dp_simulation import Load, SteppedGroup, run_waves
from kvrelay.cli.main import cli


def load(num_ranks: int = 4, delay_s: float = 0.001) -> Load:
    return Load(
        num_ranks=num_ranks,
        duration_s=20.0,
        rate=num_ranks * 1.0,
        num_steps=10,
        step_s=0.01,
        delay_s=delay_s,
        burst_s=1.0,
        gap_s=3.0,
        seed=3,
    )


@pytest.mark.parametrize("num_ranks", [2, 64])
@pytest.mark.parametrize("delay_s", [0.0, 0.03])
def test_every_design_answers_every_request(num_ranks: int, delay_s: float) -> None:
    work = load(num_ranks, delay_s)
    expected = len(work.arrivals()) * work.num_steps
    assert expected
    outcomes = [SteppedGroup(work, lookahead).run() for lookahead in (0, 8, 24)]
    assert [outcome.num_tokens for outcome in outcomes] == [expected] * 3
    assert [run_waves(work, interval).num_tokens for interval in (1, 16)] == [expected] * 2


def test_lookahead_trades_messages_for_dummy_steps() -> None:
    none, some, many = (SteppedGroup(load(), lookahead).run() for lookahead in (0, 8, 24))
    assert none.num_superfluous == 0
    assert none.num_superfluous < some.num_superfluous < many.num_superfluous
    assert none.num_messages > some.num_messages > many.num_messages


def test_the_command_reports_both_parts() -> None:
    options = ("--ranks", "2", "--duration", "5", "--wakes", "3", "--pause-ms", "1", "--json")
    result = CliRunner().invoke(cli, ["bench", "dp", *options], catch_exceptions=False)
    report = json.loads(result.output)
    assert [row["design"] for row in report["simulated"]][:2] == ["lookahead 0", "lookahead 8"]
    assert set(report["wake_up"]) == {"rpc", "shm"}
    assert all(0 < each["p50_ms"] <= each["p99_ms"] for each in report["wake_up"].values())


def test_sizes_that_are_none_are_refused() -> None:
    result = CliRunner().invoke(cli, ["bench", "dp", "--ranks", "1,x"])
    assert result.exit_code != 0
    assert "--ranks: give numbers above 1" in str(result.output) + str(result.exception)
