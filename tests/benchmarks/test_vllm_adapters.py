"""``benchmarks.vllm_adapters``: its servers, loads and figures, which need no vLLM."""

from __future__ import annotations

import asyncio
import shlex
from typing import NamedTuple

import pytest

from benchmarks import vllm_adapters, vllm_steps
from kvrelay.bench.client.connection import Target
from kvrelay.bench.load.mix import ClassSpec
from kvrelay.bench.report.table import Row


def test_one_adapter_and_eight_are_asked_for_as_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM keeps 80 of 100 tokens a second, kvrelay 60 of 100, which is three quarters of that."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(vllm_adapters, "measure_load", sender(asked))

    async def take_turns(
        commands: dict[str, str], turns: dict[str, vllm_steps.Turn], rounds: int
    ) -> dict[str, dict[str, Row]]:
        for command in commands.values():
            words = shlex.split(command)
            assert {"--max-lora-rank", "--max-loras"} <= set(words)
            folder = words[words.index("--lora-dir") + 1] if "--lora-dir" in words else ""
            assert folder or sum(word.startswith("adapter-") for word in words) == len(vllm_adapters.ADAPTERS)
        (measure,) = turns.values()
        row = await measure(Target("127.0.0.1", 1), rounds)
        assert row["ratio"] == row["eight_per_s"] / row["one_per_s"]
        figures = [(100.0, 80.0), (100.0, 60.0)]
        rows = [{"one_per_s": one, "eight_per_s": each, "ratio": each / one, "failed": 0.0} for one, each in figures]
        return {name: dict(zip(commands, rows)) for name in turns}

    monkeypatch.setattr(vllm_adapters, "take_turns", take_turns)
    vllm_adapters.main(["model", "--at-once", "16", "--requests", "3"])
    warm_up, one, eight = asked[:8], asked[8:16], asked[16:]
    every = vllm_adapters.ADAPTERS
    assert warm_up == [(name, 2) for name in every]
    assert one == [(every[0], 6)] * 8
    assert eight == [(name, 6) for name in every]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert shown == [
        ["16", "vllm serve", "100", "80", "0.800", "1.000", "0"],
        ["16", "kvrelay", "100", "60", "0.600", "0.750", "0"],
    ]


class Total(NamedTuple):
    output_tokens: int = 64
    failed: int = 0


def sender(asked: list[tuple[str, int]]) -> object:
    async def measure_load(_: Target, spec: ClassSpec, *, model: str, **options: object) -> Total:
        assert options["warm_up"] == 0
        assert spec.num_requests is not None
        assert spec.max_concurrency == 2
        asked.append((model, spec.num_requests))
        await asyncio.sleep(0)
        return Total()

    return measure_load
