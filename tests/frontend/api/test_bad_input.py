"""Each kind of bad input gets its status and OpenAI's error body at once, and leaves the others alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tests.frontend.doubles import Script, running
from tests.frontend.raw_http import RawClient, send

OK = b'{"model": "tiny", "prompt": "fox", "max_tokens": 2}'
CHAT = "/v1/chat/completions"

BODIES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b"null", None),
    (b'{"prompt": "\xff\xfe"}', None),
    (b'{"prompt": "\\ud800"}', None),
    (b'{"prompt": "a", "temperature": NaN}', None),
    (b'{"prompt": "a", "temperature": Infinity}', None),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    (b'{"max_tokens": 1}', "prompt"),
    (b'{"prompt": null}', "prompt"),
    (b'{"prompt": 5}', "prompt"),
    (b'{"prompt": ""}', "prompt"),
    (b'{"prompt": []}', "prompt"),
    (b'{"prompt": [[]]}', "prompt"),
    (b'{"prompt": ["a", 1]}', "prompt"),
    (b'{"prompt": [1.5]}', "prompt"),
    (b'{"prompt": [true]}', "prompt"),
    (b'{"prompt": [-1]}', "prompt"),
    (b'{"prompt": [400]}', "prompt"),
    (b'{"prompt": [99999999999999999999999999]}', "prompt"),
    (b'{"prompt": [' + b"5," * 600 + b"5]}", "prompt"),
    (b'{"prompt": "a", "max_tokens": 512}', "prompt"),
    (b'{"prompt": "a", "max_tokens": -1}', "max_tokens"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
    (b'{"prompt": "a", "max_tokens": 99999999999999999999}', "max_tokens"),
    (b'{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
    (b'{"prompt": "a", "max_tokens": 2.5}', "max_tokens"),
    (b'{"prompt": "a", "n": 0}', "n"),
    (b'{"prompt": "a", "n": 129}', "n"),
    (b'{"prompt": "a", "n": 2, "best_of": 3}', "best_of"),
    (b'{"prompt": "a", "temperature": -0.1}', "temperature"),
    (b'{"prompt": "a", "top_p": 0}', "top_p"),
    (b'{"prompt": "a", "top_p": 1.1}', "top_p"),
    (b'{"prompt": "a", "top_k": -2}', "top_k"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}", "seed"),
    (b'{"prompt": "a", "presence_penalty": 3}', "presence_penalty"),
    (b'{"prompt": "a", "repetition_penalty": 0}', "repetition_penalty"),
    (b'{"prompt": "a", "logprobs": 21}', "logprobs"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
    (b'{"prompt": "a", "logit_bias": {"9999": 1}}', "logit_bias"),
    (b'{"prompt": "a", "stop_token_ids": [9999]}', "stop_token_ids"),
    (b'{"prompt": "a", "min_tokens": 17}', "min_tokens"),
    (b'{"prompt": "a", "stop": ""}', "stop"),
    (b'{"prompt": "a", "stop": ["' + b"x" * 5000 + b'"]}', "stop"),
    (b'{"prompt": "a", "suffix": "b"}', "suffix"),
    (b'{"prompt": "a", "use_beam_search": true}', "use_beam_search"),
    (b'{"prompt": "a", "response_format": {"type": "grammar"}}', "response_format"),
    (b'{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options"),
    (b'{"prompt": "a", "timeout": -1}', "timeout"),
    (b'{"prompt": "a", "priority": 99999999999}', "priority"),
    (b'{"prompt": ["a", "b", "c", "d", "e"]}', "prompt"),
]

CHAT_BODIES: list[tuple[bytes, str | None]] = [
    (b'{"messages": []}', "messages"),
    (b'{"messages": "hi"}', "messages"),
    (b'{"messages": [{"content": "x"}]}', "messages"),
    (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages"),
    (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools"),
    (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "custom", "custom": {}}]}', "tools"),
    (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}', "tools"),
    (b'{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}', "top_logprobs"),
    (b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 21}', "top_logprobs"),
    (b'{"messages": [{"role": "user", "content": "x"}], "modalities": ["audio"]}', "modalities"),
    (b'{"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}', "chat_template"),
]


async def test_every_bad_input_gets_its_status_and_message(model_dir: Path) -> None:
    async with running(model_dir, Script((10,)), max_prompts=4) as cluster:
        port = cluster.frontend.port
        for path, table in (("/v1/completions", BODIES), (CHAT, CHAT_BODIES)):
            for body, param in table:
                answer = await send(port, "POST", path, body)
                assert answer.status == 400, body[:80]
                assert answer.error["param"] == param, body[:80]
                assert answer.error["type"] == "invalid_request_error"
        assert not cluster.workers["w0"].requests
        assert (await send(port, "POST", "/v1/completions", OK)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nothing", b"", 404),
        ("GET", "/v1/completions", b"", 405),
        ("DELETE", "/v1/models", b"", 405),
        ("POST", "/v1/completions", b'{"model": "other", "prompt": "a"}', 404),
        ("GET", "/v1/models/other", b"", 404),
        ("POST", "/tokenize", b"{}", 400),
        ("POST", "/detokenize", b'{"tokens": [-1]}', 400),
        ("POST", "/detokenize", b'{"tokens": [400]}', 400),
    ],
)
async def test_unknown_paths_and_methods_are_refused(
    model_dir: Path, method: str, path: str, body: bytes, status: int
) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        answer = await send(cluster.frontend.port, method, path, body)
        assert answer.status == status
        assert answer.error["message"]
        if status == 405:
            assert answer.headers["allow"] in ("GET", "POST")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/completions/", "/v1/completions"),
        ("//v1//completions", "/v1/completions"),
    ],
)
async def test_a_path_of_a_wrong_base_url_says_what_is_meant(model_dir: Path, path: str, meant: str) -> None:
    """OpenAI's clients want ``/v1`` in their base URL, Anthropic's add it themselves."""
    async with running(model_dir, Script((10,))) as cluster:
        answer = await send(cluster.frontend.port, "POST", path, OK)
        assert (answer.status, answer.json["error"]["message"]) == (404, f"there is nothing at {path}; use {meant}")
        other = await send(cluster.frontend.port, "POST", "/v1/nothing", OK)
        assert other.error["message"] == "there is nothing at /v1/nothing"


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/v1/messages", "/v1/responses", "/tokenize"])
async def test_a_byte_order_mark_is_ignored_and_other_encodings_are_refused(model_dir: Path, path: str) -> None:
    """RFC 8259, 8.1: a parser may ignore the mark; JSON between systems is UTF-8."""
    body = json.dumps(
        {"model": "tiny", "prompt": "fox", "max_tokens": 2, "messages": [{"role": "user", "content": "é"}]}
        | ({"input": "fox"} if path == "/v1/responses" else {})
    )
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        plain = await send(port, "POST", path, body.encode())
        assert (await send(port, "POST", path, body.encode("utf-8-sig"))).status == plain.status
        zipped = await send(port, "POST", path, gzip.compress(body.encode("utf-8-sig")), {"content-encoding": "gzip"})
        assert zipped.status == plain.status
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
            answer = await send(port, "POST", path, body.encode(encoding))
            assert answer.status == 400
            assert b"send JSON as UTF-8" in answer.body


async def test_a_100_mb_body_is_refused_at_once(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        client = await RawClient.connect(cluster.frontend.port)
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n{")
        answer = await client.read_answer()
        assert answer.status == 413
        assert answer.error["type"] == "invalid_request_error"
        await client.close()


async def test_requests_without_the_api_key_are_refused(model_dir: Path) -> None:
    async with running(model_dir, Script((10,)), api_key="sésame") as cluster:
        port = cluster.frontend.port
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sésame"}):
            answer = await send(port, "POST", "/v1/completions", OK, header)
            assert answer.status == 401
            assert answer.error["code"] == "invalid_api_key"
        good = {"authorization": "bearer sésame"}
        assert (await send(port, "POST", "/v1/completions", OK, good)).status == 200
        for path in ("/health", "/live", "/metrics", "/version", "/openapi.json"):
            assert (await send(port, "GET", path)).status == 200


async def test_requests_above_the_in_flight_bound_are_refused(model_dir: Path) -> None:
    async with running(model_dir, Script(hang=True), max_waiting_requests=2) as cluster:
        client = await RawClient.connect(cluster.frontend.port)
        body = b'{"prompt": "a", "n": 2}'
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        await cluster.until(lambda: len(cluster.workers["w0"].requests) == 2)
        answer = await send(cluster.frontend.port, "POST", "/v1/completions", OK)
        assert answer.status == 429
        assert answer.error["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        assert (await send(cluster.frontend.port, "POST", "/v1/completions", b'{"prompt":"a","n":3}')).status == 400
        await client.close()
        await cluster.until(lambda: cluster.frontend.metrics.num_in_flight_of() == 0)


async def test_unknown_fields_are_ignored(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        body = b'{"prompt": "a", "max_tokens": 1, "unheard_of": {"x": [1]}, "user": "me"}'
        assert (await send(cluster.frontend.port, "POST", "/v1/completions", body)).status == 200
