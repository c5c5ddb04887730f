"""The loads of the orders, and how their rounds become rows."""

from __future__ import annotations

import benchmarks.orders as orders_module
import pytest
from benchmarks.agents import Turn
from benchmarks.orders import load_of, summarised

from kvrelay.bench.cases import Case
from kvrelay.core.handoff import OrderPolicy
from kvrelay.simulate.arrival import Arrival


def test_conversations_repeat_their_turns_and_call_no_tool() -> None:
    load = load_of("conversations", 1)
    assert len(load) == 24 * 8
    assert sum(arrival.after is None for arrival in load) == 24
    assert all(arrival.tool == "" for arrival in load)
    for arrival in load:
        if arrival.after is not None:
            before = load[arrival.after].hash_ids or ()
            assert (arrival.hash_ids or ())[: len(before)] == before


def test_questions_share_sixteen_prefixes() -> None:
    load = load_of("prefixes", 1)
    assert len(load) == 200
    assert len({arrival.hash_ids for arrival in load}) == 16
    assert all(len(arrival.hash_ids or ()) * arrival.hash_tokens == 2048 for arrival in load)
    assert [arrival.time_s for arrival in load] == sorted(arrival.time_s for arrival in load)


def test_rows_have_the_median_of_the_rounds_and_their_ends() -> None:
    turns = [
        {"load": "prefixes", "order": order, "ttft_ms": mean, "ttft_p90_ms": 2 * mean, "num_computed": 10}
        for order, mean in (("auto", 3.0), ("decode-first", 9.0), ("auto", 1.0), ("auto", 2.0))
    ]
    first, second = summarised(turns)
    assert first == {
        "load": "prefixes",
        "order": "auto",
        "rounds": 3,
        "failed_rounds": 0,
        "ttft_ms": 2.0,
        "ttft_p90_ms": 4.0,
        "num_computed": 10,
        "ttft_low_ms": 1.0,
        "ttft_high_ms": 3.0,
    }
    assert (second["order"], second["ttft_ms"]) == ("decode-first", 9.0)


def test_each_turn_is_told_before_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    async def served(case: Case, load: list[Arrival]) -> list[Turn]:
        told.append(capsys.readouterr().err)
        return [Turn(0.5, 100)]

    monkeypatch.setattr(orders_module, "served", served)
    orders_module.orders(["--rounds", "2", "--load", "prefixes"], standalone_mode=False)
    num = 2 * len(OrderPolicy)
    assert [line.partition(":")[0] for line in told] == [f"turn {at} of {num}" for at in range(1, num + 1)]
    assert told[0].endswith(f": prefixes, {next(iter(OrderPolicy))}, round 1\n")
