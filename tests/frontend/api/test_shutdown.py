"""The end of a frontend: what is open gets its time, and then an error instead of silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.frontend.doubles import FakeCluster, Script, running
from tests.frontend.raw_http import RawClient, events, request_bytes, send

from kvrelay.core.messages import RequestRefused


async def begin(cluster: FakeCluster, *, stream: bool) -> RawClient:
    body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": stream}).encode()
    client = await RawClient.connect(cluster.frontend.port)
    client.writer.write(request_bytes("POST", "/v1/completions", body))
    await cluster.until(lambda: len(cluster.workers["w0"].requests) == 1)
    return client


async def test_a_stream_that_a_shutdown_cuts_gets_an_error_event(model_dir: Path) -> None:
    async with running(model_dir, Script(delay_s=0.02), shutdown_timeout_s=0.1) as cluster:
        client = await begin(cluster, stream=True)
        # The head goes out with the first token.
        first = await client.reader.readuntil(b"\r\n")
        assert first == b"HTTP/1.1 200 OK\r\n"
        assert cluster.frontend.num_open_requests == 1
        await cluster.frontend.close()
        rest = await client.reader.read()
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b'"message":"the frontend is shutting down"' in rest
        await cluster.until(lambda: bool(cluster.workers["w0"].aborted))
        await client.close()


async def test_a_whole_answer_that_a_shutdown_cuts_is_a_503(model_dir: Path) -> None:
    async with running(model_dir, Script(hang=True), shutdown_timeout_s=0.0) as cluster:
        client = await begin(cluster, stream=False)
        await cluster.frontend.close()
        answer = await client.read_answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error["message"] == "the frontend is shutting down"
        await client.close()


async def test_what_ends_in_time_is_not_cut(model_dir: Path) -> None:
    async with running(model_dir, Script(delay_s=0.001, stop_at=30), shutdown_timeout_s=60.0) as cluster:
        client = await begin(cluster, stream=True)
        await cluster.frontend.close()
        answer = await client.read_answer()
        assert events(answer.body)[-1]["choices"][0]["finish_reason"] == "stop"
        await client.close()


@pytest.mark.parametrize("status", [10**9, -1, 0, 200, 399, 600])
@pytest.mark.parametrize("retry_after_s", [float("nan"), float("inf"), -5.0, 1.0])
async def test_a_workers_absurd_refusal_does_not_break_the_connection(
    model_dir: Path, status: int, retry_after_s: float
) -> None:
    refusal = RequestRefused("", "no\r\nx: y", status, False, retry_after_s)
    async with running(model_dir, Script(refuse=refusal)) as cluster:
        answer = await send(cluster.frontend.port, "POST", "/v1/completions", {"prompt": "a"})
        assert (answer.status, answer.error["message"]) == (500, "no x: y")


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("retry_after_s", [float("nan"), float("inf"), -5.0, 2.5])
async def test_retry_after_is_sane_whatever_a_worker_says(model_dir: Path, status: int, retry_after_s: float) -> None:
    refusal = RequestRefused("", "busy", status, False, retry_after_s)
    async with running(model_dir, Script(refuse=refusal)) as cluster:
        answer = await send(cluster.frontend.port, "POST", "/v1/completions", {"prompt": "a"})
        assert answer.status == status
        assert 1 <= int(answer.headers["retry-after"]) <= 3600


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/openapi.json"])
async def test_paths_without_a_body_take_none(model_dir: Path, path: str) -> None:
    async with running(model_dir, Script()) as cluster:
        assert (await send(cluster.frontend.port, "GET", path)).status == 200
        assert (await send(cluster.frontend.port, "GET", path, b"{}")).status == 413
