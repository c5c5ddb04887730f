"""``/debug/cluster``: the JSON that the page and ``kvrelay top`` read."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.frontend.doubles import FakeCluster, Script, running
from tests.frontend.raw_http import send

from kvrelay.config import WorkerRole
from kvrelay.core.event_codec import encode_load
from kvrelay.core.events import MAX_FLOWS, Flow, LoadMetrics, TokenCounts
from kvrelay.core.workers import CallerInfo
from kvrelay.frontend.api.cluster_shown import ClusterSnapshot
from kvrelay.version import __version__

PATH = "/debug/cluster"
BODY = {"prompt": [5, 6, 7], "max_tokens": 4}
FIRST, SECOND = "0123456789", "abcdef0123"


async def snapshot(port: int, query: str = "") -> dict[str, Any]:
    answer = await send(port, "GET", PATH + query)
    assert answer.status == 200, answer.body
    assert answer.headers["cache-control"] == "no-store"
    # Every field has the type that is promised.
    msgspec.json.decode(answer.body, type=ClusterSnapshot)
    return answer.json


async def eventually_snapshot(port: int, wanted: Any) -> dict[str, Any]:
    async with asyncio.timeout(60.0):
        while not wanted(found := await snapshot(port)):
            await asyncio.sleep(0.05)
    return found


async def publish(cluster: FakeCluster, worker_id: str, **changes: object) -> None:
    load = msgspec.structs.replace(LoadMetrics(worker_id, 3, 8, 40, 100, 2, 0.4, 0.5, seq=1), **changes)
    await cluster.bus.publish(cluster.keys.worker_load(worker_id), encode_load(load))


async def test_workers_flows_and_sums(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        await cluster.add_worker("p0", Script(), role=WorkerRole.PREFILL, release="9.9")
        await eventually_snapshot(port, lambda found: [each["state"] for each in found["workers"]] == ["ready"] * 2)
        await publish(cluster, "w0", tokens=TokenCounts(5, 6), flows=(Flow("p0", True, 2, 500, 0.1),))
        await publish(cluster, "p0", num_requests_waiting=0, flows=(Flow("w0", False, 4, 1000, 0.02),))
        found = await eventually_snapshot(port, lambda found: len(found["flows"]) == 2)
        prefill, decode = found["workers"]
        assert (prefill["id"], prefill["role"], prefill["release"]) == ("p0", "prefill", "9.9")
        assert (decode["id"], decode["state"], decode["running"], decode["slots"]) == ("w0", "ready", 3, 8)
        assert (decode["waiting"], decode["kv_used"], decode["kv_total"]) == (2, 40, 100)
        assert found["flows"] == [
            {"source": "p0", "target": "w0", "transfers": 4, "bytes": 1000, "mean_ms": 5.0},
            {"source": "p0", "target": "w0", "transfers": 2, "bytes": 500, "mean_ms": 50.0},
        ]
        total = found["total"]
        assert (total["running"], total["waiting"], total["kv_used"], total["kv_total"]) == (6, 2, 80, 200)
        assert (total["prefill_queue"], found["release"]) == (0, __version__)
        assert [wrong["kind"] for wrong in found["wrong_now"]] == ["release-mix"]


async def test_a_worker_that_was_never_reached_and_one_that_leaves(model_dir: Path) -> None:
    async with running(model_dir, Script((10,), hang=True)) as cluster:
        port = cluster.frontend.port
        gone = await cluster.add_worker("x", Script())
        await gone.die()
        found = await eventually_snapshot(port, lambda found: len(found["workers"]) == 2)
        states = {worker["id"]: worker["state"] for worker in found["workers"]}
        assert states == {"w0": "ready", "x": "unreached"}
        assert found["workers"][0]["age_s"] is None
        asking = asyncio.create_task(send(port, "POST", "/v1/completions", BODY))
        await cluster.until(lambda: bool(cluster.workers["w0"].requests))
        await cluster.deregister("w0")
        await eventually_snapshot(port, lambda found: found["workers"][0]["state"] == "leaving")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def two_frontends(cluster: FakeCluster) -> list[Any]:
    lease = await cluster.control.discovery.grant(60.0)
    for name in (FIRST, SECOND):
        entry = msgspec.json.encode(CallerInfo(name, "key", "host", 7))
        await cluster.control.discovery.put(cluster.keys.frontend(name), entry, lease)
    started = [await cluster.start(name=name) for name in (FIRST, SECOND)]
    for frontend in started:
        await cluster.until(lambda frontend=frontend: len(frontend.cluster.models) == 1)
    return started


async def test_any_frontend_adds_all_up_and_misses_one_that_is_gone(model_dir: Path) -> None:
    cluster = FakeCluster(model_dir)
    try:
        await cluster.add_worker("w0", Script((10,)))
        frontends = await two_frontends(cluster)
        for frontend, count in zip(frontends, (1, 2)):
            for _ in range(count):
                assert (await send(frontend.port, "POST", "/v1/completions", BODY)).status == 200

        def all_counted(found: dict[str, Any]) -> bool:
            return bool(found["total"]["requests_last_minute"] == 3)

        for frontend, name in zip(frontends, (FIRST, SECOND)):
            found = await eventually_snapshot(frontend.port, all_counted)
            assert found["frontend"] == name
            by_id = {each["id"]: each for each in found["frontends"]}
            assert {each: by_id[each]["requests_last_minute"] for each in by_id} == {FIRST: 1, SECOND: 2}
            assert by_id[name]["is_self"]
            assert sum(found["history"]["requests"]) == 3
            assert sum(found["history"]["tokens"]) == 12
            assert found["total"]["ttft_ms"]["p50"] > 0
        await frontends[0].close()
        found = await eventually_snapshot(
            frontends[1].port, lambda found: any(each["is_silent"] for each in found["frontends"])
        )
        assert found["wrong_now"][0]["kind"] == "silent-frontend"
        # What the one that is gone has counted stays in the sums.
        assert found["total"]["requests_last_minute"] == 3
    finally:
        await cluster.close()


async def test_the_history_after_a_second(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        whole = (await eventually_snapshot(port, lambda found: len(found["history"]["unix_s"]) >= 2))["history"]
        columns = {len(column) for column in whole.values()}
        assert columns == {len(whole["unix_s"])}
        since = whole["unix_s"][0]
        assert (await snapshot(port, f"?since={since}"))["history"]["unix_s"][0] == since + 1
        assert (await snapshot(port, f"?since={10**11}"))["history"]["unix_s"] == []
        for query in ("?since=x", "?since=-1", "?since=", "?since=1&since=2", "?since=²", f"?since={'9' * 13}"):
            assert (await send(port, "GET", PATH + query)).status == 400, query


async def test_240_workers(model_dir: Path) -> None:
    cluster = FakeCluster(model_dir)
    try:
        names = [f"d{number:03}" for number in range(200)] + [f"p{number:03}" for number in range(40)]
        for name in names:
            await cluster.add_worker(name, Script(), role=WorkerRole.PREFILL if name[0] == "p" else WorkerRole.DECODE)
        await cluster.start()
        frontend = cluster.frontend
        assert frontend is not None
        await cluster.until(lambda: len(frontend.cluster.links()) == len(names))
        for name in names:
            await publish(cluster, name, flows=tuple(Flow(f"d{n:03}", False, 1, n, 0.1) for n in range(100)))
        found = await eventually_snapshot(frontend.port, lambda found: found["total"]["running"] == 3 * len(names))
        assert [worker["id"] for worker in found["workers"]] == names
        assert (found["total"]["num_flows"], len(found["flows"])) == (MAX_FLOWS * len(names), 256)
        assert found["flows"][0]["bytes"] == MAX_FLOWS - 1
        assert found["total"]["kv_total"] == 100 * len(names)
    finally:
        await cluster.close()


async def test_lookers_share_the_questions(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        asked: list[float] = []
        size = type(cluster.control.prefill_queue).size

        async def counted(queue: Any, *arguments: Any) -> int:
            asked.append(time.monotonic())
            return await size(queue, *arguments)

        monkeypatch.setattr(type(cluster.control.prefill_queue), "size", counted)
        monkeypatch.setattr("kvrelay.frontend.api.cluster_shown.FRESH_S", 3600.0)
        await asyncio.gather(*(snapshot(cluster.frontend.port) for _ in range(10)))
        assert len(asked) <= 1


async def test_without_a_control_plane_the_last_known_is_told(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        cluster.broker.go_offline()
        found = await snapshot(cluster.frontend.port)
        assert found["total"]["prefill_queue"] is None
        assert found["wrong_now"][0]["kind"] == "no-control-plane"
        assert [worker["id"] for worker in found["workers"]] == ["w0"]
