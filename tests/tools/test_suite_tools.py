"""What keeps the suite honest: processes that outlive it are found and ended; busy loops are there, and then gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests import leftovers
from tests.patience import until

TOOL = Path(__file__).parents[2] / "tools" / "busy_suite.py"
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
    tool = [sys.executable, str(TOOL), "--runs", "2", "--loops", "1", "--", sys.executable, "-c", program]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (1 if code else 0), done.stderr
    (loop,) = [int(line.partition(": ")[2]) for line in done.stdout.splitlines() if line.startswith("busy loops: ")]
    assert done.stdout.count(f"[{loop}, ") == 2
    assert done.stdout.count(f"exit code {code} after") == 2
    assert not psutil.pid_exists(loop)
