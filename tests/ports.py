"""TCP ports for servers that cannot choose one themselves and tell it.

A port that the kernel has given (``bind`` to 0) and that is free again goes to whoever asks next, perhaps before the
server binds it. These are below the kernel's own range, so no connection and no other ``bind`` to 0 takes them. Each is
drawn by one process of all that run tests on this machine, for as long as it lives, and once by that one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile

_BELOW_EPHEMERAL = range(20_000, 32_000)
_order = random.SystemRandom().sample(_BELOW_EPHEMERAL, len(_BELOW_EPHEMERAL))
"""The suite's own draws are seeded, and processes that run tests side by side shall not try the same ones."""
_drawn = os.open(f"{tempfile.gettempdir()}/ports-of-kvrelay-tests-of-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)
"""A lock on byte N of this file says that port N is drawn. The end of a process ends its locks."""


def free_ports(count: int) -> list[int]:
    """So many that nobody listens at on loopback, nor is about to."""
    ports: list[int] = []
    while len(ports) < count:
        port = _order.pop()
        with socket.socket() as probe, contextlib.suppress(OSError):
            fcntl.lockf(_drawn, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports
