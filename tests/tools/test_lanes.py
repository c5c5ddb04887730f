"""Tests in lanes are counted, shown and ended as in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PASSING = """
import os, pathlib

def test_one(): print("said"); pathlib.Path(os.environ["PIDS"], str(os.getpid())).touch()
def test_two(): os.write(1, b"not shown")
"""
FAILING = "def test_three(): print('shown'); assert 1 == 2"
DYING = "import os\ndef test_four(): os._exit(3)\ndef test_five(): pass"
ENDED = """
import pytest, pathlib, os

@pytest.fixture(scope="session", autouse=True)
def ends():
    yield
    pathlib.Path(os.environ["ENDS"], str(os.getpid())).touch()
"""


def run(tmp_path: Path, *files: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (tmp_path / "conftest.py").write_text(ENDED)
    for number, text in enumerate(files):
        (tmp_path / f"test_{number}.py").write_text(text)
    for name in ("pids", "ends"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "tests.lanes"]
    environment = {"PIDS": str(tmp_path / "pids"), "ENDS": str(tmp_path / "ends"), "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:schemathesis", "--lanes", "2", "-rA", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_test_runs_once_in_lanes_whose_fixtures_end(tmp_path: Path) -> None:
    done = run(tmp_path, *[PASSING] * 6)
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout
    assert done.stdout.count("PASSED") == 12
    pids, ends = names(tmp_path / "pids"), names(tmp_path / "ends")
    assert pids <= ends
    assert len(ends) <= 2


def test_a_failure_is_shown_with_what_its_test_printed(tmp_path: Path) -> None:
    done = run(tmp_path, FAILING, PASSING)
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert "assert 1 == 2" in done.stdout
    assert "shown" in done.stdout


def test_a_lane_that_dies_fails_its_test_and_not_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, DYING, PASSING, PASSING)
    assert done.returncode == 1
    assert "1 failed, 4 passed" in done.stdout
    assert "a lane ended while it was at" in done.stdout
    assert "test_four" in done.stdout


@pytest.mark.parametrize("options", [("-x",), ("--maxfail", "1")])
def test_the_first_failure_may_end_the_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, *[FAILING] * 4, options=options)
    assert done.returncode in (1, 2)
    assert 1 <= done.stdout.count("FAILED") <= 2
