"""``/debug/requests``: what a frontend shows of its requests, to whom, and how it finds those of other frontends."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.frontend.doubles import FakeCluster, Script, running
from tests.frontend.raw_http import Answer, RawClient, request_bytes, send
from tests.patience import PATIENCE_S

from kvrelay.config import MetricsConfig
from kvrelay.control.memory import MemoryDiscovery
from kvrelay.core.messages import RequestRefused
from kvrelay.core.workers import CallerInfo
from kvrelay.frontend.api import requests_shown as module
from kvrelay.frontend.api.requests_shown import as_bearer
from kvrelay.http.api_keys import new_api_key
from kvrelay.marks.trace import Trace
from kvrelay.marks.waterfall import Summary, summary

LIST = "/debug/requests"
BODY = {"prompt": "Once upon a time", "max_tokens": 4}
LIST_FIELDS = {
    *("id", "model", "received_unix", "latency_ms", "ttft_ms", "status", "place", "prompt_tokens", "output_tokens"),
    *("frontend", "error"),
}
MORE_FIELDS = {"processes", "spans", "unattributed_ms", "estimates", "transfer", "drafts"}


async def shown(port: int, request_id: str, **headers: str) -> Answer:
    return await send(port, "GET", f"{LIST}/{request_id}", b"", headers)


async def listed(port: int, query: str = "", **headers: str) -> list[dict]:
    answer = await send(port, "GET", LIST + query, b"", headers)
    assert answer.status == 200, answer.body
    return answer.json["requests"]


async def test_a_request_is_listed_and_shown(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        request_id = (await send(port, "POST", "/v1/completions", BODY)).headers["x-request-id"]
        (line,) = await listed(port)
        assert set(line) == LIST_FIELDS
        assert (line["id"], line["model"], line["status"]) == (request_id, "tiny", "finished")
        assert (line["output_tokens"], line["place"], line["error"]) == (4, None, None)
        assert 0 < line["ttft_ms"] <= line["latency_ms"]
        one = (await shown(port, request_id)).json
        assert set(one) == LIST_FIELDS | MORE_FIELDS
        assert {name: one[name] for name in LIST_FIELDS} == line
        phases = {span["phase"] for span in one["spans"]}
        assert {"received", "tokenise", "route", "first_token", "answer", "finished"} <= phases
        assert [(each["role"], each["has_marks"]) for each in one["processes"]] == [
            ("frontend", True),
            ("decode", False),
        ]
        # Nothing is known of the worker, and no span pretends otherwise.
        covered_ms = sum(span["end_ms"] - span["start_ms"] for span in one["spans"] if span["phase"] != "run_queue")
        assert one["unattributed_ms"] > 0
        assert one["unattributed_ms"] + covered_ms == pytest.approx(line["latency_ms"])


async def test_tokens_of_a_running_request_are_shown_as_they_come(model_dir: Path) -> None:
    """Its worker sends three tokens of four, and then is silent for an hour."""
    async with running(model_dir, Script((10,), per_output=3, delay_s=3600.0)) as cluster:
        port = cluster.frontend.port
        client = await RawClient.connect(port)
        client.writer.write(request_bytes("POST", "/v1/completions", json.dumps(BODY | {"stream": True}).encode()))
        await cluster.until(lambda: bool(cluster.workers["w0"].requests))
        async with asyncio.timeout(60.0):
            while (line := (await listed(port))[0])["output_tokens"] != 3:
                assert (line["status"], line["output_tokens"]) == ("running", 0)
                await asyncio.sleep(0.01)
        assert (line["status"], line["prompt_tokens"] > 0) == ("running", True)
        client.writer.transport.abort()


async def test_orders_limits_and_what_is_wrong_with_a_query(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        ids = [(await send(port, "POST", "/v1/completions", BODY)).headers["x-request-id"] for _ in range(3)]
        refused = await send(port, "POST", "/v1/completions", BODY | {"model": "other"})
        assert refused.status == 404
        failed = refused.headers["x-request-id"]
        assert [line["id"] for line in await listed(port)] == [failed, *reversed(ids)]
        assert [line["id"] for line in await listed(port, "?limit=2")] == [failed, ids[2]]
        (line,) = await listed(port, "?order=invalid")
        assert (line["id"], line["status"]) == (failed, "invalid")
        assert "other" in line["error"]
        assert await listed(port, "?order=failed") == []
        slowest = [line["latency_ms"] for line in await listed(port, "?order=slowest")]
        assert slowest == sorted(slowest, reverse=True)
        long = f"?limit=000000001{'9' * 5000}"
        wrong = ("?order=best", "?limit=0", "?limit=-1", "?limit=1e3", "?limit=1001", "?limit=%00", "?limit=²", long)
        for query in wrong:
            assert (await send(port, "GET", LIST + query)).status == 400, query


async def test_only_the_lines_that_are_asked_for_are_made(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line costs 30 us of the event loop, and a page asks every second."""
    made: list[str] = []

    def counted(trace: Trace, frontend: str) -> Summary:
        made.append(trace.request_id)
        return summary(trace, frontend)

    monkeypatch.setattr("kvrelay.frontend.api.requests_shown.summary", counted)
    async with running(model_dir, Script((10,))) as cluster:
        for _ in range(5):
            await send(cluster.frontend.port, "POST", "/v1/completions", BODY)
        for order in ("recent", "slowest"):
            shown_ids = [line["id"] for line in await listed(cluster.frontend.port, f"?limit=2&order={order}")]
            assert shown_ids == made[-2:]
    assert len(made) == 4


@pytest.mark.parametrize("query", ["?order=", "?limit=", "?order=recent&order="])
async def test_an_empty_parameter_is_wrong(model_dir: Path, query: str) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        assert (await send(cluster.frontend.port, "GET", LIST + query)).status == 400


@pytest.mark.parametrize(
    "request_id", ["x", "%00", "%0a", "cmpl-%1b[31m", "a" * 3000, "..", "cmpl-" + "0" * 32, "cmpl-" + "0" * 31 + "%"]
)
async def test_an_id_that_is_none_is_not_found(model_dir: Path, request_id: str) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        assert (await shown(cluster.frontend.port, request_id)).status == 404


async def test_a_running_request_is_shown_as_it_is_now(model_dir: Path) -> None:
    async with running(model_dir, Script((10,), hang=True)) as cluster:
        port = cluster.frontend.port
        client = await RawClient.connect(port)
        client.writer.write(request_bytes("POST", "/v1/completions", json.dumps(BODY).encode()))
        await cluster.until(lambda: bool(cluster.workers["w0"].requests))
        (line,) = await listed(port)
        assert (line["status"], line["ttft_ms"], line["model"]) == ("running", None, "tiny")
        assert (await shown(port, line["id"])).json["status"] == "running"
        await client.close()
        await cluster.until(lambda: bool(cluster.workers["w0"].aborted))
        (line,) = await listed(port, "?order=disconnected")
        assert line["status"] == "disconnected"


async def test_without_a_control_plane_a_frontend_lists_its_own(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        request_id = (await send(port, "POST", "/v1/completions", BODY)).headers["x-request-id"]
        cluster.broker.go_offline()
        assert [line["id"] for line in await listed(port)] == [request_id]


async def test_a_control_plane_that_does_not_answer_holds_no_list_back(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(discovery: MemoryDiscovery, prefix: str) -> dict[str, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    async with running(model_dir, Script((10,))) as cluster:
        monkeypatch.setattr(MemoryDiscovery, "list", never)
        monkeypatch.setattr(module, "ASK_TIMEOUT_S", 0.01)
        async with asyncio.timeout(PATIENCE_S):
            assert await listed(cluster.frontend.port) == []


async def test_a_request_that_moves_shows_both_workers(model_dir: Path) -> None:
    async with running(model_dir, Script((10, 11, 12), die_after=2), Script((10, 11, 12))) as cluster:
        port = cluster.frontend.port
        request_id = (await send(port, "POST", "/v1/completions", {**BODY, "stream": True})).headers["x-request-id"]
        one = (await shown(port, request_id)).json
        assert one["status"] == "migrated"
        assert [each["name"] for each in one["processes"]][1:] == ["w0", "w1"]
        (moved,) = [span for span in one["spans"] if span["phase"] == "migrated"]
        assert moved["value"] == 2


async def test_what_every_worker_refuses_is_refused(model_dir: Path) -> None:
    refusal = RequestRefused("", "full", 429, retryable=True)
    async with running(model_dir, Script(refuse=refusal)) as cluster:
        port = cluster.frontend.port
        answer = await send(port, "POST", "/v1/completions", BODY)
        assert answer.status == 429
        one = (await shown(port, answer.headers["x-request-id"])).json
        assert one["status"] == "refused"
        assert {"refuse", "refused", "failed"} <= {span["phase"] for span in one["spans"]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_carries_its_waterfall_if_asked(model_dir: Path, path: str, stream: bool) -> None:
    message = [{"role": "user", "content": "Once"}]
    bodies = {
        "/v1/completions": BODY,
        "/v1/chat/completions": {"messages": message, "max_tokens": 4},
        "/v1/messages": {"messages": message, "max_tokens": 4, "model": "tiny"},
        "/v1/responses": {"input": "Once", "max_output_tokens": 4, "model": "tiny"},
    }
    async with running(model_dir, Script((10,))) as cluster:
        body = bodies[path] | {"stream": stream}
        answer = await send(cluster.frontend.port, "POST", path, body, {"x-kvrelay-waterfall": "1"})
        events = [answer.body]
        if stream:
            lines = answer.body.split(b"\n")
            events = [line[6:] for line in lines if line.startswith(b"data: {")]
        last = msgspec.json.decode(events[-1])
        found = last["kvrelay_waterfall"]
        assert set(found) == LIST_FIELDS | MORE_FIELDS
        assert found["id"] == answer.headers["x-request-id"]
        assert b"kvrelay_waterfall" not in b"".join(events[:-1])
        for silent in ({}, {"x-kvrelay-waterfall": "0"}):
            plain = await send(cluster.frontend.port, "POST", path, body, silent)
            assert b"kvrelay_waterfall" not in plain.body


async def test_what_a_template_quotes_of_a_prompt_is_not_kept(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        body = {"messages": [{"role": "s3cret", "content": "hidden"}]}
        refused = await send(port, "POST", "/v1/chat/completions", body)
        assert "unknown role s3cret" in refused.error["message"]
        (line,) = await listed(port)
        assert line["error"] == "the chat template refuses these messages"


async def test_without_marks_nothing_is_kept(model_dir: Path) -> None:
    async with running(model_dir, Script((10,)), monitoring=MetricsConfig(request_marks=False)) as cluster:
        port = cluster.frontend.port
        answer = await send(port, "POST", "/v1/completions", BODY, {"x-kvrelay-waterfall": "1"})
        assert answer.status == 200
        assert b"kvrelay_waterfall" not in answer.body
        assert await listed(port) == []
        assert (await shown(port, answer.headers["x-request-id"])).status == 404


# -- who may see what -------------------------------------------------------------------------------------------------


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"any:{key}".encode()).decode()


async def test_a_key_sees_its_own_requests_and_an_operator_all(model_dir: Path, tmp_path: Path) -> None:
    keys, lines = zip(*(new_api_key(name) for name in ("alice", "bob")), strict=True)
    operator, operator_line = new_api_key("operator")
    (tmp_path / "keys").write_text("\n".join(lines))
    (tmp_path / "operators").write_text(operator_line)
    monitoring = MetricsConfig(metrics_keys_file=str(tmp_path / "operators"))
    settings = {"api_keys_file": str(tmp_path / "keys"), "monitoring": monitoring}
    async with running(model_dir, Script((10,)), **settings) as cluster:
        port = cluster.frontend.port
        alice, bob, chief = (f"Bearer {key}" for key in (*keys, operator))
        answer = await send(port, "POST", "/v1/completions", BODY, {"authorization": alice})
        request_id = answer.headers["x-request-id"]
        for path in (LIST, f"{LIST}/{request_id}"):
            for wrong in ("", "Bearer wrong", "Basic !", basic("wrong"), "Basic " + "=" * 9):
                refused = await send(port, "GET", path, b"", {"authorization": wrong} if wrong else {})
                assert refused.status == 401
                assert "Basic" in refused.body.decode() or "www-authenticate" in refused.headers
        for allowed in (alice, basic(keys[0]), chief, basic(operator)):
            assert [line["id"] for line in await listed(port, authorization=allowed)] == [request_id]
            assert (await shown(port, request_id, authorization=allowed)).status == 200
        assert await listed(port, authorization=bob) == []
        others = await shown(port, request_id, authorization=bob)
        none = await shown(port, request_id[:-1] + "_", authorization=bob)
        assert (others.status, none.status) == (404, 404)
        # The operators' keys open nothing else.
        assert (await send(port, "POST", "/v1/completions", BODY, {"authorization": chief})).status == 401
        assert (await send(port, "POST", "/v1/completions", BODY, {"authorization": basic(keys[0])})).status == 401


@pytest.mark.parametrize(("settings", "status"), [({"api_key": "kvr-own"}, 200), ({}, 403)])
async def test_the_cluster_is_for_the_only_key_or_an_operators(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any], status: int
) -> None:
    key, line = new_api_key("alice")
    (tmp_path / "keys").write_text(line)
    async with running(model_dir, Script((10,)), **(settings or {"api_keys_file": str(tmp_path / "keys")})) as cluster:
        held = settings.get("api_key", key)
        for authorization, expected in ((f"Bearer {held}", status), (basic(held), status), ("Bearer wrong", 401)):
            answer = await send(cluster.frontend.port, "GET", "/debug/cluster", b"", {"authorization": authorization})
            assert answer.status == expected


def test_basic_is_a_bearer_whose_key_is_the_password() -> None:
    assert as_bearer(basic("kvr-x:y")) == "Bearer kvr-x:y"
    assert as_bearer("Bearer kvr-x") == "Bearer kvr-x"
    assert as_bearer("Basic é") == ""


# -- several frontends ------------------------------------------------------------------------------------------------


async def two_frontends(cluster: FakeCluster, *names: str) -> list[int]:
    lease = await cluster.control.discovery.grant(60.0)
    for name in names:
        entry = msgspec.json.encode(CallerInfo(name, "key"))
        await cluster.control.discovery.put(cluster.keys.frontend(name), entry, lease)
    started = [await cluster.start(name=name) for name in names]
    for frontend in started:
        await cluster.until(lambda frontend=frontend: len(frontend.cluster.models) == 1)
    cluster.others = started[:-1]
    return [frontend.port for frontend in started]


async def test_any_frontend_shows_the_requests_of_all(model_dir: Path) -> None:
    cluster = FakeCluster(model_dir)
    try:
        await cluster.add_worker("w0", Script((10,)))
        first, second = await two_frontends(cluster, "0123456789", "abcdef0123")
        mine = {"x-request-id": "mine-1"}
        ids = {(await send(first, "POST", "/v1/completions", BODY, mine)).headers["x-request-id"]}
        ids.add((await send(second, "POST", "/v1/completions", BODY)).headers["x-request-id"])
        for port in (first, second):
            lines = await listed(port)
            assert {line["id"] for line in lines} == ids
            assert {line["frontend"] for line in lines} == {"0123456789", "abcdef0123"}
            for request_id in ids:
                one = (await shown(port, request_id)).json
                assert one["id"] == request_id
                assert one["frontend"] in request_id
        # A frontend that is gone is named.
        await cluster.others[0].close()
        gone = await shown(second, next(each for each in ids if "0123456789" in each))
        assert gone.status == 404
        assert "0123456789" in gone.error["message"]
        assert {line["frontend"] for line in await listed(second)} == {"abcdef0123"}
    finally:
        await asyncio.gather(*(frontend.close() for frontend in cluster.others))
        await cluster.close()
