"""Accepting connections in a thread that serves others as well: no failure of ``accept`` may end it or make it spin."""

from __future__ import annotations

import logging
import socket
import time

_log = logging.getLogger(__name__)

PAUSE_S = 0.05


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection. None if its client has gone already, or if this process or the machine has no descriptor
    left: then the connection stays in the backlog, where a poll finds it again at once, hence the pause."""
    try:
        return listener.accept()[0]
    except OSError as exc:
        _log.warning("a connection is not accepted (%s)", exc.strerror or exc)
        time.sleep(PAUSE_S)
        return None
