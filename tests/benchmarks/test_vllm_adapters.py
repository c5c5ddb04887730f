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
    asked: dict[str, list[tuple[str, int]]] = {}
    rates = {"one": (100.0, 100.0), "eight": (80.0, 60.0)}

    async def take_turns(
        commands: dict[str, str], turns: dict[str, vllm_steps.Turn], rounds: int
    ) -> dict[str, dict[str, Row]]:
        for command in commands.values():
            words = shlex.split(command)
            assert {"--max-lora-rank", "--max-loras"} <= set(words)
            folder = words[words.index("--lora-dir") + 1] if "--lora-dir" in words else ""
            assert folder or sum(word.startswith("adapter-") for word in words) == len(vllm_adapters.ADAPTERS)
        for name, measure in turns.items():
            asked[name] = []
            monkeypatch.setattr(vllm_adapters, "measure_load", sender(asked[name]))
            row = await measure(Target("127.0.0.1", 1), rounds)
            assert row["tokens_per_s"] > 0.0
        return {
            name: {
                case: {"tokens_per_s": rate, "failed": 0.0} for case, rate in zip(commands, rates[name.split(" ")[0]])
            }
            for name in turns
        }

    monkeypatch.setattr(vllm_adapters, "take_turns", take_turns)
    vllm_adapters.main(["model", "--at-once", "16", "--requests", "3"])
    one, eight = asked.values()
    assert sorted(count for _, count in one) == sorted(count for _, count in eight) == [2] * 8 + [6] * 8
    assert {name for name, _ in one} == {"adapter-0"}
    assert sorted(name for name, _ in eight) == sorted([*vllm_adapters.ADAPTERS] * 2)
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
