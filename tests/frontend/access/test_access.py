"""Who may ask, and how often: keys from a file, requests per minute, TLS."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx
import pytest
from tests.certificates import make_certificate
from tests.frontend.doubles import Script, running
from tests.frontend.raw_http import RawClient, send

from kvrelay.config import FrontendConfig, KeyLimits, MetricsConfig
from kvrelay.errors import ConfigError
from kvrelay.http import server_tls
from kvrelay.http.api_keys import ApiKeys, new_api_key, read_keys_file

BODY: dict[str, object] = {"prompt": [5, 6], "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_new_key_is_admitted_by_its_line(tmp_path: Path) -> None:
    alice, alice_line = new_api_key("alice")
    bob, bob_line = new_api_key("bob@example.org")
    nameless = new_api_key("x")[1].partition(":")[2].upper()
    path = tmp_path / "keys"
    path.write_text(f"# clients\n{alice_line}\n\n{bob_line}\n{nameless}\n")
    keys = ApiKeys.load("plain", str(path))
    assert keys
    assert keys.name_of(f"Bearer {alice}") == "alice"
    assert keys.name_of(f"bearer  {bob} ") == "bob@example.org"
    assert keys.name_of("Bearer plain") == "default"
    for wrong in ("", "Bearer", f"Basic {alice}", f"Bearer {alice}x", alice, f"Bearer {alice_line}", "Bearer "):
        assert keys.name_of(wrong) is None
    assert set(read_keys_file(path)) == {"alice", "bob@example.org", "key-5"}
    assert alice != new_api_key("alice")[0]
    assert alice not in path.read_text()
    assert alice not in repr(keys)


def test_a_file_of_another_system_has_a_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key, line = new_api_key("alice")
    path.write_bytes(f"{line}\r\n# end\r\n".encode("utf-8-sig"))
    assert ApiKeys.load("", str(path)).name_of(f"Bearer {key}") == "alice"


def test_without_keys_every_request_is_admitted() -> None:
    keys = ApiKeys.load("", "")
    assert not keys
    assert keys.name_of("") == ""
    assert keys.limits_of("") == KeyLimits()


def test_limits_stand_behind_the_key(tmp_path: Path) -> None:
    limits = KeyLimits(
        requests_per_minute=0,
        tokens_per_minute=100,
        requests_at_once=3,
        min_priority=-2,
        max_priority=0,
        max_body_bytes=1000,
        max_prompt_tokens=20,
        max_output_tokens=10,
    )
    alice, alice_line = new_api_key("alice", limits)
    bob, bob_line = new_api_key("bob")
    path = tmp_path / "keys"
    path.write_text(f"{alice_line}\n{bob_line}\n{'a' * 64}   max_body_bytes=5")
    keys = ApiKeys.load("plain", str(path))
    assert keys.name_of(f"Bearer {alice}") == "alice"
    assert keys.name_of(f"Bearer {bob}") == "bob"
    assert keys.limits_of("alice") == limits
    assert keys.limits_of("key-3") == KeyLimits(max_body_bytes=5)
    assert keys.limits_of("bob") == keys.limits_of("default") == KeyLimits()
    common = ApiKeys.load("plain", str(path), KeyLimits(requests_per_minute=7))
    assert common.limits_of("key-3") == KeyLimits(requests_per_minute=7, max_body_bytes=5)
    assert common.limits_of("") == common.limits_of("bob") == KeyLimits(requests_per_minute=7)
    assert common.limits_of("alice") == limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no API key"),
        ("# nothing\n", "no API key"),
        ("alice:kvr-secret-pasted-by-mistake\n", "line 1"),
        ("ok:" + "a" * 64 + "\nbad name:" + "b" * 64, "line 2"),
        ("a:" + "a" * 64 + "\na:" + "b" * 64, "named a"),
        ("a:" + "a" * 64 + " kvr-secret", "line 1: expected limits like requests_per_minute"),
        ("a:" + "a" * 64 + " max_body_bytes=1 max_body_bytes=2", "line 1: .* once"),
        ("#\na:" + "a" * 64 + " max_body_bytes=0", "line 2: max_body_bytes must be at least 1"),
        ("a:" + "a" * 64 + " max_body_bytes=-1", "line 1: max_body_bytes must be at least 1"),
        ("a:" + "a" * 64 + " max_priority=--1", "line 1: max_priority must be a whole number"),
        ("a:" + "a" * 64 + " max_body_bytes=" + "9" * 5000, "line 1: max_body_bytes must be a whole number"),
        ("a:" + "a" * 64 + " max_body_bytes", "line 1: max_body_bytes must be a whole number"),
    ],
)
def test_a_bad_keys_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_keys_file(path)
    assert "secret" not in caught.value.message


def test_a_missing_keys_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read API keys"):
        ApiKeys.load("", str(tmp_path / "none"))


def test_an_invalid_key_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a key name"):
        new_api_key("a:b")


async def test_each_key_has_its_own_rate(model_dir: Path, tmp_path: Path) -> None:
    made = dict(new_api_key(name) for name in ("alice", "bob"))
    path = tmp_path / "keys"
    path.write_text("\n".join(made.values()))
    alice, bob = made
    async with running(model_dir, Script((10,)), api_keys_file=str(path), requests_per_minute=2) as cluster:
        port = cluster.frontend.port
        for key in (alice, bob):
            for status in (200, 200, 429):
                answer = await send(port, "POST", "/v1/completions", BODY, bearer(key))
                assert answer.status == status
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            assert answer.error["type"] == "rate_limit_error"
            assert answer.headers["connection"] == "keep-alive"
            assert (await send(port, "GET", "/v1/models", headers=bearer(key))).status == 200
        assert (await send(port, "POST", "/v1/completions", BODY, bearer("kvr-other"))).status == 401
        assert len(cluster.workers["w0"].requests) == 4


async def test_a_key_with_limits_of_its_own_beside_one_without(model_dir: Path, tmp_path: Path) -> None:
    limits = KeyLimits(requests_per_minute=0, max_body_bytes=300, max_prompt_tokens=20, max_output_tokens=10)
    alice, alice_line = new_api_key("alice", limits)
    bob, bob_line = new_api_key("bob")
    path = tmp_path / "keys"
    path.write_text(f"{alice_line}\n{bob_line}")
    prompts = [[5] * 7] * 3
    too_much: list[tuple[dict[str, object], str, str]] = [
        ({"prompt": [5] * 21, "max_tokens": 1}, "prompt", "(max_prompt_tokens)"),
        ({"prompt": prompts, "max_tokens": 1}, "prompt", "(max_prompt_tokens)"),
        ({"prompt": [5], "max_tokens": 11}, "max_tokens", "(max_output_tokens)"),
        ({"prompt": [5], "max_tokens": 6, "n": 2}, "max_tokens", "(max_output_tokens)"),
        ({"prompt": [[5], [6]], "n": 6}, "max_tokens", "(max_output_tokens)"),
    ]
    async with running(model_dir, Script((10,)), api_keys_file=str(path), requests_per_minute=6) as cluster:
        port = cluster.frontend.port
        for body, param, limit in too_much:
            refused = await send(port, "POST", "/v1/completions", body, bearer(alice))
            assert (refused.status, refused.error["param"]) == (413, param)
            assert limit in refused.error["message"]
            assert (await send(port, "POST", "/v1/completions", body, bearer(bob))).status == 200
        for number in range(4):
            exact = {"prompt": [5] * 20, "max_tokens": 5, "n": 2, "seed": number}
            assert (await send(port, "POST", "/v1/completions", exact, bearer(alice))).status == 200
        assert (await send(port, "POST", "/v1/completions", BODY, bearer(bob))).status == 200
        refused = await send(port, "POST", "/v1/completions", BODY, bearer(bob))
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert "6 requests per minute (requests_per_minute)" in refused.error["message"]


async def test_a_key_asks_within_its_priorities_and_its_tokens(model_dir: Path, tmp_path: Path) -> None:
    limits = KeyLimits(min_priority=-1, max_priority=4, tokens_per_minute=6, requests_at_once=2)
    alice, line = new_api_key("alice", limits)
    bob, bob_line = new_api_key("bob")
    path = tmp_path / "keys"
    path.write_text(f"{line}\n{bob_line}")
    async with running(model_dir, Script((10, 11)), api_keys_file=str(path)) as cluster:
        port = cluster.frontend.port
        for priority in (-2, 5):
            refused = await send(port, "POST", "/v1/completions", {**BODY, "priority": priority}, bearer(alice))
            assert (refused.status, refused.error["param"]) == (400, "priority")
            assert "from -1 to 4 (min_priority, max_priority)" in refused.error["message"]
        refused = await send(port, "POST", "/v1/completions", {**BODY, "n": 3}, bearer(alice))
        assert (refused.status, refused.error["param"]) == (400, "n"), "each choice is one"
        for _ in range(2):
            answer = await send(port, "POST", "/v1/completions", {**BODY, "priority": -1}, bearer(alice))
            assert answer.status == 200, "two tokens of the prompt and two of the answer each: the second goes below 0"
        refused = await send(port, "POST", "/v1/completions", BODY, bearer(alice))
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert "6 tokens per minute (tokens_per_minute)" in refused.error["message"]
        assert (await send(port, "POST", "/v1/completions", {**BODY, "priority": -9}, bearer(bob))).status == 200


async def test_no_key_learns_what_another_has_cached(model_dir: Path, tmp_path: Path) -> None:
    made = dict(new_api_key(name) for name in ("alice", "bob"))
    (alice, bob), path = made, tmp_path / "keys"
    path.write_text("\n".join(made.values()))
    async with running(model_dir, Script((10,)), api_keys_file=str(path)) as cluster:
        port = cluster.frontend.port
        for key, fields in (
            (alice, {}),
            (bob, {}),
            (bob, {"cache_salt": "x"}),
            (alice, {"cache_salt": "x"}),
            (bob, {"cache_salt": "kvrelay-key:alice"}),
        ):
            assert (await send(port, "POST", "/v1/completions", {**BODY, **fields}, bearer(key))).status == 200
        salts = [request.sampling.cache_salt for request in cluster.workers["w0"].requests]
        assert salts[:2] == ["kvrelay-key:alice", "kvrelay-key:bob"], "a renewed key has the same name"
        assert len(set(salts)) == 5
        refused = await send(port, "GET", "/v1/kvrelay/router?blocks=1", headers=bearer(bob))
        assert (refused.status, refused.error["param"]) == (400, "blocks")


async def test_keys_that_trust_each_other_share_the_cache(model_dir: Path, tmp_path: Path) -> None:
    key, line = new_api_key("alice")
    path = tmp_path / "keys"
    path.write_text(line)
    async with running(model_dir, Script((10,)), api_keys_file=str(path), share_prefix_cache=True) as cluster:
        port = cluster.frontend.port
        for fields in ({}, {"cache_salt": "x"}):
            assert (await send(port, "POST", "/v1/completions", {**BODY, **fields}, bearer(key))).status == 200
        assert [request.sampling.cache_salt for request in cluster.workers["w0"].requests] == [None, "x"]
        forged = {**BODY, "cache_salt": "kvrelay-key:bob"}
        refused = await send(port, "POST", "/v1/completions", forged, bearer(key))
        assert (refused.status, refused.error["param"]) == (400, "cache_salt")
        assert (await send(port, "GET", "/v1/kvrelay/router?blocks=1", headers=bearer(key))).status == 200


async def test_a_key_in_a_trailer_is_ignored(model_dir: Path, tmp_path: Path) -> None:
    """A chunked body ends with headers of its own, behind the head by which the client was let in."""
    key, line = new_api_key("alice", KeyLimits(requests_per_minute=1))
    path = tmp_path / "keys"
    path.write_text(line)
    body = json.dumps(BODY).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunks = b"%x\r\n%b\r\n0\r\nauthorization: Bearer other\r\n\r\n" % (len(body), body)
    async with running(model_dir, Script((10,)), api_keys_file=str(path)) as cluster:
        client = await RawClient.connect(cluster.frontend.port)
        for status in (200, 429):
            client.writer.write(head.encode() + chunks)
            assert (await client.read_answer()).status == status
        await client.close()


async def test_an_answer_without_a_length_is_cut_to_what_the_key_allows(model_dir: Path, tmp_path: Path) -> None:
    key, line = new_api_key("alice", KeyLimits(max_output_tokens=9))
    path = tmp_path / "keys"
    path.write_text(line)
    async with running(model_dir, Script((10,)), api_keys_file=str(path)) as cluster:
        port, chat = cluster.frontend.port, {"messages": [{"role": "user", "content": "Hi"}]}
        for endpoint, body, expected in (
            ("/v1/chat/completions", chat, 9),
            ("/v1/chat/completions", {**chat, "n": 2}, 8),
            ("/v1/completions", {"prompt": [5]}, 9),
        ):
            answer = await send(port, "POST", endpoint, body, bearer(key))
            assert answer.json["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_above_the_limit_of_its_key_is_refused_before_it_is_read(
    model_dir: Path, tmp_path: Path, chunked: bool
) -> None:
    key, line = new_api_key("alice", KeyLimits(max_body_bytes=300))
    path = tmp_path / "keys"
    path.write_text(line)
    length = "transfer-encoding: chunked" if chunked else "content-length: 301"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{length}\r\n\r\n"
    async with running(model_dir, Script((10,)), api_keys_file=str(path)) as cluster:
        port = cluster.frontend.port
        client = await RawClient.connect(port)
        client.writer.write(head.encode() + (b"12d\r\n" + b"x" * 301 if chunked else b""))
        answer = await client.read_answer()
        await client.close()
        assert answer.status == 413
        assert answer.error["message"] == "the request body is above 300 bytes (max_body_bytes)"
        padded = {**BODY, "user": "x" * 200}
        assert (await send(port, "POST", "/v1/completions", padded, bearer(key))).status == 200


@pytest.mark.parametrize(("host", "status"), [("0.0.0.0", 401), ("127.0.0.1", 200)])
async def test_metrics_need_the_key_beyond_loopback(model_dir: Path, host: str, status: int) -> None:
    async with running(model_dir, Script((10,)), host=host, api_key="k") as cluster:
        port = cluster.frontend.port
        assert (await send(port, "GET", "/metrics")).status == status
        assert (await send(port, "GET", "/metrics", headers=bearer("k"))).status == 200
        assert (await send(port, "GET", "/health")).status == 200
        assert (await send(port, "GET", "/live")).status == 200


async def test_a_metrics_key_opens_what_workers_open_with_it_and_no_more(model_dir: Path, tmp_path: Path) -> None:
    scraper, line = new_api_key("scraper")
    (tmp_path / "keys").write_text(line)
    monitoring = MetricsConfig(metrics_keys_file=str(tmp_path / "keys"))
    async with running(model_dir, Script((10,)), host="0.0.0.0", api_key="k", monitoring=monitoring) as cluster:
        port = cluster.frontend.port
        for path, status in (("/metrics", 200), ("/debug/cluster", 200), ("/v1/models", 401), ("/tokenizer_info", 401)):
            assert (await send(port, "GET", path, headers=bearer(scraper))).status == status, path
        assert (await send(port, "GET", "/metrics", headers=bearer("other"))).status == 401


async def test_https_serves_whole_and_streamed_answers(model_dir: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    settings = {"tls_cert": str(certificate), "tls_key": str(key)}
    async with running(model_dir, Script((10,)), **settings) as cluster:
        assert cluster.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(verify=trust, timeout=60) as client:
            answer = await client.post(f"{cluster.url}/v1/completions", json=BODY)
            assert answer.json()["usage"]["completion_tokens"] == 2
            lines = []
            async with client.stream("POST", f"{cluster.url}/v1/completions", json={**BODY, "stream": True}) as stream:
                lines = [line async for line in stream.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            assert (await client.get(f"{cluster.url}/nothing")).status_code == 404
        with pytest.raises((ConnectionError, EOFError, TimeoutError)):
            await send(cluster.frontend.port, "GET", "/live")
        async with httpx.AsyncClient(verify=trust, timeout=60) as client:
            assert (await client.get(f"{cluster.url}/live")).status_code == 200


def test_tls_files_that_do_not_match_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give both or none"):
        FrontendConfig(tls_cert="cert.pem")
    with pytest.raises(ConfigError, match="cannot load the certificate"):
        server_tls(str(tmp_path / "none.pem"), str(tmp_path / "none.key"))
    certificate, key = make_certificate(tmp_path)
    with pytest.raises(ConfigError, match="cannot load the certificate"):
        server_tls(str(key), str(certificate))
    assert server_tls("", "") is None
