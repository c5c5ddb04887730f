"""The report's page in a browser: nothing is loaded, nothing is cut off, in light, dark and narrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.browser import opened, running_browser

from kvrelay.evaluate.findings import Line, Plot, Report, Section, Table
from kvrelay.evaluate.page import page_of, text_of

LINES = tuple(Line(name, ((1.0, 10.0), (8.0, 40.0), (64.0, 0.0))) for name in ("1P1D", "<two>"))
WIDE = Table(tuple(f"column {number}" for number in range(14)), (("load & <rate>", *("1.0",) * 13),))
REPORT = Report(
    "kvrelay-evaluate/1",
    "<model>",
    "a machine",
    "generated, poisson",
    "kvrelay evaluate",
    "2026",
    {"kvrelay": "0.1.0"},
    {"slots": "2"},
    {},
    (
        Section(
            "2 slots: split", "Split: " + "because of this " * 30, "Simulated.", (Table(("question",), (("a",),)),)
        ),
        Section(
            "Loads",
            "At <b>1</b>: not shown.",
            "Measured.",
            (WIDE,),
            (Plot("P90", "clients", "ms", LINES),),
            ("a note",),
        ),
        Section(
            "Empty",
            "TP 2: not measured.",
            "",
            plots=(Plot("Nothing", "x", "y", (Line("none", ()), Line("one", ((1.0, 2.0),)))),),
        ),
    ),
)


def test_what_files_and_servers_say_is_text_and_nothing_is_loaded() -> None:
    page = page_of(REPORT)
    assert "&lt;model&gt;" in page
    assert "<b>1</b>" not in page
    assert "{{" not in page
    for word in ("http:", "https:", "src=", "url(", "@import", "<script", "<link"):
        assert word not in page


def test_the_answer_comes_first_in_the_terminal_and_on_the_page() -> None:
    assert text_of(REPORT).startswith("Split: because of this")
    assert "Loads: At <b>1</b>: not shown." in text_of(REPORT)
    page = page_of(REPORT)
    assert page.index('<section class="answer">') < page.index("<section>")


@pytest.mark.matrix  # a browser of its own
async def test_the_page_fits_in_light_dark_and_narrow(tmp_path: Path) -> None:
    path = tmp_path / "evaluate.html"
    path.write_text(page_of(REPORT), encoding="utf-8")
    complaints: list[str] = []
    grounds = []
    async with running_browser() as browser:
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 400)):
            context = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}, "offline": True}
            async with opened(browser, path.as_uri(), complaints, **context) as page:
                assert await page.evaluate("document.documentElement.scrollWidth") <= width
                assert await page.locator("section").count() == 3
                assert await page.locator("svg polyline").count() == len(LINES)
                grounds.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert complaints == []
    assert grounds[0] == grounds[2] != grounds[1]
