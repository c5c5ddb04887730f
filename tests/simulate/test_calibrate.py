"""The fit recovers known costs from a synthetic cluster; the command measures a real one with mock engines."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.system.serving import Serve, kvrelay

from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.step_cost import StepCost, StepWork
from kvrelay.errors import InvalidInputError
from kvrelay.simulate.calibrate import Counters, Phase, Stream, counters_of, fit, read_status
from kvrelay.simulate.costs import Costs, read_costs
from kvrelay.simulate.probe import all_remote, probe

STEP = StepCost(step_s=0.01, prefill_s=0.02, prefill_token_s=1e-4)
STATUS: dict[str, Any] = {
    "prefill_queue_size": 0,
    "workers": [
        {"worker_id": "p", "role": "prefill", "model": "m", "load": {"step_cost": {"prefill_s": 0.02, "step_s": 9.0}}}
        | {"transfer": {"peers": [{"num_transfers": 3, "num_bytes": 300, "seconds": 0.5, "op": "write"}]}},
        {"worker_id": "d", "role": "decode", "model": "m", "load": {"step_cost": {"prefill_s": 9.0, "step_s": 0.01}}}
        | {"decode": {"num_remote_done": 2, "places": {}}},
    ],
}
KEY = Keys("test").config_value("disagg.disagg_policy")
TRUE_OVERHEAD_S, TRUE_BYTES_PER_S, TRUE_TOKEN_BYTES = 0.001, 1e9, 4096


def synthetic(length: int, between_s: float = 0.002, frontend_s: float = 0.005, num: int = 4) -> Phase:
    """Streams alone on STEP's worker, each with one transfer."""
    first_s = STEP.prefill_seconds(length) + 2 * Costs().hop_s + frontend_s
    times = [first_s]
    for number in range(1, 20):
        work = StepWork(num_decodes=1, num_context_tokens=length + number)
        times.append(times[-1] + STEP.step_seconds(work) + between_s)
    size = length * TRUE_TOKEN_BYTES
    counted = Counters(num, num * size, num * (TRUE_OVERHEAD_S + size / TRUE_BYTES_PER_S), num)
    return Phase((Stream(length, tuple(times)),) * num, counted)


def workers(**changes: Any) -> list[Any]:
    status = copy.deepcopy(STATUS)
    for worker in status["workers"]:
        worker["load"] = {"step_cost": {name: getattr(STEP, name) for name in STEP.__struct_fields__}}
        worker["load"]["kv_total_blocks"] = 100
        worker |= changes
    return read_status(status)


def test_known_costs_are_recovered() -> None:
    found = fit(workers(), [synthetic(64), synthetic(1024)], "here")
    costs = found.costs
    assert (costs.step, costs.machine, costs.model, costs.token_bytes) == (STEP, "here", "m", TRUE_TOKEN_BYTES)
    assert costs.between_steps_s == pytest.approx(0.002)
    assert costs.frontend_request_s == pytest.approx(0.005)
    assert costs.transfer_overhead_s == pytest.approx(TRUE_OVERHEAD_S)
    assert costs.link_bytes_per_s == pytest.approx(TRUE_BYTES_PER_S)
    assert costs.spread < 1e-3
    assert found.not_measured == (
        "kv_tokens",
        "prefill_spread",
        "host_bytes_per_s",
        "disk_bytes_per_s",
        "hop_s",
        "queue_hop_s",
        "frontend_token_s",
        "start_s",
        "drain_s",
    )


def test_streams_that_were_sent_away_tell_of_link_and_queue() -> None:
    """Those that stayed had no transfer. The others' first tokens are 12 ms later, and a transfer takes 1 ms and 64
    times 4,096 bytes: 1.262 ms."""
    stayed = [Phase(synthetic(length).streams, Counters()) for length in (64, 1024)]
    away = [synthetic(length, frontend_s=0.017) for length in (64, 1024)]
    found = fit(workers(block_size=16, step_spread=0.3), stayed, "", workers(step_spread=0.3), away)
    assert found.costs.link_bytes_per_s == pytest.approx(TRUE_BYTES_PER_S)
    assert found.costs.transfer_overhead_s == pytest.approx(TRUE_OVERHEAD_S)
    assert found.costs.queue_hop_s == pytest.approx(0.012 - 0.001 - 64 * 4096 / 1e9)
    assert found.costs.frontend_request_s == pytest.approx(0.005)
    assert found.costs.kv_tokens == 1600
    assert found.costs.prefill_spread == 0.3
    assert found.not_measured == (
        "host_bytes_per_s",
        "disk_bytes_per_s",
        "hop_s",
        "frontend_token_s",
        "start_s",
        "drain_s",
    )


def test_tiers_that_have_loaded_show_their_bandwidth() -> None:
    """Over all workers: 3 GB in 2 s. What has loaded nothing shows none."""
    loaded = {"loaded_bytes": 1_500_000_000, "load_s": 1.0}
    tiers = {"counts": {}, "stores": {"host": loaded, "disk": {"loaded_bytes": 0, "load_s": 0.0}}}
    found = fit(workers(kv_tiers=tiers), [synthetic(64)], "")
    assert found.costs.host_bytes_per_s == pytest.approx(1.5e9)
    assert "host_bytes_per_s" not in found.not_measured
    assert found.costs.disk_bytes_per_s == Costs().disk_bytes_per_s
    assert "disk_bytes_per_s" in found.not_measured


@pytest.mark.parametrize("before", [None, b'"cost"'])
async def test_the_policy_is_as_before_after_the_remote_streams(before: bytes | None) -> None:
    discovery = MemoryBroker().plane().discovery
    if before is not None:
        await discovery.put(KEY, before)

    async def policies() -> set[str]:
        value = await discovery.get(KEY)
        return {"auto" if value is None else json.loads(value)}

    async def interrupted() -> None:
        async with all_remote(discovery, KEY, policies):
            assert await policies() == {"always"}
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await interrupted()
    assert await discovery.get(KEY) == before


def test_each_role_tells_of_its_own_steps() -> None:
    step = fit(read_status(STATUS), [], "").costs.step
    assert (step.prefill_s, step.step_s) == (0.02, 0.01)


def test_a_worker_that_has_no_such_steps_does_not_count() -> None:
    """By cost, the decode worker may have prefilled everything: the prefill worker still has its prior."""
    status = copy.deepcopy(STATUS)
    status["workers"][0]["load"] = {"step_cost": {}}
    found = fit(read_status(status), [], "")
    assert found.costs.step.prefill_s == 9.0
    assert "step.prefill_s" not in found.not_measured
    status["workers"][1]["load"] = {"step_cost": {}}
    assert {"step.prefill_s", "step.step_s"} <= set(fit(read_status(status), [], "").not_measured)


def test_costs_that_are_estimates_are_named_so() -> None:
    status = copy.deepcopy(STATUS)
    assert not fit(read_status(status), [], "").is_step_estimated
    status["workers"][0]["load"]["step_cost_source"] = "estimated"
    assert fit(read_status(status), [], "").is_step_estimated


def test_what_the_load_did_not_show_is_named_and_keeps_its_default() -> None:
    phases = [Phase(synthetic(64).streams[:1], Counters())]
    found = fit(workers(), phases, "")
    assert found.costs.link_bytes_per_s == Costs().link_bytes_per_s
    assert {"token_bytes", "link_bytes_per_s", "transfer_overhead_s"} <= set(found.not_measured)


def test_transfers_too_small_to_tell_a_bandwidth_are_overhead() -> None:
    phases = [Phase(synthetic(length).streams, Counters(4, 4 * length, 0.012, 4)) for length in (64, 1024)]
    found = fit(workers(), phases, "")
    assert found.costs.transfer_overhead_s == pytest.approx(0.003)
    assert found.costs.link_bytes_per_s == Costs().link_bytes_per_s
    assert "link_bytes_per_s" in found.not_measured


def test_counters_are_summed_over_workers() -> None:
    assert counters_of(read_status(STATUS)) == Counters(3, 300, 0.5, 2)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"workers": []}, "no worker; start one"),
        ({}, "not readable"),
        ({"workers": [{"worker_id": "a", "model": "x"}, {"worker_id": "b", "model": "y"}]}, "serves x, y; calibrate"),
        ({"workers": [{"worker_id": "a", "model": "x"}]}, "no worker publishes step costs"),
    ],
)
def test_a_cluster_that_cannot_be_calibrated_is_refused(status: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        fit(read_status(status), [], "")


async def test_the_probe_leaves_its_first_request_of_each_length_out() -> None:
    sent: list[list[int]] = []

    async def send(prompt: list[int]) -> tuple[float, ...]:
        sent.append(prompt)
        return (0.1, 0.2)

    async def count() -> Counters:
        return Counters(num_transfers=len(sent))

    phases = await probe(send, count, (4, 9), 3, seed=1)
    assert [len(prompt) for prompt in sent] == [4] * 4 + [9] * 4
    assert [phase.counted.num_transfers for phase in phases] == [3, 3]
    assert {stream.prompt_tokens for stream in phases[1].streams} == {9}


@pytest.mark.system
@pytest.mark.matrix
def test_a_running_cluster_is_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with Serve(("--engine", "mock", "--prefill", "1", "--decode", "1")) as server:
        port = server.url.rpartition(":")[2].split("/")[0]
        ended = kvrelay(
            *("simulate", "calibrate", "--output", str(path), "--machine", "test", "--streams", "3"),
            *("--long", "512", "--cluster", port),
        )
        assert ended.returncode == 0, ended.stderr
        model = server.model
    for name in ("token_bytes", "transfer_overhead_s", "queue_hop_s", "kv_tokens"):
        assert name not in ended.stdout
    costs = read_costs(path)
    assert (costs.machine, costs.model) == ("test", model)
    assert costs.step.is_sound
    assert costs.token_bytes != Costs().token_bytes
    simulated = kvrelay("simulate", "--load", "poisson:num=3", "--costs", str(path))
    assert "3 of 3 requests answered" in simulated.stdout, simulated.stderr


def test_tokens_that_come_together_are_of_one_step() -> None:
    """The workers' costs say how many a step yields; the gaps between those of two steps say what lies between."""
    step = msgspec.structs.replace(STEP, tokens_per_step=2.0)
    stream = synthetic(64).streams[0]
    both = Stream(64, tuple(at_s for at_s in stream.tokens_s for _ in range(2)))
    load = {"step_cost": msgspec.to_builtins(step), "kv_total_blocks": 100}
    costs = fit(workers(load=load), [Phase((both,), Counters())], "").costs
    assert costs.step == step
    assert costs.between_steps_s == pytest.approx(0.002, rel=0.01)
