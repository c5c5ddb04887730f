"""Children: what they say, and how they end."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import tempfile
from unittest.mock import Mock

import pytest

from kvrelay.launch import children as children_module
from kvrelay.launch.children import (
    AFTER_CRASH,
    MAX_LINE,
    WINDOW_S,
    Child,
    ChildErrors,
    Fate,
    end_of,
    restart,
    start_child,
    stop_children,
    supervise,
)

FAILS = "import sys; print('kvrelay: no such file', file=sys.stderr); print(f'log {sys.argv[1]}', file=sys.stderr)"
IGNORES = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', file=sys.stderr, flush=True); time.sleep(600)"
)


def test_equal_errors_of_several_children_are_told_once() -> None:
    lines: list[bytes] = []
    now_s = 0.0
    errors = ChildErrors(lines.append, lambda: now_s)
    for name in ("worker 0", "worker 1", "worker 2"):
        errors.pass_on(name, b"2026-01-01 WARNING x\n")
        errors.pass_on(name, b"kvrelay: no such file\n")
    assert lines.count(b"kvrelay: no such file\n") == 1
    assert lines.count(b"2026-01-01 WARNING x\n") == 3
    errors.pass_on("worker 1", b"kvrelay: another\n")
    errors.pass_on("worker 0", b"kvrelay: no such file\n")
    assert lines[-2:] == [b"kvrelay: another\n", b"kvrelay: no such file\n"]
    now_s = WINDOW_S + 1
    errors.pass_on("worker 1", b"kvrelay: no such file\n")
    assert lines.count(b"kvrelay: no such file\n") == 3


def test_a_child_leads_a_group_but_shares_our_session() -> None:
    """Ctrl-C reaches only us, and the kernel shares the CPUs between all of us as threads, not by session."""
    says_who = "import os, signal; print(os.getsid(0), os.getpgid(0), signal.getsignal(signal.SIGTTOU).name)"
    with tempfile.TemporaryFile() as said:
        child = start_child("child", [sys.executable, "-c", says_who], said)
        child.process.wait(60)
        said.seek(0)
        assert said.read().split() == [b"%d" % os.getsid(0), b"%d" % child.pid, b"SIG_IGN"]


def test_errors_of_real_children_and_of_restarted_ones() -> None:
    lines: list[bytes] = []
    errors = ChildErrors(lines.append)
    children = [start_child(f"w{n}", [sys.executable, "-c", FAILS, str(n)], errors=errors) for n in range(3)]
    for child in children:
        child.process.wait(60)
    restart(children[0])
    children[0].process.wait(60)
    errors.finish(60)
    assert sorted(line for line in lines if line.startswith(b"log")) == [b"log 0\n", b"log 0\n", b"log 1\n", b"log 2\n"]
    assert 1 <= lines.count(b"kvrelay: no such file\n") <= 2


def test_a_restarted_child_is_told_how_the_one_before_it_ended() -> None:
    tells = f"import os, sys; print(os.environ.get('{AFTER_CRASH}'), file=sys.stderr); sys.exit(int(sys.argv[1]))"
    for code, told in ((3, "exit code 3: None"), (0, "None"), (69, "None")):
        lines: list[bytes] = []
        errors = ChildErrors(lines.append)
        child = start_child("w", [sys.executable, "-c", tells, str(code)], errors=errors)
        child.process.wait(60)
        errors.finish(60)
        restart(child)
        child.process.wait(60)
        errors.finish(60)
        assert [line.decode().strip() for line in lines] == ["None", told]


def test_a_child_that_cannot_be_started_again_is_tried_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine may have no process or memory left for a moment: the other children serve on."""
    child = start_child("worker 3", [sys.executable, "-c", "raise SystemExit(7)"])
    child.process.wait()
    assert supervise(child, 100.0) is Fate.GOES_ON
    with monkeypatch.context() as short:
        short.setattr(
            children_module, "start_child_process", Mock(side_effect=OSError(errno.EAGAIN, "no process left"))
        )
        for now_s in (101.0, 102.0, 110.0):
            assert supervise(child, now_s) is Fate.GOES_ON
    assert capsys.readouterr().err.count("worker 3 cannot be started again") == 2
    first = child.pid
    assert supervise(child, 120.0) is Fate.GOES_ON
    assert child.pid != first
    child.process.wait()


def test_ends_are_told_in_words() -> None:
    assert end_of(-9, "") == "killed by SIGKILL"
    assert end_of(-77, "x") == "killed by signal 77: x"
    assert end_of(70, "the engine hangs") == "exit code 70: the engine hangs"
    errors = ChildErrors(lambda line: None)
    errors.pass_on("w", b"kvrelay: the \x1b[31mreason\n")
    errors.pass_on("w", b"  \n")
    assert errors.last_line("w") == "the [31mreason"
    errors.pass_on("w", b"\xff" * 2 * MAX_LINE)
    assert len(errors.last_line("w")) == MAX_LINE
    assert errors.last_line("other") == ""


async def test_a_long_end_is_explained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "SILENT_WAIT_S", 0.05)
    lines: list[bytes] = []
    errors = ChildErrors(lines.append)
    child = start_child("stubborn", [sys.executable, "-c", IGNORES], errors=errors)
    while not lines:
        await asyncio.sleep(0.01)
    told: list[list[Child]] = []
    await stop_children([child], 0.3, told.append)
    assert told == [[child]]
    assert child.exit_code == -9
    errors.finish(60)
