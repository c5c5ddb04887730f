"""The listening socket: the rule for sharing its port, its certificate, and how connections are accepted.

The kernel spreads connections over all listeners of a port (SO_REUSEPORT), whatever they serve. So only frontends of
one cluster may share a port, and each process marks the port with its cluster's name:

    listen without SO_REUSEPORT ── done ──> we are the first, the kernel refuses a second ──> mark; allow sharing
           └── in use ──> all marks are our cluster's ──> mark, listen with SO_REUSEPORT, check the marks again
                          any other, or none ──> AddressInUseError

A mark is an abstract Unix socket: it belongs to the same network namespace as the port, and ends with its process.
On systems without abstract sockets (other than Linux) a port is not shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvrelay.config.addresses import WILDCARDS, host_port
from kvrelay.errors import AddressInUseError, ConfigError

_log = logging.getLogger(__name__)

BACKLOG = 4096
MARK_TIMEOUT_S = 1.0
"""How long the first listener of a port may take between listening and its mark."""
_POLL_S = 0.02
_UNIX_SOCKETS = Path("/proc/net/unix")
MAX_ACCEPTED_PER_TURN = 32
"""Connections accepted per turn of the loop, so that a burst of connects does not delay the streams."""
PAUSE_S = 0.2
WANTED_DESCRIPTORS = 65_536
RESERVED_DESCRIPTORS = 256
"""Descriptors for everything except clients: workers, the control plane, files."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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
    family, kind, address = _place(host, port)
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
            raise AddressInUseError.at(host_port(host, port), exc) from exc
        return _join(family, kind, address, digest, AddressInUseError.at(host_port(host, port), exc))


def reserve_port(host: str, port: int) -> socket.socket:
    """A socket that keeps a port, 0 for any free one, for ``open_listener`` in other processes while it is open.

    It is bound and does not listen: the kernel gives the port to no connection and to no other bind, but to one with
    SO_REUSEADDR. A port that is only looked at could be gone before a frontend has started. Raises AddressInUseError,
    ConfigError.
    """
    family, kind, address = _place(host, port)
    reserved = socket.socket(family, kind)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(address)
    except OSError as exc:
        reserved.close()
        raise AddressInUseError.at(host_port(host, port), exc) from exc
    return reserved


def _place(host: str, port: int) -> tuple[socket.AddressFamily, socket.SocketKind, tuple[object, ...]]:
    """Where to listen. A name such as ``localhost`` may have several addresses; clients try IPv4 in any case."""
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "this is no name of a host"
        raise ConfigError(f"cannot listen on {host}: {reason or exc}", param="host") from exc
    family, kind, _, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    return family, kind, address


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
        f"cannot listen on {host_port(host, port)}: it belongs to a frontend of another cluster; choose another port"
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
    return {mark[1] for mark in marks if len(mark) == 3 and (mark[0] == host or {mark[0], host} & {*WILDCARDS})}


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one, or to the most that is ever needed."""
    try:
        import resource
    except ImportError:  # pragma: no cover - not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as exc:
            _log.warning("the limit of open files stays at %d: %s", soft, exc)


def connections_within_limit(wanted: int) -> int:
    """How many of ``wanted`` connections this process's limit of open files allows, with a reserve."""
    try:
        import resource
    except ImportError:  # pragma: no cover - not a Unix
        return wanted
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - min(RESERVED_DESCRIPTORS, soft // 2)))


class SocketAcceptor:
    """Accepts on a listening socket, which it owns, and passes each connection to ``on_accepted``.

    ``refusal`` is sent to a client for which there is no descriptor; one descriptor is kept in reserve for that.
    """

    def __init__(self, listener: socket.socket, on_accepted: Callable[[socket.socket], None], refusal: bytes) -> None:
        self._listener = listener
        self._on_accepted = on_accepted
        self._refusal = refusal
        self._spare: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening."""
        if self._pause is not None:
            self._pause.cancel()
        if self._loop is not None and self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._close_spare()

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED_PER_TURN):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno not in _SHORTAGES:
                    raise
                self._turn_away(exc)
                return
            accepted.setblocking(False)
            self._on_accepted(accepted)

    def _turn_away(self, shortage: OSError) -> None:
        """Answer one client with the reserved descriptor, and let the others wait briefly."""
        _log.warning("a client is refused: %s", shortage.strerror)
        self._close_spare()
        try:
            accepted, _ = self._listener.accept()
            with accepted:
                accepted.setblocking(False)
                accepted.send(self._refusal)
                accepted.shutdown(socket.SHUT_WR)
        except OSError as exc:
            _log.debug("nor could it be told: %s", exc)
        assert self._loop is not None
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        assert self._loop is not None
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError as exc:
            _log.debug("still short: %s", exc)
            self._pause = self._loop.call_later(PAUSE_S, self._go_on)
            return
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def server_tls(certificate: str, key: str) -> ssl.SSLContext | None:
    """The context of a listening socket from PEM files; None without a certificate. Raises ConfigError."""
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # OpenSSL would ask for the password of an encrypted key on the terminal, and block a server without one.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"cannot load the certificate {certificate} with the key {key}: {exc}") from exc
    return context
