"""A clean end for each signal that asks for one, in real processes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrelay.control.nats_process import NatsServerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="terminals and the death signal are tested on Linux")

PROGRAM = """
import asyncio, fcntl, os, signal, sys, termios
from kvrelay.launch.process import on_terminate

async def main():
    stop = asyncio.Event()
    on_terminate(stop.set)
    os.write(int(sys.argv[1]), b"ready ")
    await stop.wait()
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGHUP)  # a shell repeats it to its jobs
    await asyncio.sleep(0)
    print("the last word", flush=True)
    print("and another", file=sys.stderr, flush=True)
    os.write(int(sys.argv[1]), b"ended")

if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN if "ignored" in sys.argv else signal.SIG_DFL)
asyncio.run(main())
"""


@contextmanager
def started(program: str, stdin: int, said: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own. ``said``: where the program writes; closed here."""
    command = [sys.executable, "-c", program, str(said), *arguments]
    process = subprocess.Popen(
        command, stdin=stdin, stdout=stdin, stderr=stdin, pass_fds=(said,), start_new_session=True
    )
    os.close(said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def said() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def test_a_closed_terminal_asks_for_a_clean_end(said: tuple[int, int]) -> None:
    """Also what is printed meanwhile must not fail, though the terminal is gone."""
    ours, theirs = os.openpty()
    with started(PROGRAM, theirs, said[1]) as process:
        os.close(theirs)
        assert os.read(said[0], 100) == b"ready "
        os.close(ours)
        assert process.wait(60) == 0
        assert os.read(said[0], 100) == b"ended"


PRINTER = """
import asyncio, logging, os, sys
from kvrelay.launch.process import on_terminate

async def main():
    logging.basicConfig()
    on_terminate(lambda: None)
    os.write(int(sys.argv[1]), b"ready ")
    os.read(0, 1)
    for _ in range(4000):
        print("lost", flush=True)
        print("lost", file=sys.stderr)
        logging.warning("lost")
    os.write(int(sys.argv[1]), b"ended ")
    os.read(0, 1)
    print("a word", flush=True)
    logging.warning("a line")

asyncio.run(main())
"""


@pytest.mark.parametrize("why", ["no reader", "no room", "slow reader"])
def test_a_process_that_serves_goes_on_when_nothing_takes_what_it_prints(said: tuple[int, int], why: str) -> None:
    """``serve | head``, or a log on a full disk: it ended with its whole cluster at the next line."""
    reading, output = os.pipe()
    go, asked = os.pipe()
    if why == "no room":
        os.dup2(os.open("/dev/full", os.O_WRONLY), output)
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_NONBLOCK)
    command = [sys.executable, "-c", PRINTER, str(said[1])]
    process = subprocess.Popen(command, stdin=go, stdout=output, stderr=output, pass_fds=(said[1],))
    try:
        for fd in (said[1], output, go) if why == "slow reader" else (said[1], output, go, reading):
            os.close(fd)
        assert os.read(said[0], 100) == b"ready "
        os.write(asked, b".")
        assert os.read(said[0], 100) == b"ended "
        if why == "slow reader":
            assert os.read(reading, 2**20).startswith(b"lost\n"), "the beginning, until the pipe was full"
        os.write(asked, b".")
        assert process.wait(60) == 0
        if why == "slow reader":
            assert os.read(reading, 2**20).endswith(b"a word\nWARNING:root:a line\n"), "there is room again"
            os.close(reading)
    finally:
        process.kill()
        process.wait()
        os.close(asked)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ignored_hangup_stays_ignored(number: signal.Signals, said: tuple[int, int]) -> None:
    """As ``nohup`` has it."""
    with open(os.devnull, "r+b") as nothing, started(PROGRAM, nothing.fileno(), said[1], "ignored") as process:
        assert os.read(said[0], 100) == b"ready "
        process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        assert process.wait(60) == 0
        assert os.read(said[0], 100) == b"ended"


SERVER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(int(sys.argv[1]), b"ended"), sys.exit()))
os.write(int(sys.argv[1]), f"{os.getpid() == os.getpgid(0)} {signal.getsignal(signal.SIGTTOU).name} ".encode())
while True:
    signal.pause()
"""
PARENT = """
import signal, sys
from kvrelay.core.child_process import start_child_process
signal.signal(signal.SIGHUP, signal.SIG_DFL)
said, server = sys.argv[1:]
command = [sys.executable, "-c", server, said]
start_child_process(command, pass_fds=(int(said),), death_signal=signal.SIGTERM).wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_a_server_ends_in_order_when_its_parent_is_gone(number: signal.Signals, said: tuple[int, int]) -> None:
    """``chat`` and ``bench`` start servers; a killed one, or one whose terminal is closed, must not leave them."""
    with open(os.devnull, "r+b") as nothing, started(PARENT, nothing.fileno(), said[1], SERVER) as process:
        assert os.read(said[0], 100) == b"True SIG_IGN "
        process.send_signal(number)
        assert process.wait(60) == -number
        assert os.read(said[0], 100) == b"ended"
        assert os.read(said[0], 100) == b"", "it is gone"


LISTED = """
import os, signal, sys
from kvrelay.cli.main import run
from kvrelay.worker.roles import Roles
begin = Roles.begin

async def begin_and_end(roles):
    await begin(roles)
    os.kill(os.getpid(), signal.SIGTERM)

Roles.begin = begin_and_end
sys.exit(run(sys.argv[2:]))
"""


def test_a_worker_that_is_told_to_leave_as_soon_as_others_see_it_leaves_in_order(said: tuple[int, int]) -> None:
    """They may have sent it requests."""
    server = NatsServerProcess()
    words = ("worker", "--engine", "mock", "--control", server.start())
    try:
        with open(os.devnull, "r+b") as nothing, started(LISTED, nothing.fileno(), said[1], *words) as process:
            assert process.wait(60) == 0
    finally:
        server.stop()


BELOW_INIT = """
import ctypes, os, signal, subprocess, sys, time
from kvrelay.launch.process import go_on_below_init

PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0  # gets orphans as process 1 does
init = os.getpid()
go_on_below_init()
assert os.getppid() == init
assert subprocess.run(["sh", "-c", "exit 3"]).returncode == 3
seen = []
signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
orphan = int(subprocess.check_output(["sh", "-c", "sleep 0.01 >&- & echo $!"]))
while os.path.exists(f"/proc/{orphan}"):
    time.sleep(0.01)
os.write(int(sys.argv[1]), b"ready ")
while not seen:
    time.sleep(0.01)
os.write(int(sys.argv[1]), b"ended")
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7)
"""


@pytest.mark.parametrize(("argument", "code"), [("leaves", 7), ("killed", 128 + signal.SIGKILL)])
def test_process_1_reaps_orphans_and_passes_signals_and_the_exit_code_on(
    said: tuple[int, int], argument: str, code: int
) -> None:
    reading, writing = said
    with started(BELOW_INIT, subprocess.DEVNULL, writing, argument) as process:
        assert os.read(reading, 100) == b"ready "
        process.terminate()
        assert os.read(reading, 100) == b"ended"
        assert process.wait(60) == code
