"""The process that owns a host's KV memory, so that prefixes outlive the workers that computed them.

    worker ── connect: name, bytes ──> broker        one per user and host; started by the first worker that needs it
           <── the memory, as a file descriptor ──   the worker maps it; the connection is its claim

An *arena* is memory of one name (a store's fingerprint). The broker never looks inside. It keeps an arena while a
worker is connected for it, and ``linger_s`` longer; without arenas it ends. If it is killed, workers keep what they
have mapped, start another broker, and offer it their memory: the first offer is taken.

The socket lies in a directory of the user's own, and both sides check the other's user id.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import mmap
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from kvrelay.config.byte_sizes import shown_bytes
from kvrelay.core.accepting import accept
from kvrelay.core.control_groups import available_bytes
from kvrelay.core.unix_sockets import short_path
from kvrelay.errors import ConfigError

_log = logging.getLogger(__name__)

MAX_MESSAGE = 512
START_S = 10.0
RETRY_S = 1.0
MAX_RETRY_S = 30.0
SOCKET_NAME = "kv-memory.sock"
_CREDENTIALS = struct.Struct("3i")


# Of a size that cannot change: memory that is cut off under a mapping ends the process that reads it (SIGBUS).
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


class Arena:
    """One piece of memory, and the connections that hold it."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd, self.num_bytes = fd, num_bytes
        self.holders: set[socket.socket] = set()
        self.free_at_s = 0.0


class Broker:
    """Serves arenas until none is left."""

    def __init__(self, listener: socket.socket, linger_s: float) -> None:
        self._linger_s = linger_s
        self._arenas: dict[str, Arena] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._idle_until_s = time.monotonic() + START_S

    def run(self) -> None:
        """Until all arenas have been unused for the linger."""
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._hear(key.fileobj)
            now_s = time.monotonic()
            for name, arena in list(self._arenas.items()):
                if not arena.holders and now_s >= arena.free_at_s:
                    os.close(self._arenas.pop(name).fd)
                    self._idle_until_s = now_s
            if not self._arenas and now_s >= self._idle_until_s:
                return

    def _wait_s(self) -> float | None:
        ends = [arena.free_at_s for arena in self._arenas.values() if not arena.holders]
        if not self._arenas:
            ends.append(self._idle_until_s)
        return max(min(ends) - time.monotonic(), 0.0) if ends else None

    def _accept(self) -> None:
        connection = accept(self._listener)
        if connection is None:
            return
        if _is_ours(connection):
            connection.settimeout(START_S)
            self._selector.register(connection, selectors.EVENT_READ)
        else:
            connection.close()

    def _hear(self, connection: socket.socket) -> None:
        """A connection's one request, or its end."""
        fds: list[int] = []
        try:
            message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 1)
            if message:
                self._give(connection, json.loads(message), fds)
                return
        except Exception as exc:  # noqa: BLE001 - no message of one worker may end the memory of the others
            with suppress(OSError):
                connection.sendall(json.dumps({"error": str(exc) or type(exc).__name__}).encode())
        finally:
            for fd in fds:
                os.close(fd)
        self._drop(connection)

    def _give(self, connection: socket.socket, wanted: dict[str, object], fds: list[int]) -> None:
        name, num_bytes = str(wanted["name"]), int(str(wanted["bytes"]))
        if num_bytes <= 0:
            raise ValueError(f"memory of {num_bytes} bytes")
        arena = self._arenas.get(name)
        if arena is not None and not arena.holders and arena.num_bytes != num_bytes:
            os.close(self._arenas.pop(name).fd)
            arena = None
        if arena is None:
            if fds:
                _check_memory(fds[0], num_bytes)
            fd = os.dup(fds[0]) if fds else _new_memory(name, num_bytes)
            arena = self._arenas[name] = Arena(fd, os.fstat(fd).st_size)
        arena.holders.add(connection)
        socket.send_fds(connection, [json.dumps({"bytes": arena.num_bytes}).encode()], [arena.fd])

    def _drop(self, connection: socket.socket) -> None:
        now_s = time.monotonic()
        for arena in self._arenas.values():
            if connection in arena.holders:
                arena.holders.remove(connection)
                arena.free_at_s = now_s + self._linger_s
        self._selector.unregister(connection)
        connection.close()


def _new_memory(name: str, num_bytes: int) -> int:
    """Raises OSError if the machine has not so much left: pages are taken as they are first used, which is too late."""
    available = available_bytes()
    if num_bytes > available:
        raise OSError(f"{shown_bytes(num_bytes)} were asked for, and the host has {shown_bytes(available)} left")
    fd = os.memfd_create(f"kvrelay-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_memory(fd: int, num_bytes: int) -> None:
    """Raises OSError unless it is sealed memory of at least this size."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise OSError("memory whose size may change")
    if os.fstat(fd).st_size < num_bytes:
        raise OSError(f"memory of {os.fstat(fd).st_size} bytes instead of {num_bytes}")


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid == os.getuid()


# -- the worker's side ------------------------------------------------------------------------------------------------


class HostMemory:
    """A worker's claim to an arena, with the memory mapped. A thread of its own waits for the broker's end, starts
    another, and offers it the memory. Raises ConfigError if no memory can be had."""

    def __init__(self, directory: Path, name: str, num_bytes: int, linger_s: float) -> None:
        self._directory, self._name, self._linger_s = directory, name, linger_s
        self._closed = threading.Event()
        if not hasattr(os, "memfd_create"):
            raise ConfigError("host_kv_cache needs Linux", param="host_kv_cache")
        try:
            self._connection, self.fd, self.num_bytes = self._claim(num_bytes, ())
            self.memory = mmap.mmap(self.fd, self.num_bytes)
            if self.num_bytes != num_bytes:
                _log.warning("host_kv_cache has %d bytes: other workers of this model began with that", self.num_bytes)
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            raise ConfigError(f"no host memory for host_kv_cache: {exc}", param="host_kv_cache") from exc
        threading.Thread(target=self._keep, name="kv-memory", daemon=True).start()

    def close(self) -> None:
        """Give the claim up. The mapping lives as long as its views. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            os.close(self.fd)

    def _claim(self, num_bytes: int, offered: tuple[int, ...]) -> tuple[socket.socket, int, int]:
        """The connection, the arena's file descriptor, and its size."""
        connection = connect(self._directory, self._linger_s)
        try:
            connection.settimeout(START_S)
            wanted = json.dumps({"name": self._name, "bytes": num_bytes}).encode()
            socket.send_fds(connection, [wanted], offered)
            answer, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 1)
            if not fds:
                raise OSError(json.loads(answer or b"{}").get("error", "the broker has ended"))
            try:
                _check_memory(fds[0], int(json.loads(answer)["bytes"]))
            except BaseException:
                os.close(fds[0])
                raise
            connection.settimeout(None)
            return connection, fds[0], os.fstat(fds[0]).st_size
        except BaseException:
            connection.close()
            raise

    def _keep(self) -> None:
        wait_s = RETRY_S
        while True:
            with suppress(OSError):
                self._connection.recv(1)  # it says nothing more: this returns at its end
            if self._closed.wait(wait_s):
                return
            try:
                connection, fd, _ = self._claim(self.num_bytes, (self.fd,))
            except (OSError, ValueError, subprocess.SubprocessError) as exc:
                _log.warning("the broker of host KV memory has ended, and none starts: %s", exc)
                wait_s = min(2 * wait_s, MAX_RETRY_S)
                continue
            wait_s = RETRY_S
            is_same = os.path.sameopenfile(fd, self.fd)
            os.close(fd)
            _log.warning(
                "the broker of host KV memory was replaced; %s",
                "the memory is the same" if is_same else "new workers do not share ours until this one restarts",
            )
            self._connection.close()
            self._connection = connection
            if self._closed.is_set():
                connection.close()
                return


def connect(directory: Path, linger_s: float) -> socket.socket:
    """A connection to the user's broker; it is started if none runs. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise OSError(f"{directory} belongs to another user")
    with suppress(OSError):
        return _connected(directory)
    with open(directory / (SOCKET_NAME + ".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(OSError):
            return _connected(directory)
        with suppress(FileNotFoundError):
            (directory / SOCKET_NAME).unlink()
        command = [sys.executable, "-m", "kvrelay.tiers.broker", str(directory), str(linger_s)]
        # Not in our process group: Ctrl-C ends workers, and prefixes outlive them.
        child = subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, close_fds=True, cwd="/"
        )
        assert child.stdout is not None
        with child.stdout:
            if child.stdout.readline() != b"ready\n":
                raise OSError("the broker of host KV memory does not start")
        # It outlives us, or it ends on its own; who waits for it is a thread that nobody waits for.
        threading.Thread(target=child.wait, name="kv-broker", daemon=True).start()
        return _connected(directory)


def _connected(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with short_path(directory, SOCKET_NAME) as path:
            connection.connect(path)
        if not _is_ours(connection):
            raise OSError("the broker belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def main() -> None:
    """``python -m kvrelay.tiers.broker DIRECTORY LINGER_S``: says ``ready`` once it listens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("linger_s", type=float)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.umask(0o077)
    with short_path(given.directory, SOCKET_NAME) as path:
        listener.bind(path)
    listener.listen(64)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    # Nobody reads what we say from now on.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    mine = os.stat(given.directory / SOCKET_NAME).st_ino
    try:
        Broker(listener, given.linger_s).run()
    finally:
        with suppress(OSError):
            if os.stat(given.directory / SOCKET_NAME).st_ino == mine:
                (given.directory / SOCKET_NAME).unlink()


if __name__ == "__main__":
    main()
