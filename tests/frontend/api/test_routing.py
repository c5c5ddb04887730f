"""What a frontend says about its routing, and settings that reach it while it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.frontend.doubles import FakeCluster, Script, running
from tests.frontend.raw_http import events, send

from kvrelay.core.event_codec import encode_frame
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import BlockStored
from kvrelay.core.hashing import compute_sequence_hashes

PROMPT = list(range(16, 96))


async def ask(cluster: FakeCluster, path: str, body: dict[str, object] | None = None) -> tuple[int, Any]:
    assert cluster.frontend is not None
    answer = await send(cluster.frontend.port, "GET" if body is None else "POST", path, body or b"")
    return answer.status, json.loads(answer.body)


async def settings(cluster: FakeCluster) -> Any:
    _, state = await ask(cluster, "/v1/kvrelay/router")
    return state["models"][0]["settings"]


async def put(cluster: FakeCluster, name: str, value: object) -> None:
    await cluster.control.discovery.put(cluster.keys.config_value(name), json.dumps(value).encode())


async def publish(cluster: FakeCluster, worker_id: str, adapter: str | None = None) -> list[str]:
    """The worker holds PROMPT's blocks as the adapter computes them, and serves and tells what it holds."""
    log = KvEventLog(worker_id, 0)
    hashes = compute_sequence_hashes(PROMPT, 16, lora=adapter)
    batch = log.append([BlockStored(None, hashes, 16)])

    async def serve(data: bytes) -> bytes:
        return log.serve_replay(data)

    await cluster.bus.serve(cluster.keys.worker_replay(worker_id), serve)
    await cluster.bus.publish(cluster.keys.worker_kv_events(worker_id), encode_frame(batch))
    return sorted(f"{block:016x}" for block in hashes)


async def test_a_decision_is_explained_and_nothing_is_placed(model_dir: Path) -> None:
    async with running(model_dir, Script(), Script()) as cluster:
        await put(cluster, "router.router", "kv")
        await put(cluster, "router.overlap_weight", 0.5)
        while (await settings(cluster))["overlap_weight"] != 0.5:
            pass
        blocks = await publish(cluster, "w1")
        shown: dict[str, Any] = {"models": [{"workers": [{"blocks": []}] * 2}]}
        while [worker["blocks"] for worker in shown["models"][0]["workers"]] != [[], blocks]:
            _, shown = await ask(cluster, "/v1/kvrelay/router?blocks=1")
            for worker in shown["models"][0]["workers"]:
                worker["blocks"].sort()
        assert shown["models"][0]["workers"][1]["state"]["index"] == "synced"
        for _ in range(2):
            status, answer = await ask(cluster, "/v1/kvrelay/route", {"model": "tiny", "prompt": PROMPT})
            assert status == 200
            assert (answer["pid"], answer["model"], answer["block_size"]) == (os.getpid(), "tiny", 16)
            assert answer["num_prompt_tokens"] == len(PROMPT)
            decision = answer["decision"]
            assert (decision["worker_id"], decision["policy"], decision["overlap_blocks"]) == ("w1", "kv", 5)
            assert [(found["score"], found["prefill_tokens"]) for found in decision["candidates"]] == [
                (-80, 0),
                (-40, 0),
            ]
            assert answer["counts"] == {
                "fallbacks": 0,
                "places": {},
                "refusals": {},
                "rejections": dict.fromkeys(
                    ("in_flight", "requests_per_minute", "tokens_per_minute", "requests_at_once"), 0
                ),
            }
        assert not any(worker.requests for worker in cluster.workers.values())


async def test_one_prompt_is_explained_and_bad_input_refused(model_dir: Path) -> None:
    async with running(model_dir, Script()) as cluster:
        assert (await ask(cluster, "/v1/kvrelay/route", {"prompt": "the fox"}))[0] == 200
        for body, status in (
            ({"prompt": ["a", "b"]}, 400),
            ({"prompt": [5000]}, 400),
            ({"prompt": []}, 400),
            ({"model": "tiny"}, 400),
            ({"prompt": "a", "model": "nope"}, 404),
        ):
            assert (await ask(cluster, "/v1/kvrelay/route", body))[0] == status
        assert (await ask(cluster, "/v1/kvrelay/route"))[0] == 405
        for query, status in (("", 200), ("?blocks=0", 200), ("?blocks=1", 200), ("?blocks=2", 400), ("?blocks", 400)):
            assert (await ask(cluster, f"/v1/kvrelay/router{query}"))[0] == status


async def test_settings_reach_running_and_later_frontends(model_dir: Path) -> None:
    cluster = FakeCluster(model_dir)
    try:
        await put(cluster, "router.router", "least-loaded")
        await put(cluster, "router.decode_weight", -3)
        await put(cluster, "router.temperatur", 1)
        await put(cluster, "disagg.max_local_prefill_length", 1)
        await cluster.add_worker("w0", Script())
        await cluster.start()
        started = {"router": "least-loaded", "overlap_weight": 1.0, "decode_weight": 0.1, "temperature": 0.0}
        assert await settings(cluster) == started
        await put(cluster, "router.temperature", 0.5)
        while (await settings(cluster))["temperature"] != 0.5:
            pass
        await cluster.control.discovery.put(cluster.keys.config_value("router.overlap_weight"), b"\xff{")
        await cluster.control.discovery.delete(cluster.keys.config_value("router.router"))
        while (await settings(cluster))["router"] != "round-robin":
            pass
        assert await settings(cluster) == {**started, "router": "round-robin", "temperature": 0.5}
    finally:
        await cluster.close()


async def test_the_work_of_each_worker_is_counted(model_dir: Path) -> None:
    async with running(model_dir, Script(cached=16)) as cluster:
        assert cluster.frontend is not None
        body: dict[str, object] = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
        for _ in range(2):
            answer = await send(cluster.frontend.port, "POST", "/v1/completions", body)
            assert answer.headers["x-kvrelay-worker"] == "w0"
            assert events(answer.body)
        _, state = await ask(cluster, "/v1/kvrelay/router")
        (worker,) = state["models"][0]["workers"]
        assert worker["blocks"] is None
        assert worker["state"] == {
            "worker_id": "w0",
            "index": "none",
            "requests": 2,
            "computed_tokens": 2 * (80 - 16),
            "cached_tokens": 2 * 16,
            "generated_tokens": 6,
        }


async def test_blocks_of_an_adapter_count_for_its_requests_only(model_dir: Path) -> None:
    cluster = FakeCluster(model_dir)
    try:
        await cluster.add_worker("w0", Script(), adapters=("chat@1", "sql@1"))
        await cluster.start()
        await put(cluster, "router.router", "kv")
        await publish(cluster, "w0", "chat@1")

        async def overlap(model: str) -> int:
            status, answer = await ask(cluster, "/v1/kvrelay/route", {"model": model, "prompt": PROMPT})
            assert status == 200, answer
            found: int = answer["decision"]["overlap_blocks"]
            return found

        while await overlap("chat") != len(PROMPT) // 16:
            pass
        assert [await overlap(model) for model in ("tiny", "sql")] == [0, 0]
    finally:
        await cluster.close()
