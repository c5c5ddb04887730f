"""What is loaded at low priority leaves nothing behind at low priority."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from kvrelay.launch import low_priority
from kvrelay.launch.children import restart, start_child
from kvrelay.launch.low_priority import LOW_NICE, at_low_priority
from kvrelay.launch.serve import RESTART_FLAGS

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="nice values of threads are Linux's")


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux_only
async def test_only_the_thread_of_the_work_is_at_low_priority() -> None:
    before = nice()
    during: list[int] = []

    def work() -> str:
        during.append(nice())
        helper = threading.Thread(target=lambda: during.append(nice()))
        helper.start()
        helper.join()
        return threading.current_thread().name

    name = await at_low_priority(work)
    assert during == [max(before, LOW_NICE)] * 2
    assert nice() == before
    # A thread that is used again, one of a pool for instance, would stay slow.
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10)
    assert name not in {thread.name for thread in threading.enumerate()}


async def test_exceptions_of_the_work_reach_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await at_low_priority(lambda: 1 // 0)


class Session:
    """An autogroup file that refuses the first changes."""

    def __init__(self, num_refusals: int) -> None:
        self.num_refusals = num_refusals
        self.written: list[str] = []

    def read_text(self, *_: object, **__: object) -> str:
        return "/autogroup-7 nice 3"

    def write_text(self, text: str, *_: object, **__: object) -> int:
        if self.num_refusals:
            self.num_refusals -= 1
            raise BlockingIOError
        self.written.append(text)
        return len(text)


@linux_only
@pytest.mark.parametrize("leads", [True, False])
async def test_a_session_of_its_own_yields_meanwhile(monkeypatch: pytest.MonkeyPatch, leads: bool) -> None:
    session = Session(num_refusals=3)
    monkeypatch.setattr(low_priority, "AUTOGROUP", session)
    monkeypatch.setattr(low_priority, "ATTEMPT_INTERVAL_S", 0.0)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid() if leads else os.getpid() + 1)
    seen: list[list[str]] = []
    await at_low_priority(lambda: seen.append(list(session.written)))
    assert seen == [[str(LOW_NICE)] if leads else []]
    assert session.written == ([str(LOW_NICE), "3"] if leads else [])


def test_a_worker_that_is_started_again_yields() -> None:
    child = start_child("worker", [sys.executable, "-c", "pass"])
    child.restart_flags = RESTART_FLAGS
    child.process.wait(60)
    for _ in range(2):
        restart(child)
        assert child.process.args == [sys.executable, "-c", "pass", "--yield-while-starting"]
        child.process.wait(60)


UNPRIVILEGED = """
import asyncio, ctypes, os
from kvrelay.launch.low_priority import AUTOGROUP, at_low_priority
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    PR_SET_DUMPABLE = 4  # or else our own files in /proc are root's
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
def state():
    return AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else "none"
before = state()
during = asyncio.run(at_low_priority(state))
print(before, during, state(), os.getpriority(os.PRIO_PROCESS, 0))
"""


@linux_only
def test_no_privilege_is_needed() -> None:
    """In a session of its own: that and the main thread are at last as they were."""
    command = [sys.executable, "-c", UNPRIVILEGED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, start_new_session=True)
    assert done.returncode == 0, done.stderr
    before, during, after, main_thread = done.stdout.split()
    assert (before, during, after) in (("0", str(LOW_NICE), "0"), ("none", "none", "none"))
    assert main_thread == str(nice())
    assert "stays at low CPU priority" not in done.stderr
