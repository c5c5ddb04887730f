"""Prometheus itself scrapes a live cluster: its linter is content, and the Grafana board has data in every panel."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.patience import PATIENCE_S, until
from tests.ports import free_ports
from tests.system.serving import Serve, by_threshold

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "kvrelay.json"
HOST = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.2"
"""An address that no other run of this test uses."""
PORT = 9410
TOKENS = itertools.cycle(range(10, 2017))
"""No prompt begins as an earlier one, so each long one is computed anew."""


@pytest.fixture(scope="module")
def _programs() -> None:
    if shutil.which("prometheus") and shutil.which("promtool"):
        return
    reason = "prometheus and promtool are not installed (Debian: prometheus)"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def server(_programs: None) -> Iterator[Serve]:
    flags = (
        "--engine",
        "mock",
        "--planner",
        "suggest",
        "--metrics-host",
        HOST,
        "--metrics-port",
        str(PORT),
        *by_threshold(16),
    )
    with Serve(flags) as serve:
        yield serve


@pytest.fixture(scope="module")
def prometheus(server: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the frontend and both workers."""
    directory = tmp_path_factory.mktemp("prometheus")
    workers = [f"{HOST}:{PORT}", f"{HOST}:{PORT + 1}"]
    jobs = {"kvrelay-frontends": [server.url.removeprefix("http://")], "kvrelay-workers": workers}
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": at}]} for job, at in jobs.items()],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"{HOST}:{free_ports(1)[0]}"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://{address}"

        def all_are_up() -> bool:
            assert process.poll() is None, (directory / "log").read_text()
            return _count(url, "count(up == 1)") == 3

        until(all_are_up)
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """The series of an instant query; none while Prometheus does not answer yet."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=PATIENCE_S)
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.status_code == 200, (expression, answer.text)
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def _count(url: str, expression: str) -> float:
    return sum(float(series["value"][1]) for series in query(url, expression))


def ask(server: Serve) -> None:
    """A request that is sent away, one that stays, and one with a known prefix."""
    prompt = [next(TOKENS) for _ in range(200)]
    for length in (200, 10, 200):
        body = {"model": server.model, "prompt": prompt[:length], "max_tokens": 5, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()


def test_the_linter_has_no_complaint(server: Serve) -> None:
    ask(server)
    for base in (server.url, f"http://{HOST}:{PORT}", f"http://{HOST}:{PORT + 1}"):
        page = httpx.get(f"{base}/metrics", timeout=PATIENCE_S).raise_for_status().text
        done = subprocess.run(["promtool", "check", "metrics"], input=page, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), base


def test_every_query_of_the_board_has_data(server: Serve, prometheus: str) -> None:
    panels = json.loads(BOARD.read_text(encoding="utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    queries = [expression.replace("$__rate_interval", "5m").replace("$model", ".*") for expression in asked]
    assert len(queries) > 30
    # A rate needs two scrapes, and a quantile needs an observation between them.
    until(lambda: _count(prometheus, "min(count_over_time(up[5m]))") >= 2)
    ask(server)

    def has_data(expression: str) -> bool:
        return any(not math.isnan(float(series["value"][1])) for series in query(prometheus, expression))

    open_queries = list(queries)

    def none_is_open() -> bool:
        open_queries[:] = [expression for expression in open_queries if not has_data(expression)]
        return not open_queries

    try:
        until(none_is_open)
    except AssertionError:
        assert open_queries == []
        raise


def test_frontends_and_workers_do_not_share_a_name(prometheus: str) -> None:
    """But for the old names, which stay for a release and say so."""
    old = {f"kvrelay_worker_{name}" for name in ("requests_running", "requests_waiting", "kv_usage_ratio")}

    def names(job: str) -> set[str]:
        found = query(prometheus, f'count by (__name__) ({{job="kvrelay-{job}", __name__=~"kvrelay_.*"}})')
        return {series["metric"]["__name__"] for series in found}

    until(lambda: old <= names("frontends") and bool(names("workers")))
    assert names("frontends") & names("workers") == old
    assert {name for name in names("frontends") if name.startswith("kvrelay_worker_")} == old
