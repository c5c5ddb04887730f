"""The suite: its steps, their figures, and that it goes on after failures; and the list of scripts."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
from benchmarks.__main__ import SCRIPTS, benchmarks
from benchmarks.suite import Step, all_steps, run_steps, top_figures, write_sample_conversations, write_suite
from click.testing import CliRunner

from kvrelay.bench.cases import CaseTimes
from kvrelay.bench.commands import bench_group
from kvrelay.errors import InvalidInputError


def test_suite_figures_and_sample(tmp_path: Path) -> None:
    assert top_figures({"a": 1, "b": {"c": 2.5, "d": True, "e": "x"}, "f": [1]}) == {"a": 1.0, "b.c": 2.5}
    for name in "xy":
        write_sample_conversations(tmp_path / name, 200)
    lines = (tmp_path / "x").read_text().splitlines()
    assert (tmp_path / "y").read_text().splitlines() == lines
    assert len(lines) == 200
    assert {len(line) for line in lines} == {300}


FAKE_PYTHON = """#!/bin/sh
# Called as: FAKE -m kvrelay bench NAME ...
case "$4" in
  good) echo '{"rate": 2.5, "where": "'"$5"'"}' ;;
  bad) echo '{"partial": 1}'; echo "it broke" >&2; exit 3 ;;
  text) echo 'no JSON' ;;
  slow) sleep 60 ;;
esac
"""


def test_suite_goes_on_after_failures(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    names = ("bad", "text", "slow", "good")
    steps = [Step(name, f"kvrelay bench {name}", timeout_s=0.5 if name == "slow" else 30) for name in names]
    results = list(run_steps(steps, tmp_path, None, CaseTimes(), str(python)))
    assert [result["name"] for result in results] == list(names)
    bad, text, slow, good = results
    assert bad["error"] == "exit code 3: it broke"
    assert (tmp_path / "bad.json").read_text() == '{"partial": 1}\n'
    assert "not JSON" in str(text["error"])
    assert "did not end within" in str(slow["error"])
    assert (good["error"], good["figures"]) == (None, {"rate": 2.5})
    assert good["command"] == "python -m kvrelay bench good --json"
    write_suite(results, tmp_path)
    summary = (tmp_path / "summary.md").read_text()
    assert "| bad | " in summary
    assert "- rate: 2.5" in summary


def test_every_step_is_a_command_that_exists() -> None:
    groups = {"benchmarks": benchmarks, "kvrelay": bench_group}
    for step in all_steps("", True, "folder"):
        module, *words = shlex.split(step.command)
        name = words[0] if module == "benchmarks" else words[1]
        assert groups[module].get_command(click.Context(groups[module]), name) is not None


def test_all_runs_what_it_is_asked(tmp_path: Path) -> None:
    done = CliRunner().invoke(benchmarks, ["all", "--only", "unheard-of", "--output-dir", str(tmp_path)])
    assert isinstance(done.exception, InvalidInputError)
    assert "prefixes" in done.exception.message


def test_every_script_has_help_with_an_example() -> None:
    for name in SCRIPTS:
        shown = CliRunner().invoke(benchmarks, [name, "--help"])
        assert f"Example: python -m benchmarks {name}" in shown.output, shown.output
