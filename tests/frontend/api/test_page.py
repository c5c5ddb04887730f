"""The page's files: what is served, to whom, under which policy; and what is vendored. The browser's view is in
tests/system/test_page.py."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from tests.frontend.doubles import running
from tests.frontend.raw_http import send

from kvrelay.config import MetricsConfig
from kvrelay.frontend.api.page import FOLDER, Page
from kvrelay.http.api_keys import new_api_key

VENDORED = {
    "uplot/uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot/LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""uPlot 1.6.32 as npm delivers it, and nothing else."""
FILES = sorted(Page().paths)
OWN = [file for file in FOLDER.rglob("*") if file.is_file() and file.parent == FOLDER]


async def test_every_file_is_served_once_under_the_policy(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        port = cluster.frontend.port
        for path in FILES:
            answer = await send(port, "GET", path)
            assert (answer.status, bool(answer.body)) == (200, True), path
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            tag = answer.headers["etag"]
            again = await send(port, "GET", path, b"", {"if-none-match": tag})
            assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
            assert (await send(port, "GET", path, b"", {"if-none-match": '"other"'})).status == 200
        assert (await send(port, "GET", "/ui/")).body == (FOLDER / "index.html").read_bytes()


@pytest.mark.parametrize("path", ["/", "/ui"])
async def test_the_root_leads_to_the_page(model_dir: Path, path: str) -> None:
    async with running(model_dir) as cluster:
        answer = await send(cluster.frontend.port, "GET", path)
        assert (answer.status, answer.headers["location"]) == (307, "ui/")
        assert (await send(cluster.frontend.port, "POST", path)).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../app.py",
        "/ui/%2e%2e/api/app.py",
        "/ui//etc/passwd",
        "/ui/uplot/",
        "/ui/uplot/LICENSE",
        "/ui/%00",
        "/ui/x",
    ],
)
async def test_no_other_path_reaches_a_file(model_dir: Path, path: str) -> None:
    async with running(model_dir) as cluster:
        assert (await send(cluster.frontend.port, "GET", path)).status == 404


async def test_with_keys_a_browser_is_asked_for_one(model_dir: Path, tmp_path: Path) -> None:
    (alice, line), (operator, operator_line) = (new_api_key(name) for name in ("alice", "operator"))
    (tmp_path / "keys").write_text(line)
    (tmp_path / "operators").write_text(operator_line)

    def basic(key: str) -> dict[str, str]:
        return {"authorization": "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()}

    async with running(model_dir, api_keys_file=str(tmp_path / "keys")) as cluster:
        port = cluster.frontend.port
        for path in (*FILES, "/ui", "/debug/cluster"):
            for wrong in ({}, basic("wrong"), {"authorization": "Basic ==="}, {"authorization": "Bearer x"}):
                answer = await send(port, "GET", path, b"", wrong)
                assert answer.status == 401, path
        assert (await send(port, "GET", "/")).status == 307
        for credentials in (basic(alice), {"authorization": f"Bearer {alice}"}):
            assert (await send(port, "GET", "/ui/", b"", credentials)).status == 200
            assert (await send(port, "GET", "/debug/cluster", b"", credentials)).status == 403
    monitoring = MetricsConfig(metrics_keys_file=str(tmp_path / "operators"))
    async with running(model_dir, api_keys_file=str(tmp_path / "keys"), monitoring=monitoring) as cluster:
        port = cluster.frontend.port
        assert (await send(port, "GET", "/ui/", b"", basic(alice))).status == 200
        refused = await send(port, "GET", "/debug/cluster", b"", basic(alice))
        assert refused.status == 403
        assert "its own requests" in str(refused.error["message"])
        assert (await send(port, "GET", "/debug/cluster", b"", basic(operator))).status == 200


def test_what_is_vendored_is_unchanged_and_nothing_else_is() -> None:
    found = {
        file.relative_to(FOLDER).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in FOLDER.rglob("*")
        if file.is_file() and file not in OWN
    }
    assert found == VENDORED


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_own_files_load_nothing_from_elsewhere_and_make_no_markup_of_text(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    without_namespace = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|[\"'(]//", without_namespace)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert file.suffix == ".css" or not re.search(r"style\s*=\s*[\"']|\bon[a-z]+=", text)
