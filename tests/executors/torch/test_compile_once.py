"""One process of a machine compiles kernels, the others wait; nothing that fails or dies keeps anybody waiting."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from numba import njit

from kvrelay.executors.torch.kernels.compile_once import LOCK_NAME, compile_once

HOLD = """
import sys, time
from pathlib import Path
from numba import njit
from kvrelay.executors.torch.kernels.compile_once import compile_once

def work():
    njit(lambda x: x + 1)(1)
    print("held", flush=True)
    time.sleep(60)

compile_once(work, Path(sys.argv[1]))
"""


@contextmanager
def another(cache: Path) -> Iterator[None]:
    """Another process that compiles, as far as the lock can tell. BlockingIOError if somebody else has the lock."""
    with (cache / LOCK_NAME).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def is_free(cache: Path) -> bool:
    try:
        with another(cache):
            return True
    except BlockingIOError:
        return False


def never(seconds: float) -> None:
    raise AssertionError("nobody is to be waited for")


def compile_one() -> None:
    """A function that no cache has."""
    assert njit(lambda x: x + 1)(1) == 2


def test_the_first_goes_ahead_and_holds_others_off(tmp_path: Path) -> None:
    def work() -> None:
        assert is_free(tmp_path), "it has nothing to compile so far"
        compile_one()
        assert not is_free(tmp_path)

    compile_once(work, tmp_path, sleep=never)
    assert is_free(tmp_path)


def test_a_process_that_has_nothing_to_compile_waits_for_none(tmp_path: Path) -> None:
    runs: list[int] = []
    with another(tmp_path):
        compile_once(lambda: runs.append(1), tmp_path, sleep=never)
    assert runs == [1]


def test_the_second_waits_and_then_starts_again_beside_the_third(tmp_path: Path) -> None:
    waits: list[float] = []
    runs: list[int] = []
    with ExitStack() as first:
        first.enter_context(another(tmp_path))

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                first.close()

        def work() -> None:
            runs.append(len(waits))
            compile_one()
            compile_once(lambda: runs.append(-1), tmp_path, sleep=never)
            assert not is_free(tmp_path)

        compile_once(work, tmp_path, sleep=sleep)
    assert runs == [0, 3, -1]
    assert is_free(tmp_path)


def test_the_wait_is_bounded(tmp_path: Path) -> None:
    with another(tmp_path):
        compile_once(compile_one, tmp_path, max_silence_s=0.0, sleep=never)


def test_a_process_that_compiles_is_waited_for_as_long_as_it_makes_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine all kernels take many times ``max_silence_s``."""
    time_s, num_waits = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal time_s, num_waits
        time_s, num_waits = time_s + 9.0, num_waits + 1
        if num_waits <= 40:
            os.utime(tmp_path / LOCK_NAME, ns=(num_waits, num_waits))

    with another(tmp_path), caplog.at_level(logging.WARNING):
        compile_once(compile_one, tmp_path, max_silence_s=90.0, sleep=sleep, now=lambda: time_s)
    assert 360 + 90 <= time_s < 360 + 90 + 18
    messages = [record.getMessage() for record in caplog.records][:-2]
    assert messages[0] == "another process compiles kernels for this machine: waited 36 s so far"
    assert messages[-1] == "the process that compiles kernels makes no progress: compiling them here"


def test_every_compiled_function_is_progress(tmp_path: Path) -> None:
    @njit
    def function(x: int) -> int:
        return x + 1

    def work() -> None:
        os.utime(tmp_path / LOCK_NAME, ns=(1, 1))
        assert function(1) == 2
        compiled_ns = (tmp_path / LOCK_NAME).stat().st_mtime_ns
        assert compiled_ns > 1
        assert function(2) == 3
        assert (tmp_path / LOCK_NAME).stat().st_mtime_ns == compiled_ns

    compile_once(work, tmp_path, sleep=never)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not is_free(tmp_path)
        holder.kill()
    compile_once(compile_one, tmp_path, sleep=never)


def test_a_failure_gives_the_turn_away(tmp_path: Path) -> None:
    def work() -> None:
        compile_one()
        raise ValueError("kernel")

    with pytest.raises(ValueError, match="kernel"):
        compile_once(work, tmp_path)
    assert is_free(tmp_path)


def test_no_directory_no_turns(tmp_path: Path) -> None:
    compile_once(compile_one, tmp_path / "none", sleep=never)


def test_a_file_system_without_locks_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    compile_once(compile_one, tmp_path, sleep=never)


def test_it_says_once_why_it_takes_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @njit
    def one(x: int) -> int:
        return x + 1

    @njit
    def two(x: int) -> int:
        return one(x) + 1

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            compile_once(lambda: two(1), tmp_path, now=iter((5.0, 48.0)).__next__)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling kernels for this machine, once: about 15 s, longer on a busy machine",
        "compiled kernels in 43 s",
    ]
