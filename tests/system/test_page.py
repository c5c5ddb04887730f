"""The page in a real Chromium: on a real cluster with a remote prefill, with 240 workers, with keys, and over a restart
of the frontend under it.

With KVRELAY_SCREENSHOTS=DIRECTORY the screenshots stay there, for people to look at.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect
from tests.browser import opened, running_browser
from tests.frontend.doubles import FakeCluster, Script, running, write_model_dir
from tests.frontend.raw_http import send
from tests.patience import PATIENCE_S
from tests.system.serving import Serve

from kvrelay.config import MetricsConfig, WorkerRole
from kvrelay.core.event_codec import encode_frame
from kvrelay.core.events import Flow, LoadMetrics
from kvrelay.core.messages import RequestRefused
from kvrelay.http.api_keys import new_api_key
from kvrelay.planner.report import Change, PlannerReport

pytestmark = [pytest.mark.system, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 375, "height": 800}
LOOKS = {
    "light": {"viewport": WIDE, "color_scheme": "light"},
    "dark": {"viewport": WIDE, "color_scheme": "dark"},
    "narrow": {"viewport": NARROW, "color_scheme": "light"},
    "narrow-dark": {"viewport": NARROW, "color_scheme": "dark"},
}
MAX_UNATTRIBUTED = 0.05
PROMPT = "Once upon a time there was a small town by the sea. " * 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    flags = (
        "--engine",
        "mock",
        "--prefill",
        "1",
        "--decode",
        "1",
        "--disagg-policy",
        "always",
        "--order",
        "decode-first",
        "--slo-ttft-ms",
        "60000",
        "--slo-itl-ms",
        "60000",
    )
    with Serve(flags) as running_one:
        yield running_one


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("tiny"))


async def complete(server: Serve) -> str:
    """One long prompt; returns its id."""
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(f"{server.url}/v1/completions", json=body)
    answer.raise_for_status()
    return answer.headers["x-request-id"]


async def get(server: Serve, path: str) -> Any:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return (await client.get(server.url + path)).raise_for_status().json()


async def picture(page: Page, name: str, tmp_path: Path) -> None:
    """A screenshot that shows something, and no wider than the window."""
    folder = Path(os.environ.get("KVRELAY_SCREENSHOTS", tmp_path))
    await page.evaluate("scrollTo(0, 0)")
    image = await page.screenshot(path=folder / f"{name}.png", full_page=True)
    assert len(image) > 10_000
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    "look", ["light", "narrow-dark", *(pytest.param(look, marks=pytest.mark.matrix) for look in ("dark", "narrow"))]
)
async def test_a_real_remote_request_is_explained(browser: Browser, server: Serve, look: str, tmp_path: Path) -> None:
    request_id = await complete(server)
    complaints: list[str] = []
    async with opened(browser, f"{server.url}/", complaints, **LOOKS[look]) as page:
        assert page.url == f"{server.url}/ui/"
        await page.wait_for_selector("#link.live")
        await page.wait_for_selector("#wrong.fine")
        for role in ("prefill", "decode"):
            await page.wait_for_selector(f".role.{role} .worker.ready")
        await page.wait_for_selector(".flow")
        await expect(page.locator(".u-over")).to_have_count(12, timeout=1000 * PATIENCE_S)
        await page.click("button[data-span='hour']")
        await page.wait_for_selector("button[data-span='hour'].chosen")
        await page.click(f"tr[data-id='{request_id}']")
        await page.wait_for_selector(".waterfall .span")
        assert request_id in await page.inner_text(".waterfall h3")
        assert "remote prefill" in await page.inner_text(".waterfall p")
        shown = [await item.inner_text() for item in await page.query_selector_all(".waterfall h4")]
        assert {line.split()[0] for line in shown} == {"frontend", "prefill", "decode"}
        assert not any("no marks" in line for line in shown), shown
        await picture(page, look, tmp_path)
    assert complaints == []


async def settled(server: Serve, since: int = 0) -> dict[str, Any]:
    """A snapshot whose history, after second ``since``, has all that has happened until now."""
    now = time.time()
    async with asyncio.timeout(PATIENCE_S):
        while ((found := await get(server, f"/debug/cluster?since={since}"))["history"]["unix_s"] or [0])[
            -1
        ] < now + 1.0:
            await asyncio.sleep(0.2)
    return found


async def test_the_figures_are_those_of_the_load(browser: Browser, server: Serve) -> None:
    """Every prompt goes to the prefill worker; the client knows how many, and their tokens."""
    await complete(server)
    since = (await settled(server))["history"]["unix_s"][-1]
    usages = []
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        for prompt in ("a" + PROMPT, "b" + PROMPT, "a" + PROMPT):
            body = {"model": server.model, "prompt": prompt, "max_tokens": 7, "ignore_eos": True}
            usages.append((await client.post(f"{server.url}/v1/completions", json=body)).json()["usage"])
    found = await settled(server, since)
    history = found["history"]
    assert {place: sum(column) for place, column in history["places"].items() if any(column)} == {"remote": 3}
    assert [sum(history[name]) for name in ("answered", "in_time", "tokens")] == [3, 3, 21]
    assert sum(history["prompt_tokens"]) == sum(usage["prompt_tokens"] for usage in usages)
    cached = [(usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) for usage in usages]
    assert sum(history["cached_tokens"]) == sum(cached) > 0
    assert sum(history["handoffs"]) == 3
    means = [(value, queue) for value, queue in zip(history["handoff_ms"], history["handoff_queue_ms"]) if value]
    assert all(0 < queue < value for value, queue in means)
    total, times = found["total"], {each["name"]: each for each in found["times"]}
    remote = next(place["last_minute"] for place in total["places"] if place["place"] == "remote")
    assert times["prefill"]["prefills"] == times["decode"]["answers"] == remote == total["answered_last_minute"]
    complaints: list[str] = []
    async with opened(browser, f"{server.url}/ui/", complaints) as page:
        await page.wait_for_selector(f".where:has-text('{remote} in 1 min')")
        shown = await page.inner_text(".prompts")
        assert f"{total['prompt_tokens_last_minute']:,} prompt tokens in the last minute" in shown
        sessions = await page.inner_text(".sessions")
        assert f"{total['sessions_paused']:,} sessions paused at workers" in sessions
        assert total["sessions_paused"] > 0
    assert complaints == []


async def test_the_waterfall_adds_up_to_the_latency(browser: Browser, server: Serve) -> None:
    """What the bars cover and what is said to be unattributed is the whole latency, and the latter is little."""
    request_id = await complete(server)
    complaints: list[str] = []
    async with opened(browser, f"{server.url}/ui/#request/{request_id}", complaints) as page:
        await page.wait_for_selector(".waterfall .span")
        found = await get(server, f"/debug/requests/{request_id}")
        bars = await page.evaluate(
            """[...document.querySelectorAll('.waterfall .fill:not(.cores)')].map(
                 (bar) => [parseFloat(bar.style.left), parseFloat(bar.style.left) + parseFloat(bar.style.width)])"""
        )
        note = await page.inner_text(".unattributed")
    spans = found["spans"]
    first = min(0.0, *(min(span["start_ms"], span["end_ms"]) for span in spans))
    last = max(found["latency_ms"], *(max(span["start_ms"], span["end_ms"]) for span in spans))
    drawn = [[first + (last - first) * at / 100 for at in bar] for bar in bars]
    covered = _covered(drawn, found["latency_ms"])
    assert found["place"] == "remote"
    assert covered + found["unattributed_ms"] == pytest.approx(found["latency_ms"], rel=0.01)
    assert found["unattributed_ms"] <= MAX_UNATTRIBUTED * found["latency_ms"], found
    assert note.startswith("unattributed: ")
    assert complaints == []


def _covered(bars: list[list[float]], latency_ms: float) -> float:
    """The time between 0 and the latency in which there is a bar."""
    total = at = 0.0
    for start, end in sorted(bars):
        start, end = max(start, at), min(end, latency_ms)
        if end > start:
            total, at = total + end - start, end
    return total


async def test_the_page_survives_a_restart_of_its_frontend(browser: Browser, server: Serve) -> None:
    complaints: list[str] = []
    async with opened(browser, f"{server.url}/ui/", complaints) as page:
        await page.wait_for_selector("#link.live")
        os.kill((await get(server, "/health"))["pid"], signal.SIGKILL)
        await page.wait_for_selector("#link.lost:text('reconnecting')")
        assert await page.is_visible(".worker")
        await page.wait_for_selector("#link.live")
        await complete(server)
        await page.wait_for_selector("tbody tr[data-id]")
    # Only what the browser itself says of requests that failed meanwhile.
    assert all("net::ERR" in text or "status of 503" in text for text in complaints), complaints


async def test_240_workers_and_a_hostile_request(browser: Browser, model_dir: Path, tmp_path: Path) -> None:
    cluster = FakeCluster(model_dir)
    try:
        names = [f"decode-{number:03}" for number in range(200)] + [f"prefill-{number:03}" for number in range(40)]
        for name in names:
            role = WorkerRole.PREFILL if name.startswith("prefill") else WorkerRole.DECODE
            await cluster.add_worker(name, Script(), role=role)
        await cluster.start()
        frontend = cluster.frontend
        assert frontend is not None
        await cluster.until(lambda: len(frontend.cluster.links()) == len(names))
        for at, name in enumerate(names):
            flows = tuple(Flow(f"decode-{n:03}", False, n, 10**6 * n, 0.1) for n in range(at % 9))
            load = LoadMetrics(name, at % 8, 8, at % 97, 100, at % 5, at % 97 / 100, 0.0, seq=1, flows=flows)
            await cluster.bus.publish(cluster.keys.worker_load(name), encode_frame(load))
        markup = "<img src=x onerror=alert(1)>"
        refused = await send(frontend.port, "POST", "/v1/completions", {"model": markup, "prompt": "x"})
        assert refused.status == 404
        complaints: list[str] = []
        for look in ("light", "narrow-dark"):
            async with opened(browser, f"{cluster.url}/ui/", complaints, **LOOKS[look]) as page:
                await expect(page.locator(".worker")).to_have_count(len(names), timeout=1000 * PATIENCE_S)
                await page.click(".worker[data-id='decode-007']")
                assert "decode-007: " in await page.inner_text(".detail")
                await page.click(f"tr[data-id='{refused.headers['x-request-id']}']")
                await page.wait_for_selector(f".waterfall p:text('{markup}')")
                assert await page.query_selector("img") is None
                await picture(page, f"fleet-{look}", tmp_path)
        assert complaints == []
    finally:
        await cluster.close()


async def test_ranks_stand_together_and_changes_of_the_planner_are_listed(
    browser: Browser, model_dir: Path, tmp_path: Path
) -> None:
    changes = tuple(
        Change(1e9 + at, what, "a reason <b>") for at, what in enumerate(("widen p0", "start a both worker"))
    )
    report = PlannerReport(
        planner_id="a",
        host="h",
        pid=1,
        started_unix=1.0,
        mode="act",
        num_changes=9,
        changes=changes,
        is_leader=True,
        cpu_cores=0.25,
        rss_bytes=96 * 2**20,
    )
    async with running(model_dir, Script((10,))) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        for rank in (1, 0):
            in_group = {"dp_group": "dp-7", "dp_rank": rank, "dp_size": 2}
            await cluster.add_worker(f"r{1 - rank}", Script(), adapters=("chat@1", "sql@1"), **in_group)
        lease = await cluster.control.discovery.grant(600.0)
        await cluster.control.discovery.put(cluster.keys.planner("a"), msgspec.json.encode(report), lease)
        complaints: list[str] = []
        async with opened(browser, f"{cluster.url}/ui/", complaints, **LOOKS["narrow"]) as page:
            await page.wait_for_selector("h3:text('decode, data-parallel group dp-7: 2 ranks')")
            heads = [await each.inner_text() for each in await page.query_selector_all(".role h3")]
            assert [head.partition(" ·")[0] for head in heads] == [
                "1 decode",
                "decode, data-parallel group dp-7: 2 ranks",
            ]
            names = [await each.inner_text() for each in await page.query_selector_all(".role:last-child .worker b")]
            assert names == ["rank 0 · r1", "rank 1 · r0"]
            told = await page.get_attribute(".role:last-child .worker", "title") or ""
            assert "adapters chat@1, sql@1" in told
            await expect(page.locator(".changes li")).to_have_count(2, timeout=1000 * PATIENCE_S)
            assert "act · fleet – · 9 changes · 0.25 cores, 96 MiB of memory" in await page.inner_text("main")
            latest = await page.inner_text(".changes li:first-child")
            assert "start a both worker" in latest
            assert "a reason <b>" in latest
            await picture(page, "ranks", tmp_path)
        assert complaints == []


async def test_what_is_coloured_has_its_line_at_the_top(browser: Browser, model_dir: Path, tmp_path: Path) -> None:
    """Overload: 3 answered, 12 refused, 1 failed. Without the lines nothing is red or orange."""
    script = Script((10,))
    async with running(model_dir, script) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        full, broken = (RequestRefused("", "no", status, retryable=False) for status in (429, 500))
        for refusal, count in ((None, 3), (full, 12), (broken, 1)):
            script.refuse = refusal
            for _ in range(count):
                await send(frontend.port, "POST", "/v1/completions", {"prompt": [5, 6], "max_tokens": 2})
        load = LoadMetrics("w0", 3, 8, 99, 100, 2, 0.99, 0.5, seq=1)
        await cluster.bus.publish(cluster.keys.worker_load("w0"), encode_frame(load))
        coloured, url = "main .error, main .warning", f"{cluster.url}/ui/"
        complaints: list[str] = []
        async with opened(browser, url, complaints, **LOOKS["light"]) as page:
            await expect(page.locator("td.status.error")).to_have_count(13, timeout=1000 * PATIENCE_S)
            await expect(page.locator(".worker.warning")).to_have_count(1, timeout=1000 * PATIENCE_S)
            assert "12 of 16 requests (75%;" in (await page.text_content("#wrong") or "")
            tiles = await page.inner_text(".tiles")
            assert "refused\n12\nof 16 in 1 min" in tiles
            assert "failed\n1\nof 16 in 1 min" in tiles
            await picture(page, "overload", tmp_path)

            async def without_lines(route: Route) -> None:
                answer = await route.fetch()
                await route.fulfill(response=answer, json=await answer.json() | {"wrong_now": []})

            await page.route("**/debug/cluster?**", without_lines)
            await page.wait_for_selector("#wrong.fine")
            await expect(page.locator(coloured)).to_have_count(0, timeout=1000 * PATIENCE_S)
            await page.unroute_all(behavior="wait")
        assert complaints == []


async def test_with_keys_the_browser_signs_in(browser: Browser, model_dir: Path, tmp_path: Path) -> None:
    (alice, line), (operator, operator_line) = (new_api_key(name) for name in ("alice", "operator"))
    (tmp_path / "keys").write_text(line)
    (tmp_path / "operators").write_text(operator_line)
    monitoring = MetricsConfig(metrics_keys_file=str(tmp_path / "operators"))
    settings = {"api_keys_file": str(tmp_path / "keys"), "monitoring": monitoring}
    async with running(model_dir, Script((10,)), **settings) as cluster:
        body: dict[str, object] = {"prompt": [5, 6], "max_tokens": 2}
        frontend = cluster.frontend
        assert frontend is not None
        bearer = {"authorization": f"Bearer {alice}"}
        request_id = (await send(frontend.port, "POST", "/v1/completions", body, bearer)).headers["x-request-id"]
        complaints: list[str] = []
        url = f"{cluster.url}/ui/"
        credentials = {"username": "me", "password": operator}
        async with opened(browser, url, complaints, http_credentials=credentials) as page:
            await page.wait_for_selector(".worker")
            await page.wait_for_selector(f"tr[data-id='{request_id}']")
        assert complaints == []
        async with opened(browser, url, [], http_credentials=credentials | {"password": alice}) as page:
            await page.wait_for_selector("#wrong summary:text('This key sees its own requests')")
            await page.wait_for_selector(f"tr[data-id='{request_id}']")
            assert await page.query_selector(".worker") is None
        async with opened(browser, url, [], http_credentials=credentials | {"password": "wrong"}) as page:
            assert await page.query_selector("main") is None
