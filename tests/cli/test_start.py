"""The first moments of the command: interrupted, or without standard streams."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvrelay.cli.main import run


def test_an_interrupt_while_the_first_modules_are_read_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "kvrelay", "--help"]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_is_closed_of_the_standard_streams_is_open_and_inherited(closed: str, tmp_path: Path) -> None:
    """A socket would get its number, and libuv aborts a process that closes one of them."""
    told = tmp_path / "told"
    code = (
        "import os; from kvrelay.cli import main\n"
        f"main.run = lambda arguments: print(*map(os.get_inheritable, range(3)), file=open({str(told)!r}, 'w'))\n"
        "main.main([])"
    )
    path = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], env={**os.environ, "PYTHONPATH": path}
    )
    assert ended.returncode == 0
    assert told.read_text() == "True True True\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "[Errno 28] No space left on device"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES), "/var/x"), "[Errno 13] Permission denied: '/var/x'"),
        (TimeoutError(), "TimeoutError"),
        (MemoryError(), "there is not enough memory for this: ask for less, or give the process more"),
    ],
)
def test_an_error_of_the_operating_system_is_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a command writes: a disk may be full at any place."""

    def fail() -> None:
        raise error

    assert run([], click.Command("failing", callback=fail)) == 1
    assert capsys.readouterr().err == f"kvrelay: {line}\n"


def test_an_error_of_a_server_does_not_speak_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("HTTP/9 \x1b]0;evil\x07\n\u202e")

    assert run([], click.Command("failing", callback=fail)) == 1
    assert capsys.readouterr().err == "kvrelay: HTTP/9 \\x1b]0;evil\\x07 \\u202e\n"


def test_text_that_the_terminal_cannot_show_is_escaped() -> None:
    """A model's name, in the line that says that all is ready."""
    code = "from kvrelay.cli import main\nmain.run = lambda arguments: print('mod\u00e8le')\nmain.main([])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "mod\\xe8le\n", "")
