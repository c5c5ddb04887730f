"""A real Chromium, headless, for tests of the page. Debian's; playwright drives it and downloads nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, Page, async_playwright
from tests.patience import PATIENCE_S

NAME = "chromium"
ROOT_FLAGS = ("--no-sandbox",)
"""The sandbox needs another user than root."""
DISABLED = (
    *("AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades", "LensOverlay"),
    *("HttpsFirstBalancedModeAutoEnable", "MediaRouter", "PaintHolding", "ThirdPartyStoragePartitioning"),
    *("AvoidCorsURLLoaderRestartOnRedirect", "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled"),
    *("PreconnectToSearch", "WebUIOmniboxPopup", "WebUIOmniboxAimPopup"),
)
"""Features of Chromium. Those of playwright's own list, which this one replaces, and the last two: the popup of an
address bar that nobody sees, whose renderer takes 0.6 seconds of CPU for every context."""


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Skips if there is none to start; under CI that is a failure."""
    path = shutil.which(NAME)
    if path is None:
        reason = f"{NAME} is not installed (Debian: {NAME})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    flags = [f"--disable-features={','.join(DISABLED)}", *(ROOT_FLAGS if os.getuid() == 0 else ())]
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=path, args=flags)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def opened(browser: Browser, url: str, complaints: list[str], **context: object) -> AsyncIterator[Page]:
    """A page in a context of its own. What the console says of errors and warnings, and uncaught errors, go to
    ``complaints``."""
    holder = await browser.new_context(**context)  # type: ignore[arg-type]
    try:
        page = await holder.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(url)
        yield page
    finally:
        await holder.close()
