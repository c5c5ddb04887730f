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
from kvrelay.executors.torch.kernels.compile_once import compile_once
with compile_once(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
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


def test_the_first_goes_ahead_and_holds_others_off(tmp_path: Path) -> None:
    with compile_once(tmp_path, sleep=never):
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_the_second_waits_and_then_goes_on_beside_the_third(tmp_path: Path) -> None:
    waits: list[float] = []
    with ExitStack() as first:
        first.enter_context(another(tmp_path))

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                first.close()

        with compile_once(tmp_path, sleep=sleep):
            assert len(waits) == 3
            with compile_once(tmp_path, sleep=never):
                assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_the_wait_is_bounded(tmp_path: Path) -> None:
    with another(tmp_path), compile_once(tmp_path, max_silence_s=0.0, sleep=never):
        pass


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

    waiting = compile_once(tmp_path, max_silence_s=90.0, sleep=sleep, now=lambda: time_s)
    with another(tmp_path), caplog.at_level(logging.WARNING), waiting:
        assert 360 + 90 <= time_s < 360 + 90 + 18
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "another process compiles kernels for this machine: waiting for 36 s"
    assert messages[-1] == "the process that compiles kernels makes no progress: compiling them here"


def test_every_compiled_function_is_progress(tmp_path: Path) -> None:
    @njit
    def function(x: int) -> int:
        return x + 1

    with compile_once(tmp_path, sleep=never):
        os.utime(tmp_path / LOCK_NAME, ns=(1, 1))
        assert function(1) == 2
        compiled_ns = (tmp_path / LOCK_NAME).stat().st_mtime_ns
        assert compiled_ns > 1
        assert function(2) == 3
        assert (tmp_path / LOCK_NAME).stat().st_mtime_ns == compiled_ns


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not is_free(tmp_path)
        holder.kill()
    with compile_once(tmp_path, sleep=never):
        assert not is_free(tmp_path)


def test_a_failure_gives_the_turn_away(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kernel"), compile_once(tmp_path):
        raise ValueError("kernel")
    assert is_free(tmp_path)


def test_no_directory_no_turns(tmp_path: Path) -> None:
    with compile_once(tmp_path / "none", sleep=never):
        pass


def test_a_file_system_without_locks_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with compile_once(tmp_path, sleep=never):
        pass


def test_it_says_once_why_it_takes_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @njit
    def one(x: int) -> int:
        return x + 1

    @njit
    def two(x: int) -> int:
        return one(x) + 1

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with compile_once(tmp_path, now=iter((5.0, 48.0)).__next__):
                assert two(1) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "compiling kernels for this machine, once: about 15 s, longer on a busy machine",
        "compiled kernels in 43 s",
    ]
