"""What is loaded at low priority leaves nothing behind at low priority."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from kvrelay.launch.children import restart, start_child
from kvrelay.launch.process import LOW_NICE, at_low_priority
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


def test_a_worker_that_is_started_again_yields() -> None:
    child = start_child("worker", [sys.executable, "-c", "pass"])
    child.restart_flags = RESTART_FLAGS
    child.process.wait(60)
    for _ in range(2):
        restart(child)
        assert child.process.args == [sys.executable, "-c", "pass", "--yield-while-starting"]
        child.process.wait(60)


UNPRIVILEGED = """
import asyncio, os, threading
from kvrelay.launch.process import at_low_priority
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
def nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
print(nice(), asyncio.run(at_low_priority(nice)), nice())
"""


@linux_only
def test_no_privilege_is_needed() -> None:
    """Neither to lower the priority nor for the main thread to keep its own."""
    command = [sys.executable, "-c", UNPRIVILEGED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    before, during, after = map(int, done.stdout.split())
    assert (before, during, after) == (nice(), max(nice(), LOW_NICE), nice())
