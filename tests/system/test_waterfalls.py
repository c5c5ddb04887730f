"""Where the time of requests went, over real processes: by HTTP, by the command, over two frontends, after a death."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.patience import until
from tests.system.serving import Serve, by_threshold, kvrelay

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

FLAGS = ("--engine", "mock", "--prefill-token-s", "0.0001", "--frontends", "2", "--decode", "2", *by_threshold(64))
REMOTE = {"send", "admit", "wait", "queue", "prepare", "prefill", "claim", "hand_over", "transfer", "attach", "report"}


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Serve(FLAGS) as running:
        yield running


def complete(server: Serve, first: int, length: int, max_tokens: int = 6, **headers: str) -> dict[str, Any]:
    body = {"prompt": [16 + (first * 31 + 7 * at) % 200 for at in range(length)], "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def fetched(server: Serve, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/debug/requests{path}", timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize(("order", "first"), [("decode-first", 1), ("prefill-first", 2)])
def test_a_remote_request_adds_up_to_its_latency(server: Serve, order: str, first: int) -> None:
    header = {"x-kvrelay-waterfall": "1", "x-kvrelay-order": order}
    told = complete(server, first, 700, **header)["kvrelay_waterfall"]
    shown = fetched(server, f"/{told['id']}")
    for one in (told, shown):
        assert one["place"] == "remote"
        assert [(each["role"], each["has_marks"]) for each in one["processes"]] == [
            ("frontend", True),
            ("decode", True),
            ("prefill", True),
        ]
        assert one["unattributed_ms"] <= 0.05 * one["latency_ms"]
        phases = {span["phase"] for span in one["spans"]}
        assert REMOTE - ({"queue"} if order == "prefill-first" else set()) <= phases
        assert one["transfer"]["bytes"] > 0
        # All on one machine: nothing comes before it was sent.
        assert not [span for span in one["spans"] if span["end_ms"] < span["start_ms"]]
    (prefill,) = [span for span in shown["spans"] if span["phase"] == "prefill"]
    assert prefill["end_ms"] - prefill["start_ms"] >= 70
    assert shown["ttft_ms"] >= prefill["end_ms"] - prefill["start_ms"]


def test_a_local_request_names_no_prefill_worker(server: Serve) -> None:
    shown = fetched(server, f"/{complete(server, 3, 20)['id']}")
    assert shown["place"] == "local"
    assert [each["role"] for each in shown["processes"]] == ["frontend", "decode"]
    assert shown["unattributed_ms"] <= 0.05 * shown["latency_ms"]


def test_every_frontend_shows_the_requests_of_both(server: Serve) -> None:
    """Each connection may reach either of the two, which share the port."""
    ids = {complete(server, number, 20)["id"] for number in range(12)}
    lines = {line["id"]: line for line in fetched(server, "?limit=500")["requests"]}
    assert ids <= set(lines)
    for request_id in ids:
        for _ in range(3):
            assert fetched(server, f"/{request_id}")["frontend"] == lines[request_id]["frontend"]


def test_the_command_prints_it(server: Serve) -> None:
    request_id = complete(server, 5, 300)["id"]
    port = server.url.rpartition(":")[2]
    text = kvrelay("waterfall", request_id, "--cluster", port).stdout
    assert request_id in text
    assert "transfer" in text
    assert "unattributed" in text
    assert json.loads(kvrelay("waterfall", request_id, "--url", server.url, "--json").stdout)["id"] == request_id
    for wrong in ("cmpl-nothing", "cmpl-\x1b[31m", "../../health"):
        refused = kvrelay("waterfall", wrong, "--url", server.url)
        assert refused.returncode == 1
        assert "404" in refused.stderr
        assert "\x1b" not in refused.stderr


def test_a_request_that_moves_shows_both_workers(server: Serve) -> None:
    """Last in this file: a decode worker dies. ``serve`` starts another."""
    before = {worker["worker_id"]: worker["pid"] for worker in server.workers("decode")}
    body = {"prompt": [16 + at for at in range(20)], "max_tokens": 400, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        request_id, worker_id = answer.headers["x-request-id"], answer.headers["x-kvrelay-worker"]
        answer.readline()
        os.kill(before[worker_id], signal.SIGKILL)
        rest = answer.read()
    assert b"[DONE]" in rest
    until(lambda: fetched(server, f"/{request_id}")["status"] == "migrated")
    shown = fetched(server, f"/{request_id}")
    decoders = [each for each in shown["processes"] if each["role"] == "decode"]
    assert decoders[0]["name"] == worker_id
    assert len(decoders) == 2
    assert all(each["has_marks"] for each in decoders)
    (moved,) = [span for span in shown["spans"] if span["phase"] == "migrated"]
    assert moved["value"] >= 1
