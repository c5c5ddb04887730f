"""The load of agents, and what is sent and read of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.agents import (
    BLOCK_SIZE,
    COSTS,
    VOCAB_SIZE,
    StayingPairs,
    blocks_of,
    compared,
    load_of,
    outcome_of,
    served,
)
from tests.bench.conftest import ScriptedServer

from kvrelay.bench.cases import Case
from kvrelay.bench.errors import BenchError
from kvrelay.config import DisaggConfig, EngineConfig
from kvrelay.errors import InvalidInputError
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.simulation import Simulation

GIVEN = {"sessions": 8, "turns": 6, "tools": 3, "prompt": 320, "answer": 20, "rate": 4.0, "prefetch_s": 0.0}


def test_turns_repeat_their_session_and_wait_for_a_tool() -> None:
    load = load_of(GIVEN, 0)
    assert len(load) == 48
    for index, arrival in enumerate(load):
        if arrival.after is None:
            continue
        before = load[arrival.after]
        assert arrival.after == index - 1
        assert before.tool in ("tool-0", "tool-1", "tool-2")
        assert 0.1 <= arrival.time_s <= 30.0
        assert before.hash_ids is not None
        assert arrival.hash_ids is not None
        assert arrival.hash_ids[: len(before.hash_ids)] == before.hash_ids
    assert sum(arrival.tool == "" for arrival in load) == 8, "the last turn of each session calls nothing"


def test_the_pools_hold_the_asked_part_but_no_fewer_than_one_session() -> None:
    load = load_of(GIVEN, 0)
    mean = sum(arrival.prompt_tokens + arrival.answer_tokens for arrival in load) / len(load)
    assert blocks_of(load, 4) == round(4 * mean / BLOCK_SIZE)
    longest = max(arrival.prompt_tokens + arrival.answer_tokens for arrival in load)
    assert blocks_of(load, 0.1) * BLOCK_SIZE > longest


def test_first_turns_do_not_count() -> None:
    load = load_of({**GIVEN, "sessions": 2, "turns": 2}, 0)
    assert outcome_of(load, 7, [100.0, 1.0, 100.0, 3.0]).ttft_s == 2.0


async def test_a_session_is_sent_turn_by_turn_with_its_hints(scripted: Callable[..., ScriptedServer]) -> None:
    """The server counts 7 prompt tokens, of which 3 are cached. A prefetch of the second turn goes before it."""
    load = load_of({**GIVEN, "sessions": 1, "turns": 2, "prefetch_s": 0.1}, 0)
    with scripted() as server:
        turns = await served(Case("scripted", url=server.url), load, faster=100.0, is_hinted=True)
    bodies = [each.body for each in server.served]
    assert [body["kv_hints"] for body in bodies] == [{"tool": load[0].tool}, {"prefetch": True}, {"release": True}]
    assert all(body["ignore_eos"] is True and body["model"] == "scripted" for body in bodies)
    assert [body["prompt"] for body in bodies[1:]] == [list(load[1].prompt(1, VOCAB_SIZE))] * 2
    assert [body["max_tokens"] for body in bodies] == [load[at].answer_tokens for at in (0, 1, 1)]
    assert [turn.num_computed for turn in turns] == [7 - 3] * 2
    assert all(turn.first_s > 0 for turn in turns)


async def test_a_turn_that_is_refused_ends_the_benchmark(scripted: Callable[..., ScriptedServer]) -> None:
    load = load_of({**GIVEN, "sessions": 1, "turns": 2}, 0)
    with scripted(mode="refuse") as server, pytest.RaisesGroup(pytest.RaisesExc(BenchError, match="turn 0: HTTP 503")):
        await served(Case("scripted", url=server.url), load)


@pytest.mark.parametrize("stays", [False, True])
def test_with_affinity_each_session_stays_at_its_first_decode_worker(stays: bool) -> None:
    load = load_of({**GIVEN, "sessions": 16, "turns": 4, "answer": 100, "rate": 40.0}, 1)
    spec = ClusterSpec(prefill=1, decode=3, engine=EngineConfig(num_blocks=80, block_size=16))
    simulation = Simulation(spec, load, COSTS)
    if stays:
        assert simulation.frontend.pairs is not None
        simulation.frontend.pairs = StayingPairs(simulation.frontend.pairs, DisaggConfig(), load)
    homes: dict[str | None, set[str]] = {}
    for arrival, request in zip(load, simulation.run().requests, strict=True):
        homes.setdefault(arrival.session, set()).add(request.worker_id)
    assert all(len(workers) == 1 for workers in homes.values()) == stays


def test_each_policy_is_compared_with_the_first_on_the_same_load() -> None:
    given = {**GIVEN, "policies": "value,prefix", "share": 0.5, "host_share": 0.0, "mock_costs": False, "costs": None}
    first, second = compared("1P2D", 0, {**given, "block_size": BLOCK_SIZE, "measured": False})
    assert (first["policy"], first["tokens_ratio"], second["policy"]) == ("value", 1.0, "prefix")
    assert second["tokens_ratio"] == second["num_computed"] / first["num_computed"]
    assert 0.0 <= first["goodput"] <= 1.0
    with pytest.raises(InvalidInputError, match="not like 2P2D"):
        compared("2D", 0, given)
