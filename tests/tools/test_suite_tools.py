"""What keeps the suite honest: processes that outlive it are found and ended; busy loops are there, and then gone; what
tests cost is counted with their processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests import leftovers, ports
from tests.part import parsed_part, part_of
from tests.patience import until

TOOLS = Path(__file__).parents[2] / "tools"
SLEEP = "import time; print('up', flush=True); time.sleep(3600)"
ORPHAN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=sys.stdout)"


def test_a_process_that_outlives_its_parent_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(leftovers.MARK, "a suite of its own")
    monkeypatch.setattr(leftovers, "GRACE_S", 0.1)
    assert leftovers.end_all() == []
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.wait()
        (found,) = leftovers.end_all()
    assert "time.sleep(3600)" in found
    until(lambda: leftovers.end_all() == [])


@pytest.mark.parametrize("code", [0, 3])
def test_busy_loops_run_beside_the_command_and_end_with_it(code: int) -> None:
    program = (
        f"import os, psutil, sys; print([p.pid for p in psutil.Process(os.getppid()).children()]); sys.exit({code})"
    )
    tool = [
        sys.executable,
        str(TOOLS / "busy_suite.py"),
        "--runs",
        "2",
        "--loops",
        "1",
        "--",
        sys.executable,
        "-c",
        program,
    ]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (1 if code else 0), done.stderr
    (loop,) = [int(line.partition(": ")[2]) for line in done.stdout.splitlines() if line.startswith("busy loops: ")]
    assert done.stdout.count(f"[{loop}, ") == 2
    assert done.stdout.count(f"exit code {code} after") == 2
    assert not psutil.pid_exists(loop)


BURNING = """
import subprocess, sys

BURN = "import time\\nwhile time.process_time() < 0.3: pass"

def test_burns():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_does_nothing():
    pass
"""


def test_what_a_test_costs_is_counted_with_its_processes(tmp_path: Path) -> None:
    file = tmp_path / "test_burning.py"
    file.write_text(BURNING)
    command = [
        sys.executable,
        str(TOOLS / "test_cost.py"),
        "--",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
        str(file),
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +([0-9.]+) +[0-9.]+  (\S+)$", done.stdout, re.MULTILINE)
    cpu_s = {name.rpartition("::")[2]: float(seconds) for seconds, name in rows}
    assert cpu_s["all"] >= cpu_s["test_burning.py"] >= cpu_s["test_burns"] >= 0.3
    assert cpu_s["test_does_nothing"] < 0.3


def test_a_port_is_drawn_once_by_all_that_run_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = "from tests import ports; print(ports.free_ports(1), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", draw], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        (taken,) = json.loads(other.stdout.readline())
        (free,) = ports.free_ports(1)
        monkeypatch.setattr(ports, "_order", [free, taken])
        assert ports.free_ports(1) == [free]
        other.stdin.write(b"\n")
    monkeypatch.setattr(ports, "_order", [taken])
    assert ports.free_ports(1) == [taken]


def test_parts_share_out_all_tests_about_evenly() -> None:
    ids = [f"tests/system/test_layouts.py::test_answers_are_equal[{number}]" for number in range(300)]
    parts = [sum(part_of(node_id, 3) == part for node_id in ids) for part in (1, 2, 3)]
    assert sum(parts) == 300
    assert min(parts) > 70


def test_a_part_has_some_cells_of_a_matrix_and_all_other_tests(tmp_path: Path) -> None:
    cells = "[pytest.param(n, marks=pytest.mark.matrix if n else ()) for n in range(40)]"
    test = f"import pytest\n@pytest.mark.parametrize('n', {cells})\ndef test_one(n): pass\n"
    (tmp_path / "test_some.py").write_text(test, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = matrix", encoding="utf-8")
    found = []
    for part in ("1/3", "2/3", "3/3"):
        command = [sys.executable, "-m", "pytest", "-p", "tests.part", "--part", part, "--collect-only", "-q"]
        # Others' plugins, which take most of such a process's CPU time, have nothing to do with it.
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            [*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        found.append(set(re.findall(r"test_one\[\d+\]", done.stdout)))
    assert set.intersection(*found) == {"test_one[0]"}
    assert len(set.union(*found)) == 40


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "x/3", ""])
def test_a_part_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--part"):
        parsed_part(text)
