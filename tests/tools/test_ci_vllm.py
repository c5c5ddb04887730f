"""When continuous integration leaves out the tests with real vLLM, and when it fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "vllm"
ALL = SCRIPT.with_name("run")
LIMITS = {"MIN_MEMORY_GB": "0", "MIN_DISK_GB": "0"}

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="a source distribution has no .ci")


def _run(
    directory: Path, *, spent_s: int | str = 0, make: str = "exit 0", whole: bool = False, **limits: str
) -> subprocess.CompletedProcess[str]:
    """The script in a checkout of its own, with a shell script in place of make, and with its limits set; ``whole``:
    the one that runs everything, this one as well."""
    (directory / ".ci").mkdir()
    (directory / ".venv-vllm").mkdir()
    text = SCRIPT.read_text(encoding="utf-8")
    for name, value in {**LIMITS, **limits}.items():
        lines = [f"{name}={value}" if line.startswith(f"{name}=") else line for line in text.splitlines(keepends=False)]
        text = "\n".join(lines) + "\n"
    copy = directory / ".ci" / "vllm"
    copy.write_text(text, encoding="utf-8")
    copy.chmod(0o755)
    shutil.copy(ALL, copy.with_name("run"))
    fake = directory / "bin" / "make"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "made $*"\n{make}\n', encoding="utf-8")
    fake.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    env = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "TMPDIR": str(directory)}
    env.pop("VLLM_VENV", None)
    return subprocess.run(
        [bash, *([str(copy.with_name("run"))] if whole else [str(copy), str(spent_s)])],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"spent_s": 4000, "MAX_SPENT_S": "2400"}, "66 minutes have passed and the limit is 40"),
        ({"MIN_MEMORY_GB": "1000000"}, "GB of memory are available and it needs 1000000"),
        ({"MIN_DISK_GB": "1000000"}, "GB of disk are free and its packages need 1000000"),
        (
            {"make": 'echo "WARNING: no"; echo "ERROR: No matching distribution"; exit 2'},
            "its packages cannot be installed here: ERROR: No matching distribution",
        ),
        ({"make": "sleep 60", "INSTALL_S": "1"}, "0 minutes were not enough"),
    ],
)
def test_a_machine_that_cannot_run_them_is_told_of_in_one_line(
    settings: dict[str, object], reason: str, tmp_path: Path
) -> None:
    done = _run(tmp_path, **settings)  # type: ignore[arg-type]
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("make test-vllm: left out, because ")
    assert line.endswith(reason)


def test_what_was_built_by_half_does_not_stay(tmp_path: Path) -> None:
    _run(tmp_path, make="exit 2")
    assert not (tmp_path / ".venv-vllm").exists()


def test_a_failing_test_fails(tmp_path: Path) -> None:
    done = _run(tmp_path, make='case "$*" in *vllm-env) exit 0 ;; esac; exit 2')
    assert done.returncode == 2
    assert (tmp_path / ".venv-vllm").exists()


def test_hanging_tests_are_interrupted(tmp_path: Path) -> None:
    done = _run(tmp_path, make='case "$*" in *vllm-env) exit 0 ;; esac; exec sleep 60', TESTS_S="1")
    assert done.returncode == 124
    assert "interrupted after 0 minutes" in done.stdout


def test_packages_are_fetched_and_nothing_else(tmp_path: Path) -> None:
    done = _run(tmp_path, spent_s="fetch", make="exit 3")
    assert (done.returncode, done.stdout) == (3, "made VLLM_VENV=.venv-vllm vllm-fetched\n")


def test_everything_is_made_while_packages_are_fetched_and_what_was_fetched_in_vain_is_shown(tmp_path: Path) -> None:
    done = _run(tmp_path, whole=True, make='case "$*" in *vllm-fetched) echo no network; exit 3 ;; esac')
    made = [line.removeprefix("made ") for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in made if "VLLM_VENV" not in line and line != "no network"] == [
        *("check", "dist", "test-model", "test-matrix", "test-late", "test")
    ]
    again = [re.search(r"test\S*", line)[0] for line in made if "--reruns 1 " in line]  # type: ignore[index]
    assert again == ["test-vllm", "test-matrix", "test-late", "test"]
    assert made.index("no network") < next(at for at, line in enumerate(made) if "test-vllm" in line)


def test_the_first_failure_ends_all_and_leaves_nothing(tmp_path: Path) -> None:
    """The suite would complain of a process that goes on to fetch."""
    done = _run(tmp_path, whole=True, make='case "$*" in *vllm-fetched) exec sleep 300 ;; check) exit 2 ;; esac')
    assert (done.returncode, done.stdout) == (2, "made check\n")
