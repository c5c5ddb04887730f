"""The page in a real Chromium: on a real cluster with a remote prefill, with 240 workers, with keys, and over a restart
of the frontend under it.

With KVRELAY_SCREENSHOTS=DIRECTORY the screenshots stay there, for people to look at.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect
from tests.browser import opened, running_browser
from tests.frontend.doubles import FakeCluster, Script, running, write_model_dir
from tests.frontend.raw_http import send
from tests.patience import PATIENCE_S
from tests.system.serving import Serve

from kvrelay.config import MetricsConfig, WorkerRole
from kvrelay.core.event_codec import encode_load
from kvrelay.core.events import Flow, LoadMetrics
from kvrelay.frontend.access.api_keys import new_api_key

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
    with Serve(("--engine", "mock", "--prefill", "1", "--decode", "1", "--disagg-policy", "always")) as running_one:
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


@pytest.mark.parametrize("look", LOOKS)
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
        await expect(page.locator(".u-over")).to_have_count(6, timeout=1000 * PATIENCE_S)
        await page.click(f"tr[data-id='{request_id}']")
        await page.wait_for_selector(".waterfall .span")
        assert request_id in await page.inner_text(".waterfall h3")
        assert "remote prefill" in await page.inner_text(".waterfall p")
        shown = [await item.inner_text() for item in await page.query_selector_all(".waterfall h4")]
        assert {line.split()[0] for line in shown} == {"frontend", "prefill", "decode"}
        assert not any("no marks" in line for line in shown), shown
        await picture(page, look, tmp_path)
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
            await cluster.bus.publish(cluster.keys.worker_load(name), encode_load(load))
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
