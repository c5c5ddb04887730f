"""``benchmarks.vllm_dp``: its servers and figures, which need no vLLM."""

from __future__ import annotations

import shlex

import pytest

from benchmarks import vllm_dp, vllm_steps
from kvrelay.bench.report.table import Row


def test_ranks_and_engines_take_turns_with_the_same_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 120 tokens a second from two engines 90 are three quarters."""
    started: dict[str, list[str]] = {}

    async def take_turns(
        commands: dict[str, str], turns: dict[str, vllm_steps.Turn], rounds: int
    ) -> dict[str, dict[str, Row]]:
        started.update({name: shlex.split(command) for name, command in commands.items()})
        rates = dict(zip(commands, (120.0, 90.0, 60.0), strict=True))
        return {
            turn: {
                name: {"output_tokens_per_s": rate, "ttft_p50_s": 0.1, "itl_p50_s": 0.01 * rounds, "failed": 0.0}
                for name, rate in rates.items()
            }
            for turn in turns
        }

    monkeypatch.setattr(vllm_steps, "take_turns", take_turns)
    vllm_dp.main(["model", "--rounds", "2"])
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert shown == [
        [at_once, name, rate, "20.00", "0", ratio]
        for at_once in ("8", "32")
        for name, rate, ratio in zip(started, ("120", "90", "60"), ("1.000", "0.750", "0.500"))
    ]
    engines, *groups = started.values()
    assert [group[: -len(own)] for group, own in zip(groups, (["--dp", "2", "--ep"], ["--dp", "2"]))] == [
        engines[: -len(["--decode", "2"])]
    ] * 2
    assert engines[-2:] == ["--decode", "2"]
