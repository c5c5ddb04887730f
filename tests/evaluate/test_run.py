"""A whole evaluation with mock engines: interrupted, gone on with, and wrong arguments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S

from kvrelay.cli.main import run
from kvrelay.evaluate.journal import NAME
from kvrelay.evaluate.run import PAGE, REPORT, how_to_go_on

LONG_S = 4 * PATIENCE_S
SMALL = "from kvrelay.evaluate import options; options.SHORT = options.Sizes(1, 0.4, 2, 16, 1e4); "
MAIN = SMALL + "from kvrelay.cli.main import main; import sys; main(sys.argv[1:])"
HERE = "from kvrelay.simulate import pool; pool.MAX_PROCESSES = 1; "
"""``tests/simulate`` has trials in processes, of which each takes a second to start."""
HELD = "import time; from kvrelay.simulate import pool; pool.wait = lambda *_, **__: time.sleep(1000); "
"""No trial ends, so that the evaluation has not ended before it is interrupted."""
LOAD = "poisson:rate=20,num=16,prompt=64,answer=8"


def start(output: Path, *more: str, before: str = "") -> subprocess.Popen[str]:
    arguments = ("evaluate", "--engine", "mock", "--short", "--load", LOAD, "--section", "sizes", "--section", "larger")
    command = [sys.executable, "-c", before + MAIN, *arguments, "--price", "2", "--output-dir", str(output), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def keys(output: Path) -> list[str]:
    """Of cases that are done; those that failed are not."""
    path = output / NAME
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return [one["key"] for one in entries if not (isinstance(one["result"], dict) and one["result"].get("error"))]


@pytest.mark.system
def test_an_interrupted_evaluation_ends_its_processes_and_goes_on_with_what_is_left(tmp_path: Path) -> None:
    first = start(tmp_path, before=HELD)
    deadline_s = time.monotonic() + LONG_S
    while "calibration / 1P1D" not in keys(tmp_path):
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    started = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGINT)
    _, said = first.communicate(timeout=LONG_S)
    assert first.returncode == 130
    assert "Go on with: " in said
    assert "--resume" in said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(started, timeout=10.0)
    assert not alive
    before = keys(tmp_path)
    assert not (tmp_path / REPORT).exists()

    output, said = start(tmp_path, "--resume", "--json", before=HERE).communicate(timeout=LONG_S)
    assert f"{len(before)} cases are done" in said
    report = json.loads(output)
    assert keys(tmp_path)[: len(before)] == before
    assert len(set(keys(tmp_path))) == len(keys(tmp_path))
    titles = [section["title"] for section in report["sections"]]
    assert titles[0].startswith("2 slots: ")
    assert "How many of each" in titles
    assert titles[0] == f"2 slots: {report['figures']['decision']}"
    assert len(report["figures"]["capacities"]) == 2
    answers = dict(report["sections"][0]["tables"][0]["rows"])
    assert "per million answer tokens" in answers["price"]
    assert "simulator" in answers["how sure"]
    # The mock engine has one rank.
    (ranks,) = [section for section in report["sections"] if "replicas" in section["title"]]
    assert "TP 2: not measured." in ranks["sentence"]
    assert any("the mock engine has one rank" in note for note in ranks["notes"])
    assert report["sections"][-1]["sentence"].startswith("Nothing was left out.")
    assert json.loads((tmp_path / REPORT).read_text()) == report
    assert (tmp_path / PAGE).read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--trace", "pyproject.toml", "--load", "poisson"), "either --trace FILE or --load SPEC"),
        (("--load", "nothing"), "none of poisson"),
        (("--resume",), "has no evaluation"),
        (("--serve-flags", "'"), "--serve-flags: No closing quotation"),
        (("--slots", "1"), "--slots"),
        (("./nowhere",), "does not exist"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", *arguments, "--output-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert "\n" not in said


def test_a_file_is_no_output_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["evaluate", "--output-dir", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_the_way_to_go_on_is_a_command() -> None:
    assert how_to_go_on("kvrelay evaluate './a b' --short") == "kvrelay evaluate './a b' --short --resume"
    assert how_to_go_on("kvrelay evaluate --resume") == "kvrelay evaluate --resume"
