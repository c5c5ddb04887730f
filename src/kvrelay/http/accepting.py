"""Accepts connections, a few per turn of the loop, and handles a shortage of file descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable

_log = logging.getLogger(__name__)

MAX_ACCEPTED_PER_TURN = 32
"""Connections accepted per turn of the loop, so that a burst of connects does not delay the streams."""
PAUSE_S = 0.2
WANTED_DESCRIPTORS = 65_536
RESERVED_DESCRIPTORS = 256
"""Descriptors for everything except clients: workers, the control plane, files."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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


class Acceptor:
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
