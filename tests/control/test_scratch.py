"""Directories of the dead are removed, and nobody else's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvrelay.control.scratch import ScratchDirectory
from kvrelay.errors import ConfigError

PREFIX = "kvrelay-test-"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_directory_lives_until_it_is_removed(temporary: Path) -> None:
    first = ScratchDirectory(PREFIX)
    (first.path / "data").write_text("x")
    second = ScratchDirectory(PREFIX)
    assert (first.path / "data").exists()
    assert first.path != second.path
    for directory in (first, second, first):
        directory.remove()
    assert list(temporary.iterdir()) == []


def test_the_next_start_removes_the_directory_of_a_killed_process(temporary: Path) -> None:
    code = (
        "import os, sys, tempfile\n"
        "from kvrelay.control.scratch import ScratchDirectory\n"
        "tempfile.tempdir = sys.argv[1]\n"
        f"directory = ScratchDirectory('{PREFIX}')\n"
        "print(directory.path, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "data").write_text("x")
        ScratchDirectory(PREFIX).remove()
        assert left.exists()
        owner.kill()
    assert left.exists()
    ScratchDirectory(PREFIX).remove()
    assert not left.exists()


def test_the_next_start_ends_a_removal_in_which_its_process_was_killed(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ScratchDirectory(PREFIX)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda path, **_: (path / "owner.lock").unlink())
        directory.remove()
    assert [*temporary.iterdir()]
    ScratchDirectory(PREFIX).remove()
    assert not [*temporary.iterdir()]


def test_without_a_temporary_directory_the_start_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(ConfigError, match=r"no temporary directory can be made .*set TMPDIR"):
        ScratchDirectory(PREFIX)


def test_links_files_and_directories_without_a_lock_are_kept(temporary: Path) -> None:
    without_lock = temporary / f"{PREFIX}without-lock"
    without_lock.mkdir()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{PREFIX}file").touch()
    before = sorted(temporary.rglob("*"))
    ScratchDirectory(PREFIX).remove()
    assert sorted(temporary.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give directories away")
def test_what_belongs_to_another_user_is_left_alone(temporary: Path) -> None:
    other = temporary / f"{PREFIX}other"
    other.mkdir()
    (other / "owner.lock").touch()
    os.chown(other, 12345, -1)
    ScratchDirectory(PREFIX).remove()
    assert other.exists()
    os.chown(other, 0, -1)
    ScratchDirectory(PREFIX).remove()
    assert not other.exists()
