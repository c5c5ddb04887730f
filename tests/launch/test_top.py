"""``kvrelay top``: the text of a snapshot, and the command against a frontend."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.frontend.doubles import Script, running, write_model_dir
from tests.frontend.raw_http import send

from kvrelay.cli.main import run
from kvrelay.errors import KvrelayError, WorkerUnavailableError
from kvrelay.launch.top import coloured, text_of, watch

QUANTILES = {"p50": 10.0, "p95": 20.0, "p99": None}
WORKER: dict[str, Any] = {
    "id": "d0",
    "role": "decode",
    "state": "ready",
    "running": 3,
    "waiting": 0,
    "kv_used": 50,
    "kv_total": 100,
    "prefill_tokens_per_s": 0.0,
    "tokens_per_s": 12.34,
    "prefill_s_queued": 1.5,
    "age_s": 0.5,
    "cpu_cores": 0.25,
    "rss_bytes": 1536 * 2**20,
    "drafted_tokens": 1000,
    "accepted_tokens": 620,
}
UNHEARD = dict.fromkeys(WORKER) | {"id": "d9", "role": "decode", "state": "unreached"}
REQUEST: dict[str, Any] = {
    "id": "cmpl-\x1b[31mred\n",
    "status": "finished",
    "place": "remote",
    "latency_ms": 1234.5,
    "ttft_ms": None,
    "prompt_tokens": 7,
    "output_tokens": 8,
}
REPORT: dict[str, Any] = {
    "now_unix": 0.0,
    "release": "1.0",
    "frontends": [{}],
    "wrong_now": [],
    "workers": [WORKER],
    "flows": [{"source": "p0", "target": "d0", "bytes": 2**20, "transfers": 2, "mean_ms": 1.0}],
    "slowest": [REQUEST],
    "total": {
        "answered_per_s": 1.5,
        "tokens_per_s": 30.0,
        "answered_last_minute": 6,
        "refused_last_minute": 2,
        "failed_last_minute": 1,
        "judged_last_minute": 8,
        "in_time_last_minute": 6,
        "requests_last_minute": 9,
        "in_flight": 4,
        "running": 3,
        "waiting": 0,
        "prefill_queue": None,
        "ttft_ms": QUANTILES,
        "itl_ms": QUANTILES,
        "kv_used": 50,
        "kv_total": 100,
        "places": [{"place": "remote", "last_minute": 5}, {"place": "local_short", "last_minute": 0}],
        "handoffs": {"arrived": 5, "queue_ms": 2.0, "whole_ms": 30.0, "sending_ms": None},
        "prompt_tokens_last_minute": 4000,
        "cached_tokens_last_minute": 1000,
        "loaded_tokens_last_minute": {"host": 64, "disk": 0},
        "sessions_paused": 9,
        "sessions_last_minute": {"returned": 4},
    },
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("tiny"))


def text(report: dict[str, Any], width: int = 200, height: int = 100) -> str:
    lines = text_of(report, width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines)


def test_everything_is_there() -> None:
    shown = text(REPORT)
    for part in (
        "nothing is wrong now",
        "1.5 answers/s  30.0 tokens/s  last minute: 6 answered, 2 refused, 1 failed  in time 75%",
        "? in the prefill queue",
        "p50 10.0 ms p95 20.0 ms",
        "KV 50%",
        "prefills: 5 remote\n",
        "hand-offs: 5, each 30.0 ms  those queued 2.0 ms until claimed  KV - after the prefill",
        "prompts: 4,000 tokens, 25% cached  64 read from host",
        "speculation: 62% of 1,000 drafted tokens accepted\n",
        "sessions: 9 paused at workers  4 returned in 1 min",
        "0.25 1,536 MiB",
    ):
        assert part in shown
    assert "d0                           decode   ready          3     0  #####..... 50%" in shown
    assert "1.0MiB in 2, 1.00 ms each" in shown
    assert "1,234.5 ms" in shown


def test_ranks_and_the_planner_s_last_change() -> None:
    changes = [{"unix_s": at, "what": f"change {at}", "reason": "why"} for at in (20.0, 10.0)]
    planner = {"mode": "act", "is_paused": False, "shape": "1P2D", "changes": changes}
    shown = text(REPORT | {"planners": [planner], "workers": [WORKER | {"dp_group": "g", "dp_rank": 1}]})
    assert re.search(r"^planner: act, fleet 1P2D; \d\d:\d\d:20 change 20.0: why$", shown, re.MULTILINE)
    assert "d0 rank 1 " in shown
    assert "planner: paused, fleet -\n" in text(
        REPORT | {"planners": [planner | {"is_paused": True, "shape": "", "changes": []}]}
    )


def test_estimates_of_the_planner_stand_beside_what_clients_got() -> None:
    action = {"numbers": {"requests_per_s": 2.0, "ttft_s": 0.1712, "itl_s": 0.021}}
    planner = {"mode": "suggest", "is_paused": False, "shape": "1P1D", "actions": [action]}
    report = REPORT | {"planners": [planner | {"measured": {"ttft_s": [0.1, 0.25], "itl_s": [2.5, 1e9]}}]}
    first, gaps = (
        "first token (95 %): expected 0.171 s, measured 0.1 to 0.25 s",
        "between tokens: expected 0.021 s, measured more than 2.5 s",
    )
    assert f"{first}  {gaps}\n" in text(report)
    assert f"{first}\n{gaps}\n" in text(report, 80)
    action["numbers"]["requests_per_s"] = 0.0  # nothing comes: nothing is expected
    assert "expected" not in text(report)
    assert "expected" not in text(REPORT | {"planners": [planner]})


def test_ids_of_clients_cannot_write_to_the_terminal() -> None:
    shown = text(REPORT)
    assert "\x1b" not in shown
    assert "cmpl-\\x1b[31mred\\n" in shown


def test_what_is_wrong_comes_first_and_coloured() -> None:
    wrong = [{"severity": severity, "text": f"t{at}"} for at, severity in enumerate(("error", *["warning"] * 5))]
    lines = text_of(REPORT | {"wrong_now": wrong}, 200, 100)
    assert lines[1:5] == ["error: t0", "warning: t1", "warning: t2", "and 3 more"]
    assert [coloured(line)[:5] for line in lines[1:3]] == ["\x1b[31m", "\x1b[33m"]


def test_a_fleet_on_a_small_screen() -> None:
    busy = WORKER | {"id": "busy", "waiting": 9}
    workers = [*(WORKER | {"id": f"d{number}"} for number in range(239)), UNHEARD, busy]
    shown = text(REPORT | {"workers": workers}, 80, 24)
    lines = shown.splitlines()
    assert lines[next(at for at, line in enumerate(lines) if line.startswith("WORKER")) + 1].startswith("busy")
    assert "SLOWEST" in shown
    assert "unreached" in text(REPORT | {"workers": [UNHEARD]})
    assert f"and {241 - shown.count('ready')} more" in shown


def test_eighty_columns_keep_the_rates() -> None:
    """Every figure that a wide screen has of loads and rates, and of the slowest request."""
    wrong = [{"severity": "error", "text": "612 of 732 requests were refused; " * 3 + "add workers"}]
    worker = WORKER | {
        "id": "worker-63c9399493",
        "running": 128,
        "prefill_tokens_per_s": 12_345.6,
        "tokens_per_s": 9876.5,
    }
    shown = text(REPORT | {"workers": [worker], "wrong_now": wrong}, 80)
    for part in (
        "add workers",
        "last minute: 6 answered, 2 refused, 1 failed",
        "in time 75%",
        "between tokens p50 10.0 ms p95 20.0 ms",
        "KV 50% of 100 blocks",
        "WORKER             ROLE    STATE      RUN  WAIT   KV  PROMPT/S TOKENS/S   QUEUED",
        "worker-63c9399493  decode  ready      128     0  50%  12,345.6  9,876.5   1.50 s",
        "1.0MiB in 2, 1.00 ms each",
        "1,234.5 ms",
        "FIRST TOKEN",
    ):
        assert part in shown
    ranked = worker | {"dp_group": "g", "dp_rank": 11}
    assert "63c9399493 rank 11 decode  ready " in text(REPORT | {"workers": [ranked]}, 80)


async def test_the_command_asks_a_frontend(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        body = {"prompt": [5, 6], "max_tokens": 2}
        request_id = (await send(cluster.frontend.port, "POST", "/v1/completions", body)).headers["x-request-id"]
        for url in (cluster.url, f"{cluster.url}/v1"):
            assert await asyncio.to_thread(run, ["top", "--once", "--json", "--url", url]) == 0
            report = json.loads(capsys.readouterr().out)
            assert [worker["id"] for worker in report["workers"]] == ["w0"]
            assert [request["id"] for request in report["slowest"]] == [request_id]
            assert report["history"]["unix_s"] == []
        assert await asyncio.to_thread(run, ["top", "--once", "--url", cluster.url]) == 0
        assert request_id in capsys.readouterr().out
    with pytest.raises(WorkerUnavailableError):
        await watch(cluster.url, None, as_json=False, once=True)


async def test_with_keys_on_a_key_is_needed(model_dir: Path) -> None:
    async with running(model_dir, Script((10,)), api_key="secret") as cluster:
        with pytest.raises(KvrelayError, match="401"):
            await watch(cluster.url, None, as_json=True, once=True)
        await watch(cluster.url, "secret", as_json=True, once=True)
