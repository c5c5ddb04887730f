"""The process that owns a host's KV memory: its memory outlives workers, and its own death harms nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvrelay.errors import ConfigError
from kvrelay.tiers import broker
from kvrelay.tiers.broker import SOCKET_NAME, HostMemory, connect

NUM_BYTES = 1 << 20
PATIENCE_S = 60.0


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Whatever brokers run for it are ended."""
    monkeypatch.setattr(broker, "RETRY_S", 0.01)
    place = tmp_path / ("a long name " * 12)
    claims: list[HostMemory] = []
    claim = HostMemory.__init__

    def recorded(self: HostMemory, *given: Any) -> None:
        claim(self, *given)
        claims.append(self)

    monkeypatch.setattr(HostMemory, "__init__", recorded)
    yield place
    for memory in claims:
        memory.close()
    for process in brokers_of(place):
        with contextlib.suppress(psutil.NoSuchProcess):  # its last claim was just given back
            process.kill()
            process.wait(PATIENCE_S)


def brokers_of(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "kvrelay.tiers.broker" in command and str(directory) in command:
            found.append(process)
    return found


def until(condition: object, what: str) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def test_memory_is_shared_and_outlives_its_workers(directory: Path) -> None:
    first = HostMemory(directory, "model", NUM_BYTES, 60.0)
    second = HostMemory(directory, "model", NUM_BYTES, 60.0)
    other = HostMemory(directory, "another", NUM_BYTES, 60.0)
    first.memory[:5] = b"hello"
    assert second.memory[:5] == b"hello"
    assert other.memory[:5] == bytes(5)
    first.close()
    second.close()
    third = HostMemory(directory, "model", NUM_BYTES, 60.0)
    assert third.memory[:5] == b"hello"
    assert len(brokers_of(directory)) == 1
    assert stat.S_IMODE((directory / SOCKET_NAME).stat().st_mode) == 0o700 & ~0o077
    third.close()
    other.close()


def test_it_ends_when_nobody_has_needed_it_for_a_while(directory: Path) -> None:
    memory = HostMemory(directory, "model", NUM_BYTES, 0.0)
    assert brokers_of(directory)
    memory.close()
    until(lambda: not brokers_of(directory), "the broker still runs")
    assert not (directory / SOCKET_NAME).exists()


def test_a_killed_broker_is_replaced_and_gets_the_memory_back(directory: Path) -> None:
    memory = HostMemory(directory, "model", NUM_BYTES, 60.0)
    memory.memory[:5] = b"hello"
    (process,) = brokers_of(directory)
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    assert memory.memory[:5] == b"hello", "what is mapped stays"
    until(lambda: brokers_of(directory), "no other broker has been started")
    until(lambda: holds_an_arena(directory), "the memory was not offered")
    late = HostMemory(directory, "model", NUM_BYTES, 60.0)
    assert late.memory[:5] == b"hello"
    late.close()
    memory.close()


def holds_an_arena(directory: Path) -> bool:
    """Whether a broker has memory of the name ``model``."""
    for process in brokers_of(directory):
        with suppress(OSError):  # it is only starting
            folder = Path(f"/proc/{process.pid}/fd")
            if any("memfd:kvrelay-model" in os.readlink(fd) for fd in folder.iterdir()):
                return True
    return False


def test_another_size_is_given_once_nobody_uses_the_old_one(directory: Path) -> None:
    first, second = (HostMemory(directory, "model", size, 60.0) for size in (NUM_BYTES, 2 * NUM_BYTES))
    assert len(second.memory) == NUM_BYTES, "shared with the first"
    first.close()
    second.close()

    def size_of_next() -> int:
        memory = HostMemory(directory, "model", 2 * NUM_BYTES, 60.0)
        memory.close()
        return len(memory.memory)

    until(lambda: size_of_next() == 2 * NUM_BYTES, "the old size")


def test_more_memory_than_the_host_has_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"1048576\.0TiB were asked for, and the host has .* left"):
        HostMemory(directory, "model", 1 << 60, 0.0)


@pytest.mark.parametrize("said", [b"", b"\x00", b"[]", b"{}", json.dumps({"name": "x", "bytes": "many"}).encode()])
def test_nonsense_is_answered_and_ends_only_its_connection(directory: Path, said: bytes) -> None:
    memory = HostMemory(directory, "model", NUM_BYTES, 60.0)
    hostile = connect(directory, 60.0)
    hostile.settimeout(PATIENCE_S)
    if said:
        hostile.send(said)
        assert b"error" in hostile.recv(1000)
    hostile.close()
    again = HostMemory(directory, "model", NUM_BYTES, 60.0)
    assert len(again.memory) == NUM_BYTES
    again.close()
    memory.close()


def test_a_stale_socket_is_no_broker(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    here = os.open(directory, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(f"/proc/self/fd/{here}/{SOCKET_NAME}")
    os.close(here)
    memory = HostMemory(directory, "model", NUM_BYTES, 0.0)
    assert len(memory.memory) == NUM_BYTES
    memory.close()


@pytest.mark.parametrize("wanted", ["0", "-1", str(-(10**30)), str(10**30)])
def test_no_wanted_size_ends_the_broker(wanted: str, directory: Path) -> None:
    kept = HostMemory(directory, "model", NUM_BYTES, 60.0)
    (running,) = brokers_of(directory)
    connection = connect(directory, 60.0)
    connection.settimeout(PATIENCE_S)
    with connection:
        connection.sendall(json.dumps({"name": "another", "bytes": wanted}).encode())
        assert "error" in json.loads(connection.recv(512))
    assert brokers_of(directory) == [running]
    kept.memory[:1] = b"x"
    assert HostMemory(directory, "model", NUM_BYTES, 60.0).memory[:1] == b"x"


def test_memory_cannot_be_cut_off_under_its_readers(directory: Path) -> None:
    memory = HostMemory(directory, "model", NUM_BYTES, 60.0)
    for size in (0, 2 * NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.memory[-1:] = b"x"


@pytest.mark.parametrize(("is_sealed", "size"), [(False, NUM_BYTES), (True, NUM_BYTES - 1)])
def test_memory_that_may_shrink_or_is_short_is_refused(is_sealed: bool, size: int) -> None:
    fd = os.memfd_create("offered", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        if is_sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, broker.SEALS)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine, theirs, pytest.MonkeyPatch.context() as patch:
            patch.setattr(broker, "connect", lambda *_: mine)
            socket.send_fds(theirs, [json.dumps({"bytes": NUM_BYTES}).encode()], [fd])
            with pytest.raises(ConfigError, match="no host memory"):
                HostMemory(Path("anywhere"), "model", NUM_BYTES, 60.0)
    finally:
        os.close(fd)
