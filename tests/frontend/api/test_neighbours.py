"""What clients, browsers and operators expect of a server beside its answers."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.frontend.doubles import Script, running
from tests.frontend.raw_http import Answer, RawClient, send

from kvrelay.core.event_codec import encode_frame
from kvrelay.core.events import LoadMetrics
from kvrelay.errors import ConfigError, InvalidInputError, PayloadTooLargeError
from kvrelay.frontend.access.access_log import AccessLog
from kvrelay.frontend.access.cors import AllowedOrigins
from kvrelay.frontend.api.app import NOT_SERVED
from kvrelay.frontend.api.content_coding import MAX_MEMBERS, gunzipped
from kvrelay.frontend.side_threads import complete

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 3}


async def ask(port: int, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Answer:
    client = await RawClient.connect(port)
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    client.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    answer = await client.read_answer()
    await client.close()
    return answer


async def test_small_endpoints(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        assert (await send(port, "GET", "/ping")).status == 200
        assert (await send(port, "GET", "/load")).json == {"server_load": 0}
        info = (await send(port, "GET", "/tokenizer_info")).json
        assert (info["model"], info["max_model_len"]) == ("tiny", 512)
        assert "raise_exception" in str(info["chat_template"])
        assert (await send(port, "GET", "/tokenizer_info?model=other")).status == 404
        page = await send(port, "GET", "/docs")
        assert page.headers["content-type"].startswith("text/html")
        text = page.body.decode()
        assert "response_format" in text
        assert "//" not in text.replace("</", ""), "the page asks no other host"


async def test_what_is_not_served_is_refused_by_name(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        for path in NOT_SERVED:
            answer = await send(cluster.frontend.port, "POST", path, {"input": "x"})
            assert answer.status == 400
            assert f"{path} is not served" in str(answer.error["message"])


async def test_gzip_bodies(model_dir: Path) -> None:
    async with running(model_dir, Script((10,)), max_body_bytes=4096) as cluster:
        port, plain = cluster.frontend.port, json.dumps(BODY).encode()
        coded = {"content-encoding": "gzip"}
        assert (await ask(port, "POST", COMPLETIONS, coded, gzip.compress(plain))).status == 200
        assert (await ask(port, "POST", COMPLETIONS, {"content-encoding": "identity"}, plain)).status == 200
        bomb = gzip.compress(b'{"prompt": "' + b" " * 10_000_000 + b'"}', 9)[:4096]
        assert (await ask(port, "POST", COMPLETIONS, coded, bomb)).status == 413
        assert (await ask(port, "POST", COMPLETIONS, coded, plain)).status == 400
        assert (await ask(port, "POST", COMPLETIONS, {"content-encoding": "br"}, plain)).status == 415


@given(st.binary(max_size=2000), st.integers(0, 2000), st.integers(1, 3))
def test_gunzip_decodes_what_fits(data: bytes, limit: int, num_members: int) -> None:
    coded = gzip.compress(data) * num_members
    if len(data) * num_members > limit:
        with pytest.raises(PayloadTooLargeError):
            complete(gunzipped(coded, limit))
    else:
        assert complete(gunzipped(coded, limit)) == data * num_members
        with pytest.raises(InvalidInputError):
            complete(gunzipped(coded[:-1], limit))


def test_gunzip_takes_turns() -> None:
    data = b"x" * 5 * 2**20 + random.Random(1).randbytes(2**20)
    body = gzip.compress(data)
    turns = list(gunzipped(body, len(data)))
    assert len(turns) >= len(body) / 2**16 + 5
    assert complete(gunzipped(body, len(data))) == data


def test_a_body_of_many_empty_members_is_refused_before_it_is_decoded() -> None:
    empty = gzip.compress(b"")
    assert complete(gunzipped(empty * MAX_MEMBERS, 10)) == b""
    work = gunzipped(empty * (MAX_MEMBERS * 200), 10)
    assert list(itertools.islice(work, MAX_MEMBERS)) == [None] * MAX_MEMBERS
    with pytest.raises(InvalidInputError, match="members"):
        next(work)


async def test_decoding_ends_when_its_client_leaves(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client leaves in the first turn; the second does not come."""
    turns: list[int] = []
    left, ended = asyncio.Event(), asyncio.Event()

    def endless(body: bytes, max_bytes: int) -> Iterator[None]:
        try:
            while True:
                turns.append(1)
                loop.call_soon_threadsafe(left.set)
                yield
        finally:
            loop.call_soon_threadsafe(ended.set)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr("kvrelay.frontend.api.app.gunzipped", endless)
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx"
        writer.write(head.encode())
        await left.wait()
        assert (await ask(port, "POST", COMPLETIONS, {}, json.dumps(BODY).encode())).status == 200, "others take turns"
        writer.transport.abort()
        await ended.wait()
        assert (await ask(port, "POST", COMPLETIONS, {}, json.dumps(BODY).encode())).status == 200


async def test_cross_origin_requests(model_dir: Path) -> None:
    origin = "https://app.example"
    async with running(model_dir, Script((10,)), allowed_origins=f"{origin}, http://localhost:3000") as cluster:
        port = cluster.frontend.port
        asking = {"origin": origin, "access-control-request-method": "POST"}
        preflight = await ask(port, "OPTIONS", COMPLETIONS, {**asking, "access-control-request-headers": "x-a, x-b"})
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-methods"] == "POST"
        assert preflight.headers["access-control-allow-headers"] == "x-a, x-b"
        body = json.dumps({**BODY, "stream": True}).encode()
        stream = await ask(port, "POST", COMPLETIONS, {"origin": origin}, body)
        assert stream.headers["access-control-allow-origin"] == origin
        assert "x-kvrelay-worker" in stream.headers["access-control-expose-headers"]
        failed = await ask(port, "POST", COMPLETIONS, {"origin": origin}, b"{")
        assert (failed.status, failed.headers["access-control-allow-origin"]) == (400, origin)
        missing = await ask(port, "GET", "/nothing", {"origin": origin})
        assert (missing.status, missing.headers["access-control-allow-origin"]) == (404, origin)
        other = await ask(port, "OPTIONS", COMPLETIONS, {**asking, "origin": "https://evil.example"})
        assert other.status == 405
        assert "access-control-allow-origin" not in other.headers


async def test_without_the_setting_no_origin_is_allowed(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        answer = await ask(cluster.frontend.port, "GET", "/live", {"origin": "https://app.example"})
        assert "access-control-allow-origin" not in answer.headers
    with pytest.raises(ConfigError, match="is no origin"):
        AllowedOrigins("example.org")


@pytest.mark.parametrize("mode", ["text", "json", "off"])
async def test_the_access_log(model_dir: Path, tmp_path: Path, mode: str) -> None:
    log = tmp_path / "access"
    settings = {"access_log": mode, "access_log_file": str(log), "api_key": "k", "allowed_origins": "*"}
    async with running(model_dir, Script((10,)), **settings) as cluster:
        port = cluster.frontend.port
        key = {"authorization": "Bearer k"}
        done = await ask(port, "POST", COMPLETIONS, key, json.dumps(BODY).encode())
        await ask(port, "POST", COMPLETIONS, key, b"{")
        await ask(port, "GET", "/no thing".replace(" ", "%20"), key)
        asking = {"origin": "https://app.example", "access-control-request-method": "POST"}
        await ask(port, "OPTIONS", COMPLETIONS, asking)
        await ask(port, "GET", COMPLETIONS, {"transfer-encoding": "x"})
    if mode == "off":
        assert not log.exists()
        return
    lines = log.read_text().splitlines()
    assert len(lines) == 5
    if mode == "json":
        first, second, third, preflight, malformed = map(json.loads, lines)
        assert (first["id"], first["status"]) == (done.headers["x-request-id"], "200")
        assert (first["output_tokens"], first["worker"], first["path"]) == (3, "w0", COMPLETIONS)
        assert first["ttft_s"] >= 0
        assert first["key"]
        assert datetime.fromisoformat(first["time"]) <= datetime.fromisoformat(second["time"]) <= datetime.now(UTC)
        assert (second["status"], second["worker"]) == ("400", None)
        assert third["status"] == "404"
        assert (preflight["method"], preflight["status"]) == ("OPTIONS", "200")
        assert malformed["status"] == "400"
    else:
        assert f"id={done.headers['x-request-id']} " in lines[0]
        assert "output_tokens=3" in lines[0]
        assert "path=/no\\x20thing" in lines[2]


async def test_the_access_log_has_a_line_for_each_of_many_equal_requests(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On stdout, at any log level."""
    async with running(model_dir, Script((10,)), access_log="json") as cluster:
        for _ in range(80):
            await send(cluster.frontend.port, "GET", "/live")
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(lines) == len({line["id"] for line in lines}) == 80


def test_the_access_log_follows_its_path(tmp_path: Path) -> None:
    path, moved = tmp_path / "access", tmp_path / "access.1"
    log, other = AccessLog("json", str(path)), AccessLog("json", str(path))
    log.write("a", "", "GET", "/", "200", 0.0)
    other.write("b", "", "GET", "/", "200", 0.0)
    path.rename(moved)
    log.write("c", "", "GET", "/", "200", 0.0)
    other.write("d", "", "GET", "/", "200", 0.0)
    path.unlink()
    log.write("e", "", "GET", "/", "200", 0.0)
    for one in (log, other, log):
        one.close()
    log.write("f", "", "GET", "/", "200", 0.0)
    assert [json.loads(line)["id"] for line in moved.read_text().splitlines()] == ["a", "b"]
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["e"]


def test_an_access_log_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="access log"):
        AccessLog("text", str(tmp_path / "none" / "access"))
    log = AccessLog("text", "/dev/full")
    log.write("a", "", "GET", "/", "200", 0.0)
    log.close()
    assert "a line is lost" in caplog.text


async def test_the_workers_load_is_on_the_metrics_page(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        load = LoadMetrics("w0", 3, 8, 40, 100, 2, 0.4, 0.0, seq=1)
        await cluster.bus.publish(cluster.keys.worker_load("w0"), encode_frame(load))
        frontend = cluster.frontend
        await cluster.until(lambda: bool(frontend.cluster.loads()))
        page = (await send(frontend.port, "GET", "/metrics")).body.decode()
        for group in ("load", "worker"):
            assert f'kvrelay_{group}_requests_running{{model="tiny",worker="w0"}} 3.0' in page
            assert f'kvrelay_{group}_requests_waiting{{model="tiny",worker="w0"}} 2.0' in page
            assert f'kvrelay_{group}_kv_usage_ratio{{model="tiny",worker="w0"}} 0.4' in page
        for line in page.splitlines():
            if line.startswith("# HELP kvrelay_worker_"):
                assert "Deprecated" in line, "a frontend's numbers bear no worker's name"
