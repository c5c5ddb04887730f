"""Each figure of the page in a real Chromium: of the snapshot that it is told every figure is another one, and the page
must show each where it belongs. That snapshots tell the truth of a load is tested in
tests/frontend/api/test_cluster_shown.py and tests/frontend/cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Page, Route, expect
from tests.browser import opened, running_browser
from tests.frontend.doubles import running, write_model_dir
from tests.patience import PATIENCE_S

from kvrelay.config import WorkerRole
from kvrelay.frontend.api.cluster_shown import ClusterSnapshot
from kvrelay.frontend.cluster.snapshot import (
    FlowView,
    FrontendView,
    HandoffCost,
    History,
    PlaceView,
    Quantiles,
    SessionsView,
    TimesView,
    Totals,
    WorkerCondition,
    WorkerView,
)
from kvrelay.marks.waterfall import Summary
from kvrelay.planner import Hold, Measured, Numbers
from kvrelay.planner.report import PlannerReport

pytestmark = [pytest.mark.system, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

MIB, NOW = 2**20, 1_000_000_000
NUM_ROWS, STEP_S = 120, 15

COUNTS: dict[str, Any] = {
    "num_requests": 9,
    "num_answered": 3,
    "num_refused": 2,
    "num_failed": 1,
    "num_in_time": 5,
    "num_late_first": 6,
    "num_late_gaps": 4,
    "num_output_tokens": 48,
    "num_prompt_tokens": 600,
    "num_cached_tokens": 150,
    "places": {
        "remote": 12,
        "local_cheaper": 11,
        "local_short": 13,
        "local_queue_full": 4,
        "local_no_prefill_worker": 5,
        "local_required": 6,
        "local_unpaired": 7,
    },
    "loaded_tokens": {"host": 64, "disk": 32, "peer": 16},
    "handoffs": 8,
    "workers_cpu_s": 1.5,
    "frontends_cpu_s": 0.25,
}
"""Of a second."""
LEVELS: dict[str, Any] = {
    "num_admitted": 7,
    "num_waiting": 15,
    "num_blocks_in_use": 30,
    "num_blocks": 120,
    "ttft_p50_ms": 41.0,
    "ttft_p95_ms": 820.0,
    "itl_p50_ms": 6.5,
    "itl_p95_ms": 12.5,
    "handoff_queue_ms": 8.5,
    "handoff_ms": 90.0,
    "handoff_sending_ms": 2.5,
    "workers_rss_bytes": 3072 * MIB,
    "frontends_rss_bytes": 200 * MIB,
}
CHARTS = {
    "requests per second": {"answered": "3", "refused": "2", "failed": "1"},
    "answers within their objectives per second (goodput)": {
        "in time": "5",
        "first token late": "6",
        "tokens late": "4",
    },
    "tokens per second": {"answers": "48", "prompts": "600"},
    "time to first token": {"p50": "41 ms", "p95": "820 ms"},
    "time between tokens": {"p50": "6.5 ms", "p95": "12.5 ms"},
    "prefills per second, by where they ran": {
        "remote": "12",
        "local, cheaper": "11",
        "local, short": "13",
        "local, no choice": "22",
    },
    "cost of a hand-off (mean of 10 s)": {
        "whole": "90 ms",
        "until claimed, of those queued": "8.5 ms",
        "KV after the prefill": "2.5 ms",
    },
    "prompt tokens per second, and where their KV was": {
        "all": "600",
        "cached": "150",
        "host": "64",
        "disk": "32",
        "other workers": "16",
    },
    "requests in workers": {"running": "7", "waiting": "15"},
    "KV in use": {"in use": "25 %"},
    "cores in use": {"workers": "1.5", "frontends": "0.25"},
    "memory (RSS)": {"workers": "3 GiB", "frontends": "200 MiB"},
}
"""What each chart's legend says of a second, at five minutes as at an hour."""
TILES = {
    "answered/s": ("12.3", "14 in flight"),
    "tokens/s": ("456", "789 of prompts"),
    "first token": ("42 ms", "p95 1.23 s"),
    "between tokens": ("7.5 ms", "p95 13.5 ms"),
    "KV in use": ("40 %", "250 blocks"),
    "running": ("19", "21 waiting"),
    "prefill queue": ("33", "prefill workers: 1"),
    "in time": ("90 %", "500 ms, 25 ms"),
    "refused": ("17", "of 120 in 1 min"),
    "failed": ("16", "of 120 in 1 min"),
}
TOTAL = Totals(
    requests_per_s=99.0,
    answered_per_s=12.3,
    tokens_per_s=456.0,
    prompt_tokens_per_s=789.0,
    requests_last_minute=120,
    answered_last_minute=80,
    refused_last_minute=17,
    refused_per_s=98.0,
    limited_last_minute=97,
    failed_last_minute=16,
    judged_last_minute=50,
    in_time_last_minute=45,
    late_first_token_last_minute=3,
    late_gaps_last_minute=2,
    slo_ttft_ms=500.0,
    slo_itl_ms=25.0,
    in_flight=14,
    num_admitted=19,
    num_waiting=21,
    prefill_queue=33,
    prefill_queue_for_s=0.0,
    num_blocks_in_use=100,
    num_blocks=250,
    num_flows=2,
    flow_bytes=96 * MIB,
    ttft_ms=Quantiles(42.0, 1234.0, 2000.0),
    itl_ms=Quantiles(7.5, 13.5, 20.0),
    places=[
        PlaceView("remote", "there", 30),
        PlaceView("local_short", "short", 10),
        PlaceView("local_required", "", 0),
    ],
    handoffs=HandoffCost(30, 4.5, 55.0, 1.25),
    prompt_tokens_last_minute=4000,
    cached_tokens_last_minute=1000,
    loaded_tokens_last_minute={"host": 640, "disk": 320, "peer": 160},
    sessions_paused=22,
    sessions_last_minute=SessionsView(23, 24, {"pool": 25, "computed": 26}, 2.75),
)


def worker(name: str, role: WorkerRole, number: int, **changes: object) -> WorkerView:
    view = WorkerView(name, role, "m", WorkerCondition.READY, "box", "mock", "1.0", 10.0)
    known = {
        "age_s": 0.5,
        "num_admitted": number,
        "num_slots": 64,
        "num_waiting": number + 1,
        "num_prefill_tokens": number + 2,
        "prefill_s_queued": 0.75,
        "num_blocks_in_use": 10 * number,
        "num_blocks": 100,
        "kv_demand": 0.85,
        "prefix_hit_rate": 0.35,
        "prefill_tokens_per_s": 1000.0 + number,
        "tokens_per_s": 2000.0 + number,
        "cpu_cores": 0.95,
        "rss_bytes": 512 * MIB,
    }
    return msgspec.structs.replace(view, **{**known, **changes})


WORKERS = [
    worker("p0", WorkerRole.PREFILL, 2),
    worker(
        "d0",
        WorkerRole.DECODE,
        4,
        after_crash="exit code 70",
        adapters=("sql@1",),
        drafted_tokens=1234,
        accepted_tokens=617,
        tokens_per_step=2.4,
    ),
    worker("d1", WorkerRole.DECODE, 6),
    worker("r1", WorkerRole.DECODE, 8, dp_group="g", dp_rank=1),
    worker("r0", WorkerRole.DECODE, 1, dp_group="g", dp_rank=0),
]
ROLES = {
    "1 prefill": "2 running, 3 waiting · 1,002 tokens/s · KV 20 %",
    "2 decode": "10 running, 12 waiting · 4,010 tokens/s · KV 50 %",
    "decode, data-parallel group g: 2 ranks": "9 running, 11 waiting · 4,009 tokens/s · KV 45 %",
}
CELLS = {
    "p0": "2 run · 3 wait · 1,002/s",
    "d0": "4 run · 5 wait · 2,004/s",
    "d1": "6 run · 7 wait · 2,006/s",
    "rank 0 · r0": "1 run · 2 wait · 2,001/s",
    "rank 1 · r1": "8 run · 9 wait · 2,008/s",
}
D0 = (
    "d0: ready, decode, m, mock on box, reported 0.5 s ago · 4 of 64 running, 5 waiting · KV 40 of 100 blocks, demand "
    "85 % · 6 prompt tokens to compute (750 ms) · 1,004 prompt and 2,004 answer tokens/s · prefix hits 35 % · "
    "50 % of 1,234 drafted tokens accepted, 2.4 tokens a step · adapters "
    "sql@1 · 0.95 cores, 512 MiB of memory · restarted after exit code 70 · kvrelay 1.0"
)
TIMES = [
    TimesView(
        kind,
        name,
        number,
        Quantiles(number + 0.25, None, number + 0.5),
        number + 1,
        Quantiles(number + 10.5, number + 1000.0, number + 20000.0),
        Quantiles(number + 2.25, number + 3.25, number + 4.25),
    )
    for number, (kind, name) in enumerate((("role", "decode"), ("model", "m"), ("group", "g"), ("worker", "d0")))
]
LATENCIES = [
    "all of role decode|0|0.25 ms|–|0.5 ms|1|10.5 ms|1 s|20 s|2.25 ms|3.25 ms|4.25 ms",
    "all of model m|1|1.25 ms|–|1.5 ms|2|11.5 ms|1 s|20 s|3.25 ms|4.25 ms|5.25 ms",
    "data-parallel group g|2|2.25 ms|–|2.5 ms|3|12.5 ms|1 s|20 s|4.25 ms|5.25 ms|6.25 ms",
    "d0|3|3.25 ms|–|3.5 ms|4|13.5 ms|1 s|20 s|5.25 ms|6.25 ms|7.25 ms",
]
FRONTEND = FrontendView(
    "f0", "box", 77, "1.0", True, False, 0.0, 14, 99.0, 12.3, 456.0, 120, 80, 17, 16, 0.45, 300 * MIB
)
NUMBERS = Numbers(
    requests_per_s=2.25,
    uncached_tokens=601.0,
    answer_tokens=202.0,
    prefill_utilisation=0.55,
    decode_utilisation=0.65,
    ttft_s=0.171,
    itl_s=0.0215,
)
PLANNER = PlannerReport(
    planner_id="x",
    host="box",
    pid=5,
    started_unix=1.0,
    mode="suggest",
    is_leader=True,
    shape="1P3D",
    actions=(Hold("the objectives are met", NUMBERS),),
    num_changes=0,
    measured=Measured(ttft_s=(0.1, 0.25), itl_s=(2.5, 1e9)),
    cpu_cores=0.35,
    rss_bytes=64 * MIB,
)
PLANNED = [
    "suggest · fleet 1P3D · 0 changes · 0.35 cores, 64 MiB of memory",
    "hold: the objectives are met",
    "2.25 requests/s · 601 tokens to prefill, 202 to answer · prefill 55 %, decode 65 % used · expected: first token "
    "(p95) 171 ms (measured 100 ms to 250 ms), between tokens 21.5 ms (measured more than 2.5 s)",
]
REQUEST = Summary("cmpl-1", "m", float(NOW), 1234.0, 56.0, "finished", "remote", 31, 32, "f0", None)


def scaled(value: Any, by: int) -> Any:
    return {name: scaled(each, by) for name, each in value.items()} if isinstance(value, dict) else value * by


def rows(value: Any) -> Any:
    return {name: rows(each) for name, each in value.items()} if isinstance(value, dict) else [value] * NUM_ROWS


def told(history_s: int, moment: int) -> ClusterSnapshot:
    """The snapshot at ``moment``. Each row of the history has ``history_s`` seconds like any other."""
    seconds = [NOW + moment - history_s * ago for ago in range(NUM_ROWS, 0, -1)]
    history = History(history_s, seconds, **rows(scaled(COUNTS, history_s) | LEVELS))
    flow = FlowView("p0", "d0", 3, (moment + 1) * MIB, 2.5)
    return ClusterSnapshot(
        float(NOW + moment), "f0", "1.0", [], TOTAL, WORKERS, TIMES, [flow], [FRONTEND], [PLANNER], history
    )


async def tell(route: Route, moments: Iterator[int]) -> None:
    """A second passes at each look of the page, and a flow moves 1 MiB."""
    if "/debug/requests" in route.request.url:
        body = msgspec.json.encode({"requests": [REQUEST]})
    elif "hour=1" in route.request.url:
        body = msgspec.json.encode(told(STEP_S, 0))
    else:
        body = msgspec.json.encode(told(1, next(moments)))
    await route.fulfill(body=body, content_type="application/json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    """A page that hears nothing but ``told``."""
    complaints: list[str] = []
    model_dir = write_model_dir(tmp_path_factory.mktemp("tiny"))
    async with (
        running_browser() as browser,
        running(model_dir) as cluster,
        opened(browser, "about:blank", complaints, viewport={"width": 1280, "height": 3000}) as opened_page,
    ):
        moments = count()
        await opened_page.route("**/debug/**", lambda route: tell(route, moments))
        await opened_page.goto(f"{cluster.url}/ui/")
        yield opened_page
    assert complaints == []


async def texts(page: Page, selector: str) -> list[str]:
    """The page replaces elements every second, and one that was replaced between its finding and its reading has no
    lines. So they are read until two readings agree."""
    before: list[str] | None = None
    while (found := await page.locator(selector).all_inner_texts()) != before:
        before = found
    return found


async def test_tiles(page: Page) -> None:
    await page.wait_for_selector(".tiles dd")
    tiles = [text.split("\n") for text in await texts(page, ".tiles > div")]
    assert {name: (value, note) for name, value, note in tiles} == TILES


async def test_workers_by_role_and_group(page: Page) -> None:
    await page.wait_for_selector(".worker")
    assert dict(text.split(" · ", 1) for text in await texts(page, ".role h3")) == ROLES
    names, figures = await texts(page, ".worker b"), await texts(page, ".worker .figures")
    assert dict(zip(names, figures, strict=True)) == CELLS
    await page.click(".worker[data-id='d0']")
    await expect(page.locator(".roles + .detail")).to_have_text(D0)


async def test_places_prompts_and_sessions(page: Page) -> None:
    await page.wait_for_selector(".where")
    assert await texts(page, ".where .figures") == ["30 in 1 min · 75 %", "10 in 1 min · 25 %"]
    assert await page.inner_text(".handoffs") == (
        "30 hand-offs in the last minute, on average 55 ms from sending a prefill away to its KV · 4.5 ms of that "
        "until a prefill worker claimed it · KV still under way after the prefill: 1.25 ms"
    )
    assert await page.inner_text(".prompts") == (
        "4,000 prompt tokens in the last minute, 1,000 of them cached (25 %) · 640 read from host memory · 320 read "
        "from disk · 160 read from other workers"
    )
    assert await page.inner_text(".sessions") == (
        "22 sessions paused at workers, 23 returned in the last minute (24 had lost a part) · 25 tokens in the pool · "
        "26 tokens computed again · 2.8 s saved"
    )


async def test_tables(page: Page) -> None:
    """Latencies, requests and frontends, by the titles of their sections."""

    async def table(title: str) -> list[str]:
        section = f"section:has(h2:text-is('{title}'))"
        await page.wait_for_selector(f"{section} td")
        return [text.replace("\t", "|").replace("\n", "") for text in await texts(page, f"{section} tbody tr")]

    assert await table("Latency in the last minute") == LATENCIES
    (request,) = await table("Requests")
    clock = await page.evaluate(f"new Date({NOW} * 1000).toLocaleTimeString('en-GB')")
    assert request == f"{clock}|cmpl-1|finished|remote|31 → 32|56 ms|1.23 s"
    assert await table("Frontends") == [
        "f0 (asked) box:77|12.3|456|14|80|17|16|120 in a minute|0.45 cores, 300 MiB of memory|1.0"
    ]


async def test_flows_and_their_rate(page: Page) -> None:
    await page.wait_for_selector(".flow.moving")
    moved = (await page.inner_text(".flow .figures")).split(" · ")
    assert (moved[0], moved[2]) == ("1 MiB/s", "2.5 ms each")
    assert moved[1].endswith(" MiB in 3")


async def test_the_planner_s_estimates_stand_beside_what_clients_got(page: Page) -> None:
    await page.wait_for_selector("section:has(h2:text-is('Planner')) p")
    assert await texts(page, "section:has(h2:text-is('Planner')) p") == PLANNED


@pytest.mark.parametrize("span", ["five minutes", "hour"])
async def test_charts(page: Page, span: str) -> None:
    """The legends: of the latest moment, and of that under the pointer."""
    await page.click(f"button[data-span='{span}']")
    await expect(page.locator(".u-over")).to_have_count(len(CHARTS), timeout=1000 * PATIENCE_S)
    for title, lines in CHARTS.items():
        figure = page.locator(f"figure:has(figcaption:text-is('{title}'))")
        for is_under_pointer in (False, True):
            if is_under_pointer:
                await figure.locator(".u-over").hover()
            for number, (name, value) in enumerate(lines.items(), start=1):
                series = figure.locator(".u-legend .u-series").nth(number)
                await expect(series.locator("th")).to_have_text(name)
                await expect(series.locator(".u-value")).to_have_text(value, timeout=1000 * PATIENCE_S)
        await page.mouse.move(0, 0)
