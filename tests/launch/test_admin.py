"""What an operator reads: ids can be copied, and what is wrong is said."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest

from kvrelay.config import ControlConfig, WorkerRole
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.tier_stats import StoreStats, TierCounts, TierStats
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import ConfigError, ControlUnavailableError, InvalidInputError
from kvrelay.launch import admin
from kvrelay.launch.admin import config_get, config_set, status_table
from kvrelay.launch.worker_calls import WorkerCalls, list_workers
from kvrelay.rpc import new_curve_keys

WORKER_IDS = ("prefill-0a1b2c3d4e", "decode-0a1b2c3d4f")


def status_of(worker_id: str) -> dict[str, Any]:
    load = {
        "request_active_slots": 12,
        "request_total_slots": 256,
        "num_requests_waiting": 3,
        "kv_active_blocks": 1000,
        "kv_total_blocks": 16384,
        "kv_demand_perc": 0.1,
    }
    counts = {"decode": {"num_remote_done": 123}, "prefill": {"num_prefills": 0}, "handoffs_in": 1, "handoffs_out": 2}
    return {"worker_id": worker_id, "role": "prefill", "model": "a-model-with-a-long-name", "load": load, **counts}


def test_a_narrow_table_shows_whole_worker_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status_table({"prefill_queue_size": 5, "workers": [status_of(worker_id) for worker_id in WORKER_IDS]})
    shown = capsys.readouterr().out
    assert "prefill queue: 5" in shown
    for word in (*WORKER_IDS, "12/256", "1000/16384", "10%", "1/2", "123"):
        assert word in shown
    assert "…" not in shown


def test_a_table_without_workers_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    status_table({"prefill_queue_size": 0, "workers": []})
    assert "no worker is registered" in capsys.readouterr().out


def test_a_worker_that_could_not_queue_a_prefill_says_why_and_when(capsys: pytest.CaptureFixture[str]) -> None:
    """When: until it has another prefill to queue, nobody knows whether it still could not."""
    reason = "the control server answers, but stores nothing"
    failed = {"prefill_queue_error": reason, "prefill_queue_error_age_s": 12.3}
    status_table({"prefill_queue_size": 0, "workers": [status_of("d-1") | failed]})
    told = f"d-1 could not queue its latest prefill, 12 s ago, and computed it itself: {reason}"
    assert told in capsys.readouterr().out
    status_table({"prefill_queue_size": 0, "workers": [status_of("d-1") | {"prefill_queue_error": None}]})
    assert "could not queue" not in capsys.readouterr().out


def test_kv_tiers_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    stats = TierStats(TierCounts(num_hits=9, num_not_worth=2, saved_s=2.56), {"host": StoreStats(162, 152)}, 0)
    stats.stores["host"].misses["checksum"] += 3
    stats.stores["host"].drops["queue"] += 4
    status_table({"prefill_queue_size": 0, "workers": [status_of("d-1") | {"kv_tiers": msgspec.to_builtins(stats)}]})
    shown = capsys.readouterr().out
    assert "d-1 KV tiers: 9 prompts loaded, 2 not worth it, 0 failed, 2.6 s saved; " in shown
    assert "host: 162 blocks loaded, 152 stored, 3 missed, 4 dropped" in shown
    stats.counts.saved_s = -0.04
    status_table({"prefill_queue_size": 0, "workers": [status_of("d-1") | {"kv_tiers": msgspec.to_builtins(stats)}]})
    assert ", 0.0 s saved; " in capsys.readouterr().out
    status_table({"prefill_queue_size": 0, "workers": [status_of("d-1") | {"kv_tiers": None}]})
    assert "KV tiers" not in capsys.readouterr().out


async def test_an_unknown_setting_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"did you mean disagg\.max_local_prefill_length"):
        await config_get(ControlConfig(), "disagg.max_local_prefil_length")
    with pytest.raises(ConfigError, match=r"no run-time setting; .*disagg\.max_prefill_queue_size.*router\."):
        await config_set(ControlConfig(), "nonsense", "1")


async def test_malformed_entries_are_left_out_of_the_list(caplog: pytest.LogCaptureFixture) -> None:
    plane, keys = MemoryBroker().plane(), Keys("test")
    good = WorkerInfo("w-1", 0, WorkerRole.DECODE, "m", "/m", "tcp://127.0.0.1:1", 4096, 16, 100, 1000, "hash")
    lease = await plane.discovery.grant(60.0)
    await plane.discovery.put(keys.worker("w-1"), msgspec.json.encode(good), lease)
    for worker_id, value in (("a", b"{"), ("b", b"[" * 100_000), ("c", msgspec.json.encode(good))):
        await plane.discovery.put(keys.worker(worker_id), value, lease)
    assert await list_workers(plane, keys) == [good]
    assert caplog.text.count("ignored the discovery entry") == 3
    await plane.close()


async def test_an_entry_that_points_to_another_worker_is_no_second_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object, **__: object) -> dict[str, Any]:
        return status_of("w-1")

    monkeypatch.setattr(WorkerCalls, "ask", answer)
    good = WorkerInfo("w-1", 0, WorkerRole.DECODE, "m", "/m", "tcp://127.0.0.1:1", 4096, 16, 100, 1000, "hash")
    evil = msgspec.structs.replace(good, worker_id="evil")
    plane = MemoryBroker().plane()
    calls = WorkerCalls(plane, Keys("test"), new_curve_keys())
    assert "error" not in await admin.status_of(good, calls, False)
    shown = await admin.status_of(evil, calls, False)
    assert (shown["worker_id"], shown["error"]) == ("evil", "w-1 answers at its address")
    await plane.close()


async def test_a_queue_that_pauses_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = MemoryBroker().plane()
    sizes: list[int | Exception] = [ControlUnavailableError("no answer"), 3]

    async def size(_: str | None = None) -> int:
        answer = sizes.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def connect(_: ControlConfig) -> ControlPlane:
        return plane

    monkeypatch.setattr(plane.prefill_queue, "size", size)
    monkeypatch.setattr("kvrelay.launch.request_plane.connect_control", connect)
    report = await admin.cluster_status(ControlConfig(control="nats://127.0.0.1:1"))
    assert report == {"prefill_queue_size": 3, "workers": []}


async def test_the_last_worker_that_takes_requests_keeps_doing_so_unless_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = MemoryBroker().plane()
    lease = await plane.discovery.grant(60.0)

    async def add(worker_id: str, role: WorkerRole, model: str = "m") -> None:
        info = WorkerInfo(worker_id, 0, role, model, "/m", "tcp://127.0.0.1:1", 1000, 16, 100, 500, "x")
        await plane.discovery.put(Keys("default").worker(worker_id), msgspec.json.encode(info), lease)

    for worker_id, role, model in (("p", WorkerRole.PREFILL, "m"), ("d", WorkerRole.DECODE, "m"), ("o", "both", "n")):
        await add(worker_id, WorkerRole(role), model)
    sent: list[tuple[str, ...]] = []

    async def reply(_: WorkerCalls, *command: str) -> dict[str, str]:
        sent.append(command)
        return {"role": command[-1]}

    monkeypatch.setattr(admin, "connected", lambda config: contextlib.nullcontext(plane))
    monkeypatch.setattr(WorkerCalls, "ask", reply)
    config = ControlConfig()
    with pytest.raises(InvalidInputError, match=r"d is the last worker that takes requests.* or --force"):
        await admin.change_role(config, "d", WorkerRole.PREFILL, force=False)
    assert await admin.change_role(config, "d", WorkerRole.BOTH, force=False) == {"role": "both"}
    await admin.change_role(config, "d", WorkerRole.PREFILL, force=True)
    await add("e", WorkerRole.BOTH)
    await admin.change_role(config, "d", WorkerRole.PREFILL, force=False)
    assert sent == [("d", "role", "both"), ("d", "role", "prefill"), ("d", "role", "prefill")]
    await plane.close()
