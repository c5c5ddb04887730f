"""The report's page in a browser: nothing is loaded, nothing is cut off, in light, dark and narrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.browser import opened, running_browser

from kvrelay.bench.report.page import short_number
from kvrelay.certify.findings import CertifyReport, Group, Row, Series, Verdict
from kvrelay.certify.page import page_of, text_of

LINES = tuple(
    Series("bandwidth", name, tuple((4096.0 * 2**step, 1e8 * 1.4**step) for step in range(14)))
    for name in ("nixl", "copy")
)
ROWS = (
    Row(Group.RIGHT, "KV, block by block", "nixl", Verdict.FAIL, "K and V are swapped <b>here</b>", {"trials": 8}),
    Row(Group.FAST, "bandwidth", "nixl", Verdict.VOID, "void: " + "other processes " * 20, series=LINES),
    Row(Group.HOLDS, "the prefill worker killed", "torch nixl", Verdict.PASS, "whole"),
)
REPORT = CertifyReport("d", "a machine", "0.1.0", "<model>", "kvrelay certify", "2026", ROWS, is_complete=True)


def test_the_table_and_the_exit_code_say_the_worst() -> None:
    assert "FAIL: Not fit" in text_of(REPORT)
    assert "(1 PASS, 1 FAIL, 1 VOID)" in text_of(REPORT)
    assert REPORT.exit_code == 1
    sound = CertifyReport("d", "a", "0", "m", "c", "2026", ROWS[1:], is_complete=True)
    assert (sound.verdict, sound.exit_code) == (Verdict.VOID, 0)
    assert CertifyReport("d", "a", "0", "m", "c", "2026").exit_code == 1


def test_what_servers_and_checkpoints_say_is_text() -> None:
    page = page_of(REPORT)
    assert "&lt;model&gt;" in page
    assert "<b>here" not in page
    assert "{{" not in page
    assert "http" not in page


@pytest.mark.parametrize(("value", "text"), [(65536.0, "65.536k"), (2e9, "2G"), (0.05, "50m"), (2e-5, "20µ"), (1, "1")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.matrix  # a browser of its own
async def test_the_page_fits_in_light_dark_and_narrow(tmp_path: Path) -> None:
    path = tmp_path / "certify.html"
    path.write_text(page_of(REPORT), encoding="utf-8")
    complaints: list[str] = []
    grounds = []
    async with running_browser() as browser:
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360)):
            context = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}, "offline": True}
            async with opened(browser, path.as_uri(), complaints, **context) as page:
                assert await page.evaluate("document.documentElement.scrollWidth") <= width
                assert await page.locator("article").count() == len(ROWS)
                assert await page.locator("svg polyline").count() == len(LINES)
                grounds.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert complaints == []
    assert grounds[0] == grounds[2] != grounds[1]
