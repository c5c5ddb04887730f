"""The listening socket, and the rule for sharing its port.

The kernel spreads connections over all listeners of a port (SO_REUSEPORT), whatever they serve. So only frontends of
one cluster may share a port, and each process marks the port with its cluster's name:

    listen without SO_REUSEPORT ── done ──> we are the first, the kernel refuses a second ──> mark; allow sharing
           └── in use ──> all marks are our cluster's ──> mark, listen with SO_REUSEPORT, check the marks again
                          any other, or none ──> AddressInUseError

A mark is an abstract Unix socket: it belongs to the same network namespace as the port, and ends with its process.
On systems without abstract sockets (other than Linux) a port is not shared.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
from pathlib import Path

from kvrelay.errors import AddressInUseError, ConfigError

BACKLOG = 4096
MARK_TIMEOUT_S = 1.0
"""How long the first listener of a port may take between listening and its mark."""
_POLL_S = 0.02
_ANY_ADDRESS = {"0.0.0.0", "::"}
_UNIX_SOCKETS = Path("/proc/net/unix")


class Listener(socket.socket):
    """A listening socket together with its mark: both end with ``close``."""

    mark: socket.socket | None = None

    def close(self) -> None:
        if self.mark is not None:
            self.mark.close()
        super().close()


def open_listener(host: str, port: int, cluster: str = "") -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Listeners with the same ``cluster`` share a port; without
    ``cluster`` the port is not shared. Raises AddressInUseError, ConfigError."""
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}: {exc.strerror or exc}", param="host") from exc
    family, kind, _, _, address = infos[0]
    digest = hashlib.sha256(cluster.encode()).hexdigest()[:16] if cluster and _can_share() else ""
    try:
        listener = _listen(family, kind, address, share=False)
        if digest:
            listener.mark = _mark(str(address[0]), listener.getsockname()[1], digest)
            # Only now: until here the kernel has refused all other listeners.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return listener
    except OSError as exc:
        if not digest or exc.errno != errno.EADDRINUSE:
            raise AddressInUseError.at(host, port, exc) from exc
        return _join(family, kind, address, digest, AddressInUseError.at(host, port, exc))


def _join(
    family: socket.AddressFamily, kind: socket.SocketKind, address: tuple[object, ...], digest: str, taken: Exception
) -> Listener:
    """Listen on a port that another process uses."""
    host, port = str(address[0]), int(str(address[1]))
    deadline_s = time.monotonic() + MARK_TIMEOUT_S
    while not (marks := _marks(host, port)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    if not marks:
        raise taken
    refused = AddressInUseError(
        f"cannot listen on {host}:{port}: it belongs to a frontend of another cluster; choose another port"
    )
    if marks != {digest}:
        raise refused
    mark = _mark(host, port, digest)
    try:
        listener = _listen(family, kind, address, share=True)
    except OSError as exc:
        mark.close()
        raise taken from exc
    listener.mark = mark
    if _marks(host, port) != {digest}:
        # The port has changed hands meanwhile.
        listener.close()
        raise refused
    return listener


def _listen(
    family: socket.AddressFamily, kind: socket.SocketKind, address: tuple[object, ...], *, share: bool
) -> Listener:
    listener = Listener(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _can_share() -> bool:
    return sys.platform == "linux" and _UNIX_SOCKETS.exists()


def _prefix(port: int) -> str:
    return f"kvrelay-http/{port}/"


def _mark(host: str, port: int, digest: str) -> socket.socket:
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(mark.close)
        mark.bind(f"\0{_prefix(port)}{host}/{digest}/{os.getpid()}-{mark.fileno()}")
        on_failure.pop_all()
    return mark


def _marks(host: str, port: int) -> set[str]:
    """The clusters whose marks are on the port, at this address or at one that overlaps it."""
    prefix = f"@{_prefix(port)}"
    names = (line.split()[-1] for line in _UNIX_SOCKETS.read_text(errors="replace").splitlines() if prefix in line)
    marks = (name.removeprefix(prefix).split("/") for name in names if name.startswith(prefix))
    return {mark[1] for mark in marks if len(mark) == 3 and (mark[0] == host or {mark[0], host} & _ANY_ADDRESS)}
