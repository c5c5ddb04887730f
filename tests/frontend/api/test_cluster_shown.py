"""``/debug/cluster``: the JSON that the page and ``kvrelay top`` read."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.frontend.doubles import FakeCluster, Script, running
from tests.frontend.raw_http import send

from kvrelay.config import WorkerRole
from kvrelay.core.activity import Activity, SessionActivity, Spent
from kvrelay.core.event_codec import encode_frame
from kvrelay.core.events import MAX_FLOWS, Flow, LoadMetrics, TokenCounts
from kvrelay.core.messages import RequestRefused
from kvrelay.core.step_cost import StepCost
from kvrelay.core.workers import CallerInfo
from kvrelay.frontend.api.cluster_shown import ClusterSnapshot
from kvrelay.frontend.cluster.frontends import figures_of, planners_question
from kvrelay.frontend.cluster.view import LEFT_SHARE
from kvrelay.frontend.openai.answer_spec import SLO_ITL_HEADER, SLO_TTFT_HEADER
from kvrelay.launch.top import watch
from kvrelay.placement.base import PrefillPlace
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
    await cluster.bus.publish(cluster.keys.worker_load(worker_id), encode_frame(load))


async def test_a_planner_is_told_what_was_heard_of_workers(model_dir: Path) -> None:
    async with running(model_dir, Script(), name="front") as cluster:
        await publish(cluster, "w0", tokens=TokenCounts(5, 6, 7), flows=(Flow("p0", True, 2, 500, 0.1),))
        await eventually_snapshot(cluster.frontend.port, lambda found: found["flows"])
        reply = await cluster.bus.request(cluster.keys.frontend_figures("front"), planners_question(), 10.0)
        figures = figures_of(reply)
        assert figures is not None
        (heard,) = figures.loads
        assert (heard.load.num_waiting, heard.load.tokens, heard.load.flows) == (2, TokenCounts(5, 6, 7), ())
        assert heard.age_s >= 0.0
        seldom = await cluster.bus.request(
            cluster.keys.frontend_figures("front"), msgspec.msgpack.encode({"since": 0}), 10.0
        )
        others = figures_of(seldom)
        assert others is not None
        assert others.loads == (), "frontends ask each other every second, and know the loads"


async def test_workers_flows_and_sums(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        await cluster.add_worker("p0", Script(), role=WorkerRole.PREFILL, release="9.9", adapters=("sql@1",))
        await eventually_snapshot(port, lambda found: [each["state"] for each in found["workers"]] == ["ready"] * 2)
        costs = {"tokens": TokenCounts(5, 6, 7, 30, 12), "step_cost": StepCost(tokens_per_step=2.5)}
        await publish(cluster, "w0", **costs, flows=(Flow("p0", True, 2, 500, 0.1),))
        await publish(cluster, "p0", num_waiting=0, flows=(Flow("w0", False, 4, 1000, 0.02),))
        found = await eventually_snapshot(port, lambda found: len(found["flows"]) == 2)
        prefill, decode = found["workers"]
        assert (prefill["id"], prefill["role"], prefill["release"]) == ("p0", "prefill", "9.9")
        assert (prefill["adapters"], decode["adapters"]) == (["sql@1"], [])
        assert (decode["id"], decode["state"], decode["running"], decode["slots"]) == ("w0", "ready", 3, 8)
        assert (decode["waiting"], decode["kv_used"], decode["kv_total"]) == (2, 40, 100)
        names = ("drafted_tokens", "accepted_tokens", "tokens_per_step")
        assert [[each[name] for name in names] for each in (decode, prefill)] == [[30, 12, 2.5], [0, 0, 1.0]]
        assert found["flows"] == [
            {"source": "p0", "target": "w0", "transfers": 4, "bytes": 1000, "mean_ms": 5.0},
            {"source": "p0", "target": "w0", "transfers": 2, "bytes": 500, "mean_ms": 50.0},
        ]
        total = found["total"]
        assert (total["running"], total["waiting"], total["kv_used"], total["kv_total"]) == (6, 2, 80, 200)
        assert (total["prefill_queue"], found["release"]) == (0, __version__)
        assert [wrong["kind"] for wrong in found["wrong_now"]] == ["release-mix"]


async def test_where_prefills_ran_and_what_they_cost(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two decode workers, ranks of a group, and a prefill worker say what they did. Both ranks answer requests."""
    prefills = (0,) * 3 + (6,)  # from 10 to 25 ms
    sessions = SessionActivity(7, 4, 1, {"pool": 320, "host": 64, "computed": 16}, 0.5)
    done = {
        "w0": Activity({"remote": 4, "local_short": 2}, {"host": 48}, Spent(4, 0.4), Spent(4, 2.0), prefills=prefills),
        "w1": Activity(
            {"remote": 1}, {"peer": 16}, Spent(1, 0.1), Spent(1, 0.5), cpu_s=1.0, rss_bytes=2**20, sessions=sessions
        ),
        "p0": Activity(sends=Spent(5, 0.25), prefills=prefills),
    }
    async with running(model_dir, Script((10,), cached=2)) as cluster:
        port = cluster.frontend.port
        await cluster.add_worker("w1", Script((10,), cached=2), dp_group="g", dp_rank=1, dp_size=2)
        await cluster.add_worker("p0", Script(), role=WorkerRole.PREFILL)
        await eventually_snapshot(port, lambda found: [each["state"] for each in found["workers"]] == ["ready"] * 3)
        for name, activity in done.items():
            await publish(cluster, name, activity=activity)
        for _ in range(6):
            assert (await send(port, "POST", "/v1/completions", BODY)).status == 200
        found = await eventually_snapshot(port, lambda found: found["total"]["requests_last_minute"] == 6)
        total, history = found["total"], found["history"]
        assert {place["place"]: place["last_minute"] for place in total["places"] if place["last_minute"]} == {
            "remote": 5,
            "local_short": 2,
        }
        assert total["handoffs"] == {"arrived": 5, "queue_ms": 100.0, "whole_ms": 500.0, "sending_ms": 50.0}
        assert (total["prompt_tokens_last_minute"], total["cached_tokens_last_minute"]) == (18, 12)
        assert total["loaded_tokens_last_minute"] == {"host": 48, "peer": 16}
        assert (total["sessions_paused"], total["sessions_last_minute"]) == (
            7,
            {"returned": 4, "incomplete": 1, "tokens": {"pool": 320, "host": 64, "computed": 16}, "saved_s": 0.5},
        )
        sums = {name: sum(column) for group in ("places", "loaded_tokens") for name, column in history[group].items()}
        assert {name: count for name, count in sums.items() if count} == {
            "remote": 5,
            "local_short": 2,
            "host": 48,
            "peer": 16,
        }
        assert (sum(history["handoffs"]), sum(history["cached_tokens"])) == (5, 12)
        times = {(each["kind"], each["name"]): each for each in found["times"]}
        workers = [("worker", name) for name in ("p0", "w0", "w1")]
        assert list(times) == [("role", "decode"), ("role", "prefill"), ("model", "tiny"), ("group", "g"), *workers]
        answers = {key: each["answers"] for key, each in times.items()}
        assert answers["role", "decode"] == answers["model", "tiny"] == 6
        assert answers["worker", "w0"] + answers["worker", "w1"] == 6
        assert answers["group", "g"] == answers["worker", "w1"]
        assert [times[key]["prefills"] for key in (("model", "tiny"), ("worker", "p0"))] == [12, 6]
        assert times["worker", "p0"]["prefill_ms"] == {"p50": 17.5, "p95": 24.25, "p99": 24.85}
        ranked = next(worker for worker in found["workers"] if worker["id"] == "w1")
        assert (ranked["dp_group"], ranked["dp_rank"], ranked["rss_bytes"]) == ("g", 1, 2**20)
        assert found["frontends"][0]["rss_bytes"] > 1_000_000
        await watch(cluster.url, None, as_json=False, once=True)
        assert "prefills: 5 remote, 2 local_short\n" in capsys.readouterr().out


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


async def test_answered_refused_and_failed_are_told_apart(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The client knows how many of each it got, and so does every place that shows them."""
    full, broken = (RequestRefused("", text, status, retryable=False) for text, status in (("full", 429), ("bug", 500)))
    script, got = Script((10,)), Counter[int]()
    async with running(model_dir, script) as cluster:
        port = cluster.frontend.port
        for refusal, count, model in ((None, 3, "tiny"), (full, 5, "tiny"), (broken, 2, "tiny"), (None, 1, "other")):
            script.refuse = refusal
            for _ in range(count):
                got[(await send(port, "POST", "/v1/completions", BODY | {"model": model})).status] += 1
        assert got == {200: 3, 429: 5, 500: 2, 404: 1}
        found = await eventually_snapshot(port, lambda found: found["total"]["requests_last_minute"] == 11)
        names = ("answered", "refused", "failed")
        for each in (found["total"], *found["frontends"]):
            assert [each[f"{name}_last_minute"] for name in names] == [3, 5, 2]
        assert [sum(found["history"][name]) for name in ("requests", *names)] == [11, 3, 5, 2]
        listed = {
            name: len((await send(port, "GET", f"/debug/requests?order={name}")).json["requests"])
            for name in ("refused", "failed", "invalid", "disconnected")
        }
        assert listed == {"refused": 5, "failed": 2, "invalid": 1, "disconnected": 0}
        metrics = (await send(port, "GET", "/metrics")).body.decode()
        for name, count in zip(names, (3, 5, 2)):
            assert f'kvrelay_request_outcomes_total{{model="tiny",outcome="{name}"}} {count}.0' in metrics
        await watch(cluster.url, None, as_json=False, once=True)
        assert "last minute: 3 answered, 5 refused, 2 failed" in capsys.readouterr().out


async def test_answers_are_judged_by_their_own_objectives_or_the_configured_ones(model_dir: Path) -> None:
    loose = {SLO_TTFT_HEADER: "1e6", SLO_ITL_HEADER: "1e6"}
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        for count, changes in ((4, {}), (6, {SLO_TTFT_HEADER: "0.001"}), (5, {SLO_ITL_HEADER: "0.001"})):
            for _ in range(count):
                answer = await send(port, "POST", "/v1/completions", BODY, loose | changes)
                assert answer.status == 200
        cluster.workers["w0"].script.fail_after = 0
        assert (await send(port, "POST", "/v1/completions", BODY, loose)).status == 503
        found = await eventually_snapshot(port, lambda found: found["total"]["requests_last_minute"] == 16)
        names = ("in_time", "late_first_token", "late_gaps")
        assert [found["total"][f"{name}_last_minute"] for name in ("judged", *names)] == [15, 4, 6, 5]
        assert [sum(found["history"][name]) for name in names] == [4, 6, 5]
        assert (found["total"]["slo_ttft_ms"], found["total"]["slo_itl_ms"]) == (500.0, 25.0)
        (missed,) = [wrong for wrong in found["wrong_now"] if wrong["kind"] == "missed-objectives"]
        assert missed["text"].startswith("11 of 15 answers of the last minute missed an objective: 6 by the first")
        metrics = (await send(port, "GET", "/metrics")).body.decode()
        for line in (
            'kvrelay_answers_in_time_total{model="tiny"} 4.0',
            'kvrelay_missed_objectives_total{model="tiny",objective="first_token"} 6.0',
            'kvrelay_missed_objectives_total{model="tiny",objective="between_tokens"} 5.0',
        ):
            assert line in metrics


async def test_workers_that_crash_are_counted_and_those_that_leave_are_not(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port, lease_s = cluster.frontend.port, 1.0

        async def joined(worker_id: str) -> None:
            await cluster.add_worker(worker_id, Script(), lease_ttl_s=lease_s, host="box", pid=7)
            await until_state(worker_id, "ready")

        async def until_state(worker_id: str, state: str | None) -> dict[str, Any]:
            def is_so(found: dict[str, Any]) -> bool:
                return next((each["state"] for each in found["workers"] if each["id"] == worker_id), None) == state

            return await eventually_snapshot(port, is_so)

        for number in range(3):
            await joined(f"left{number}")
            await cluster.deregister(f"left{number}")
            await until_state(f"left{number}", None)
            await cluster.workers[f"left{number}"].die()
        for number in range(3):
            await joined(f"dead{number}")
            await cluster.workers[f"dead{number}"].die()
            await until_state(f"dead{number}", "unreached")
            await asyncio.sleep(LEFT_SHARE * lease_s)
            await cluster.deregister(f"dead{number}")
            found = await until_state(f"dead{number}", None)
        (wrong,) = [wrong for wrong in found["wrong_now"] if wrong["kind"] == "crash-loop"]
        assert "decode workers of tiny on box crashed 3 times" in wrong["text"]
        assert "the last was dead2 (pid 7)" in wrong["text"]


async def test_the_history_after_a_second(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        whole = (await eventually_snapshot(port, lambda found: len(found["history"]["unix_s"]) >= 2))["history"]
        groups = [whole["places"], whole["loaded_tokens"]]
        columns = [column for group in (whole, *groups) for column in group.values() if isinstance(column, list)]
        assert {len(column) for column in columns} == {len(whole["unix_s"])}
        places = set(PrefillPlace) - {PrefillPlace.QUEUE, PrefillPlace.UNDECIDED}  # what a frontend expects
        assert [sorted(group) for group in groups] == [sorted(places), ["disk", "host", "peer"]]
        since = whole["unix_s"][0]
        assert (await snapshot(port, f"?since={since}"))["history"]["unix_s"][0] == since + 1
        assert (await snapshot(port, f"?since={10**11}"))["history"]["unix_s"] == []
        hour = (await snapshot(port, "?hour=1"))["history"]
        assert (whole["step_s"], hour["step_s"]) == (1, 15)
        assert len(hour["unix_s"]) == len(hour["answered"])
        for query in (
            "?hour=2",
            "?hour=x",
            "?hour=",
            "?since=x",
            "?since=-1",
            "?since=",
            "?since=1&since=2",
            "?since=²",
            f"?since={'9' * 13}",
        ):
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


async def test_workers_that_come_later_and_do_not_fit_say_why(model_dir: Path) -> None:
    """One has other weights under the name that is served, the other cannot have an adapter."""
    async with running(model_dir, Script((10,))) as cluster:
        await cluster.add_worker("x", Script(), weights_fingerprint="others")
        await cluster.add_worker("y", Script(), refused_adapters={"sql@1": "rank 64 is above 16"})

        def is_settled(found: dict[str, Any]) -> bool:
            _, other, late = found["workers"]
            return bool(other["problem"]) and late["state"] == "ready"

        found = await eventually_snapshot(
            cluster.frontend.port, lambda found: len(found["workers"]) == 3 and is_settled(found)
        )
        problem = "workers with other weights or another tokenizer serve the name tiny"
        assert [worker["problem"] for worker in found["workers"]] == ["", problem, ""]
        lines = {wrong["kind"]: wrong["text"] for wrong in found["wrong_now"]}
        assert lines["unreached-worker"] == f"x: in discovery, but this frontend has no connection: {problem}"
        assert lines["refused-adapter"] == "y: without adapter sql: rank 64 is above 16; its requests go to others"
