"""The table of faults is made from what the tests have left in pytest's JUnit file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "fault_table.py"
REPORT = """<testsuites><testsuite>
<testcase name="test_a[decode]" time="4.2"><properties><property name="longest_pause_s" value="0.13"/></properties>
</testcase><testcase name="test_b" time="1.0"/>
</testsuite></testsuites>"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)


def test_only_tests_that_measured_something_are_listed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    done = run(str(report))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2:] == ["| test_a[decode] | 4.2 | 0.13 | - |"]


def test_wrong_usage() -> None:
    assert run().returncode == 2
